"""The commands as Python calls: extract, plan, verify, retry, add_features.

Each does what the command of its name does and raises what the command would print. A job runs in
this process as the driver, with its workers in processes of their own (Ray), so a script that calls
it needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.errors import EarmillError, SpecError
from earmill.pipeline.spec.job import JobSpec
from earmill.upkeep import Uri, opened_layout

if TYPE_CHECKING:
    from earmill.pipeline.dataset.recompute import Chooser
    from earmill.pipeline.dataset.verify import Report
    from earmill.pipeline.driver.deep_verify import DeepReport
    from earmill.pipeline.driver.events import Event, JobFinished
    from earmill.pipeline.driver.stop_request import StopRequest
    from earmill.pipeline.planning.estimate import JobCost

Spec = JobSpec | str | os.PathLike[str] | Mapping[str, Any]
Progress = bool | Callable[["Event"], None]


class JobFailedError(EarmillError, RuntimeError):
    """A job ended without all of its shards, or with more bad rows than it allows.

    Args:
        end: The last event of the run, with its counts.
    """

    def __init__(self, end: JobFinished) -> None:
        super().__init__(end.message)
        self.end = end
        self.exit_code = end.exit_code

    def __reduce__(self) -> tuple[type[JobFailedError], tuple[JobFinished]]:
        return type(self), (self.end,)


def extract(
    spec: Spec,
    *,
    overrides: Iterable[str] = (),
    resume: bool = False,
    repair: bool = False,
    update: bool = False,
    progress: Progress = False,
    join: bool = False,
    ray_address: str | None = None,
    stop: StopRequest | None = None,
    check: bool = True,
) -> JobFinished:
    """Run a job to its end, as `earmill extract` does.

    Args:
        spec: A job file (path or fsspec URI), a mapping of the same shape, or a `JobSpec`.
        overrides: `a.b=c` strings, as of `--set`.
        resume: Go on with an output that holds commits of this job.
        repair: With `resume`: read every file first, and compute damaged shards again.
        update: Go on with an output as well, and take in what has changed in the source since: only
            rows that were added or changed are computed, as a new snapshot.
        progress: True shows what the command shows; a function is called with every event of
            `earmill.events`, in this thread.
        join: Work beside other drivers on this output, and go on with what they leave.
        ray_address: Cluster to join; None takes RAY_ADDRESS, else a private Ray is started.
        stop: Call it, from another thread, to end the run once what is in flight is committed.
        check: Raise where the run did not end well; else look at `exit_code` and `status`.
    Returns:
        The last event: status, rows, seconds of audio, times real time.
    Raises:
        SpecError, SourceError, OutputError, LockedError: Before any work.
        RunStopped: Source, output or cluster are away; the same call with `resume` goes on.
        OvertakenError: Another command took the output over while this run gave no sign of life.
        JobFailedError: With `check`, a job that was stopped, failed, or quarantined too much.
    Example:
        end = earmill.extract("job.yaml", overrides=["run.workers=2"], progress=True)
        print(end.rows_ok, end.rows_bad, end.output)
    """
    from earmill.pipeline.dataset.recompute import damaged

    if repair and not resume:
        raise ValueError("repair goes on with an output: give resume=True as well")
    if repair and update:
        raise ValueError("expected repair or update, got both: repair first")
    job = _loaded(spec, overrides)
    again = damaged if repair else None
    if update:
        from earmill.pipeline.driver.update import start_update

        with _sink(progress) as sink:
            start_update(job, sink)
    return _run(job, resume or update, again, progress, ray_address, stop, check, join)


def plan(
    spec: Spec,
    *,
    overrides: Iterable[str] = (),
    measure: bool = False,
    sample: int = 0,
    seed: int | None = None,
) -> JobCost:
    """What a job would do and cost, as `earmill plan` shows it; writes nothing to its output.

    Args:
        spec, overrides: As for `extract`.
        measure: Time the job's models here first, which takes seconds and is remembered; else the
            time is that of what ran here before, or of a built-in reference.
        sample: Process this many random rows in a private folder, and scale what they take and
            weigh by seconds of audio; 0 processes none.
        seed: With `sample`: draws the same rows again.
    Raises:
        SpecError, SourceError: What the job would raise before any work; no row of the sample can
            be used.
    """
    from earmill.pipeline.planning.estimate import job_cost

    job = _loaded(spec, overrides)
    if sample < 0 or (not sample and seed is not None):
        raise ValueError(f"expected sample above 0 with a seed, else 0 or more, got {sample}")
    if not sample:
        return job_cost(job, measure=measure)
    from earmill.jobs.console.progress import logged_text
    from earmill.pipeline.driver.sample import sample as process

    sampler = partial(process, spec=job, rows=sample, seed=seed, on_begin=logged_text())
    return job_cost(job, measure=measure, sampler=sampler)


def verify(
    uri: Uri, *, hashes: bool = True, storage_options: Mapping[str, Any] | None = None
) -> Report:
    """Check that a dataset is whole, as `earmill verify` does.

    Args:
        uri: Output of a job: a folder or any fsspec URI.
        hashes: Read every byte and compare its sha256; else listings and small files only.
        storage_options: For the filesystem: credentials, endpoint.
    Returns:
        `ok`, and every problem as a line.
    Raises:
        OutputError: No dataset there.
    """
    from earmill.pipeline.dataset.verify import verify as check

    with opened_layout(uri, storage_options) as layout:
        return check(layout, hashes=hashes)


def verify_deep(
    uri: Uri,
    rows: int,
    *,
    seed: int | None = None,
    job: Spec | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> DeepReport:
    """Compute random rows again from their source and compare, as `earmill verify --deep` does.

    Args:
        uri: Output of a job; run it where the job ran, as relative paths are relative to that.
        rows: How many; all if there are not so many.
        seed: Draws the rows; None draws a seed as well, which the report names.
        job: The job, where dataset.json does not say all: credentials of the source.
        storage_options: Of the place.
    Returns:
        `ok`, counts, and every problem as a line. Rows are compared bit by bit where machine and
        packages are those that made them, else within `deep_verify.TOLERANCE`.
    Raises:
        OutputError: No closed dataset there. SourceError, SourceOutage: The source is away.
    """
    from earmill.jobs.console.progress import logged_text
    from earmill.pipeline.driver.deep_verify import verify_deep as check
    from earmill.pipeline.driver.stored_job import stored_job

    options = dict(storage_options or {})
    with opened_layout(uri, options) as layout:
        known = None if job is None else _job(job)
        spec = stored_job(layout, os.fspath(uri), options, job=known)
        return check(layout, spec, rows, seed=seed, on_begin=logged_text())


def retry(
    dataset: Uri,
    /,
    *,
    error: str | Iterable[str] = (),
    stage: str | Iterable[str] = (),
    uri: str | Iterable[str] = (),
    job: Spec | None = None,
    overrides: Iterable[str] = (),
    progress: Progress = False,
    ray_address: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    stop: StopRequest | None = None,
    check: bool = True,
) -> JobFinished | None:
    """Try quarantined rows again, as `earmill retry` does.

    Args:
        dataset: Output of a job; run it where the job ran, as relative paths are relative to that.
        error: Only rows of these error classes, such as `unreadable`.
        stage: Only rows that failed at these stages, such as `fetch`.
        uri: Only rows whose uri matches one of these patterns, such as `*/2019/*`.
        job: The job, where dataset.json does not say all: credentials of the source, `run`.
        overrides, progress, ray_address, stop, check: As for `extract`.
        storage_options: Of the place.
    Returns:
        The last event; None where no quarantined row matches.
    Raises:
        As `extract`.
    """
    from earmill.pipeline.dataset.recompute import RowFilter
    from earmill.pipeline.driver.stored_job import find_retry
    from earmill.pipeline.driver.update import start_retry

    rows = RowFilter.of(error=error, stage=stage, uri=uri)
    found = find_retry(
        os.fspath(dataset),
        dict(storage_options or {}),
        rows=rows,
        job=None if job is None else _job(job),
        overrides=_listed(overrides),
    )
    if found is None:
        return None
    spec, choose = found
    with _sink(progress) as sink:
        start_retry(spec, rows, sink)
    return _run(spec, True, choose, progress, ray_address, stop, check)


def add_features(
    uri: Uri,
    job: str | os.PathLike[str] | Mapping[str, Any],
    *,
    overrides: Iterable[str] = (),
    progress: Progress = False,
    ray_address: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    stop: StopRequest | None = None,
    check: bool = True,
) -> JobFinished:
    """Put other models' streams beside the rows of a dataset, as `earmill add-features` does.

    Args:
        uri: Output of a job that has finished. storage_options: Of the place.
        job: A job file or mapping, of which `extract`, `name`, `run` and credentials of the source
            are taken: source, audio and formats are the dataset's.
        overrides, progress, ray_address, stop, check: As for `extract`.
    Returns:
        The last event of the run; `open_features(uri, additions=True)` reads both.
    Raises:
        OutputError: No finished dataset there. Else as `extract`.
    Example:
        earmill.add_features("features", {"extract": [{"model": "king2019", "fs_hz": 16000}]})
    """
    from earmill.pipeline.driver.add_features import add_features as add

    given = job if isinstance(job, Mapping) else os.fspath(job)
    with _sink(progress) as sink:
        end = add(
            os.fspath(uri),
            given,
            storage_options=dict(storage_options or {}),
            overrides=_listed(overrides),
            sink=sink,
            ray_address=ray_address,
            stop=stop,
        )
    if check and end.exit_code:
        raise JobFailedError(end)
    return end


def _loaded(spec: Spec, overrides: Iterable[str]) -> JobSpec:
    """The spec with its overrides.

    Raises:
        SpecError: What is wrong with it, in one line.
    """
    return JobSpec.load(_job(spec), _listed(overrides))


def _job(spec: Spec) -> JobSpec | Mapping[str, Any] | str:
    """A job as `JobSpec.load` takes it; SpecError where it is none."""
    if isinstance(spec, JobSpec | Mapping):
        return spec
    if isinstance(spec, str | os.PathLike):
        return os.fspath(spec)
    raise SpecError(
        f"expected a job file, a mapping or a JobSpec, got {type(spec).__name__}; "
        'earmill.extract("job.yaml")'
    )


def _listed(overrides: Iterable[str]) -> list[str]:
    if isinstance(overrides, str):
        raise SpecError(f"overrides: expected a list of strings, got the string {overrides!r}")
    listed = list(overrides)
    for override in listed:
        if not isinstance(override, str):
            raise SpecError(f"overrides: expected strings such as 'a.b=c', got {override!r}")
    return listed


def _run(
    spec: JobSpec,
    resume: bool,
    again: Chooser | None,
    progress: Progress,
    ray_address: str | None,
    stop: StopRequest | None,
    check: bool,
    join: bool = False,
) -> JobFinished:
    from earmill.pipeline.driver.run import run_job

    with _sink(progress) as sink:
        end = run_job(
            spec,
            resume=resume,
            again=again,
            sink=sink,
            ray_address=ray_address,
            stop=stop,
            join=join,
        )
    if check and end.exit_code:
        raise JobFailedError(end)
    return end


@contextmanager
def _sink(progress: Progress) -> Iterator[Callable[[Event], None]]:
    """Where the events of a run go, the logger `earmill` among them."""
    from earmill.jobs.console.progress import logged, make_reporter, notebook_reporter
    from earmill.pipeline.driver import events

    if callable(progress):
        yield logged(progress)
    elif progress:
        reporter = notebook_reporter() or make_reporter()
        try:
            yield logged(reporter)
        finally:
            reporter.close()
    else:
        yield logged(events.ignore)
