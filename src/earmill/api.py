"""The commands as Python calls: extract, plan, verify, retry, add_features, log, compact, gc, ...

Each call does the work of the command with its name, and raises the error that the command would
print. This process is the driver of a job. Workers are processes of their own, started without this
script, so a script needs no `if __name__ == "__main__"`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earmill.jobs.console.progress import logged, logged_text, make_reporter, notebook_reporter
from earmill.pipeline.common.errors import EarmillError, SpecError
from earmill.pipeline.common.missing_modules import needed_modules
from earmill.pipeline.dataset.garbage import Collected, collect_garbage
from earmill.pipeline.dataset.revision import compact as merge
from earmill.pipeline.dataset.snapshot import LogEntry, SnapshotDiff, Which
from earmill.pipeline.dataset.snapshot import diff as compare
from earmill.pipeline.dataset.snapshot import log as read_log
from earmill.pipeline.dataset.verify import Report
from earmill.pipeline.dataset.verify import verify as check_dataset
from earmill.pipeline.driver.events import Event, JobFinished, StopRequest, ignore
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import open_output

if TYPE_CHECKING:
    from earmill.pipeline.hub.push import Pushed
    from earmill.pipeline.operations.deep_verify import DeepReport
    from earmill.pipeline.planning.estimate import JobCost

Uri = str | os.PathLike[str]
Spec = JobSpec | str | os.PathLike[str] | Mapping[str, Any]
Progress = bool | Callable[[Event], None]


class JobFailedError(EarmillError, RuntimeError):
    """A job ended without all of its shards, or with more bad rows than it allows.

    Args:
        end: Last event of the run, with its counts.
    """

    def __init__(self, end: JobFinished) -> None:
        super().__init__(end.message)
        self.end = end
        self.exit_code = end.exit_code

    def __reduce__(self) -> tuple[type[JobFailedError], tuple[JobFinished]]:
        return type(self), (self.end,)


@needed_modules("earmill.extract")
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
        spec: A job file (path or fsspec URI), a mapping of the same form, or a `JobSpec`.
        overrides: `a.b=c` strings, as for `--set`.
        resume: Continue an output that has commits of this job.
        repair: With `resume`: read every file first, and compute damaged shards again.
        update: Continue an output, and take in the changes of the source since. Only rows that were
            added or changed are computed, as a new snapshot.
        progress: True shows the progress of the command. A function is called with every event of
            `earmill.events`, in this thread.
        join: Work beside other drivers on this output, and take over shards that they leave.
        ray_address: Ray cluster to join: `run.ray_address` of the job.
        stop: Call it from another thread to end the run after the shards in flight are committed.
        check: Raise an error if the run failed; else see `exit_code` and `status`.
    Returns:
        Last event: status, rows, seconds of audio, times real time.
    Raises:
        SpecError, SourceError, OutputError, LockedError: Before any work.
        RunStopped: Source, output or cluster do not answer; the same call with `resume` continues.
        OvertakenError: Another command took the output over while this run gave no sign of life.
        JobFailedError: With `check`: the job was stopped, failed, or quarantined too many rows.
    Example:
        end = earmill.extract("job.yaml", overrides=["run.workers=2"], progress=True)
        print(end.rows_ok, end.rows_bad, end.output)
    """
    if repair and not resume:
        raise ValueError("repair needs resume=True: it continues an output")
    if repair and update:
        raise ValueError("expected repair or update, got both: repair first")
    job = JobSpec.load(spec, _listed(overrides, ray_address))
    # After the job, so that a wrong job file is reported before the rest is imported.
    from earmill.pipeline.operations.retry import damaged
    from earmill.pipeline.operations.run_job import run_job
    from earmill.pipeline.operations.update import start_update

    with _sink(progress) as sink:
        if update:
            start_update(job, sink)
        end = run_job(
            job,
            resume=resume or update,
            again=damaged if repair else None,
            sink=sink,
            stop=stop,
            join=join,
        )
    return _checked(end, check)


@needed_modules("earmill.plan")
def plan(
    spec: Spec, *, overrides: Iterable[str] = (), sample: int = 0, seed: int | None = None
) -> JobCost:
    """Estimate a job, as `earmill plan` does; nothing is written to its output.

    Args:
        spec: See `extract`.
        overrides: See `extract`.
        sample: Process this many random rows in a private folder, and scale their time and size by
            seconds of audio; 0 processes none.
        seed: With `sample`: a seed that draws the same rows again.
    Raises:
        SpecError, SourceError: The job would raise this error before any work, or no row of the
            sample can be used.
    """
    from earmill.pipeline.planning.estimate import job_cost

    job = JobSpec.load(spec, _listed(overrides))
    if sample < 0 or (not sample and seed is not None):
        raise ValueError(f"expected sample above 0 with a seed, else 0 or more, got {sample}")
    if not sample:
        return job_cost(job)
    from earmill.pipeline.operations.sample import sample as process

    sampler = partial(process, spec=job, rows=sample, seed=seed, on_begin=logged_text())
    return job_cost(job, sampler)


def verify(
    uri: Uri, *, hashes: bool = True, storage_options: Mapping[str, Any] | None = None
) -> Report:
    """Check that a dataset is whole, as `earmill verify` does.

    Args:
        uri: Output of a job: a folder or any fsspec URI.
        hashes: Read every byte and compare its sha256; else listings and small files only.
        storage_options: Options of the output's filesystem: credentials, endpoint.
    Returns:
        `ok`, and every problem as a line.
    Raises:
        OutputError: There is no dataset.
    """
    with open_output(uri, storage_options) as layout:
        return check_dataset(layout, hashes=hashes)


@needed_modules("earmill.verify_deep")
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
        uri: Output of a job. Relative paths in it refer to the folder in which the job ran.
        rows: Number of rows; all rows if there are fewer.
        seed: Seed that draws the rows; None draws a seed, which the report names.
        job: The job, for settings that dataset.json lacks: credentials of the source.
        storage_options: Options of the output's filesystem: credentials, endpoint.
    Returns:
        `ok`, counts, and every problem as a line. Rows are compared bit by bit if machine and
        packages are the same as for the dataset, else within `deep_verify.TOLERANCE`.
    Raises:
        OutputError: There is no closed dataset.
        SourceError, SourceOutage: The source cannot be read.
    """
    from earmill.pipeline.operations.deep_verify import verify_deep as check
    from earmill.pipeline.operations.retry import stored_job

    options = dict(storage_options or {})
    with open_output(uri, options) as layout:
        spec = stored_job(layout, os.fspath(uri), options, job=job)
        return check(layout, spec, rows, seed=seed, on_begin=logged_text())


@needed_modules("earmill.retry")
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
        dataset: Output of a job. Relative paths in it refer to the folder in which the job ran.
        error: Only rows of these error classes, such as `unreadable`.
        stage: Only rows that failed at these stages, such as `fetch`.
        uri: Only rows whose uri matches one of these patterns, such as `*/2019/*`.
        job: The job, for settings that dataset.json lacks: credentials of the source, `run`.
        overrides: See `extract`.
        progress: See `extract`.
        ray_address: See `extract`.
        storage_options: Options of the output's filesystem: credentials, endpoint.
        stop: See `extract`.
        check: See `extract`.
    Returns:
        Last event; None if no quarantined row matches.
    Raises:
        EarmillError: See `extract`.
    """
    from earmill.pipeline.operations.retry import RowFilter, find_retry
    from earmill.pipeline.operations.run_job import run_job
    from earmill.pipeline.operations.update import start_retry

    rows = RowFilter.of(error=error, stage=stage, uri=uri)
    spec = find_retry(
        os.fspath(dataset),
        dict(storage_options or {}),
        rows=rows,
        job=job,
        overrides=_listed(overrides, ray_address),
    )
    if spec is None:
        return None
    with _sink(progress) as sink:
        start_retry(spec, rows, sink)
        end = run_job(spec, resume=True, again=rows.choose, sink=sink, stop=stop)
    return _checked(end, check)


@needed_modules("earmill.add_features")
def add_features(
    uri: Uri,
    job: str | os.PathLike[str] | Mapping[str, Any],
    *,
    repair: bool = False,
    overrides: Iterable[str] = (),
    progress: Progress = False,
    ray_address: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    stop: StopRequest | None = None,
    check: bool = True,
) -> JobFinished:
    """Add other models' streams to the rows of a dataset, as `earmill add-features` does.

    Args:
        uri: Output of a finished job.
        job: A job file or mapping with `extract`, `name`, `run` and credentials of the source;
            source, audio and formats are the dataset's.
        repair: Read every added file first, and compute damaged shards again.
        overrides: See `extract`.
        progress: See `extract`.
        ray_address: See `extract`.
        storage_options: Options of the output's filesystem: credentials, endpoint.
        stop: See `extract`.
        check: See `extract`.
    Returns:
        Last event of the run; `open_features(uri, additions=True)` reads both.
    Raises:
        OutputError: There is no finished dataset.
        EarmillError: See `extract`.
    Example:
        earmill.add_features("features", {"extract": [{"model": "king2019", "fs_hz": 16000}]})
    """
    from earmill.pipeline.operations.add_features import add_features as add

    additions = job if isinstance(job, Mapping) else os.fspath(job)
    with _sink(progress) as sink:
        end = add(
            os.fspath(uri),
            additions,
            storage_options=dict(storage_options or {}),
            overrides=_listed(overrides, ray_address),
            sink=sink,
            stop=stop,
            repair=repair,
        )
    return _checked(end, check)


def log(uri: Uri, *, storage_options: Mapping[str, Any] | None = None) -> list[LogEntry]:
    """List the snapshots of a dataset, as `earmill log` does: the oldest first, the current last.

    Args:
        uri: Output of a job: a folder or any fsspec URI.
        storage_options: Options of the output's filesystem: credentials, endpoint.
    Raises:
        OutputError: There is no snapshot yet.
    """
    with open_output(uri, storage_options) as layout:
        return read_log(layout)


def diff(
    uri: Uri,
    before: Which = "previous",
    after: Which = "current",
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> SnapshotDiff:
    """Find the rows by which two snapshots of a dataset differ, as `earmill diff` does.

    Args:
        uri: Output of a job: a folder or any fsspec URI.
        storage_options: Options of the output's filesystem: credentials, endpoint.
        before: A number of `log`, "previous", "current", a date or a name.
        after: The same for the second snapshot.
    Raises:
        OutputError: There is no such snapshot.
    Example:
        changes = earmill.diff("features", 1, 2)
        print(changes.added, changes.changed, changes.removed)
    """
    with open_output(uri, storage_options) as layout:
        return compare(layout, before, after)


@needed_modules("earmill.compact")
def compact(
    uri: Uri,
    *,
    shard_seconds: float | None = None,
    shard_rows: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> LogEntry | None:
    """Merge small shards into larger ones, as `earmill compact` does; no value changes.

    Args:
        uri: Output of a finished job.
        shard_seconds: Most seconds of audio in a merged shard; None takes the job's.
        shard_rows: Most rows in a merged shard; None takes the job's.
        storage_options: Options of the output's filesystem: credentials, endpoint.
    Returns:
        Log entry of the new snapshot; None if there was nothing to merge.
    Raises:
        OutputError: There is no finished dataset.
        LockedError: A driver works on the output.
    """
    with open_output(uri, storage_options) as layout:
        return merge(
            layout, shard_seconds=shard_seconds, shard_rows=shard_rows, on_begin=logged_text()
        )


def gc(
    uri: Uri,
    *,
    keep: int | None = None,
    older_than: timedelta | None = None,
    grace: timedelta = timedelta(hours=24),
    dry_run: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Collected:
    """Remove files that no snapshot names, as `earmill gc` does; the current snapshot stays.

    Args:
        uri: Output of a job: a folder or any fsspec URI.
        storage_options: Options of the output's filesystem: credentials, endpoint.
        keep: Keep this many snapshots, the newest.
        older_than: Remove snapshots closed longer ago. With `keep` as well, a snapshot is removed
            only if both allow it; with neither, all snapshots stay.
        grace: Files younger than this stay in any case.
        dry_run: Only report what would be removed.
    Returns:
        Snapshots, files and bytes that were removed.
    Raises:
        OutputError: There is no closed dataset.
        LockedError: A driver works on the output.
    """
    with open_output(uri, storage_options) as layout:
        return collect_garbage(
            layout, keep=keep, older_than=older_than, grace_s=grace.total_seconds(), dry_run=dry_run
        )


@needed_modules("earmill.push")
def push(
    uri: Uri,
    hub_id: str,
    *,
    private: bool | None = None,
    revision: str = "main",
    message: str | None = None,
    verify: bool = False,
    replace: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Pushed:
    """Upload a finished dataset to the Hugging Face hub in one commit, as `earmill push` does.

    Args:
        uri: Output of a job: a folder or any fsspec URI.
        storage_options: Options of the output's filesystem: credentials, endpoint.
        hub_id: `user/name` of the repository, which is created if it is new.
        private: Visibility of a new repository; None takes the account's default.
        revision: Branch to commit to.
        message: Commit message; None writes one.
        verify: First compare the sha256 of every file, not only sizes.
        replace: Replace another dataset in the repository.
    Raises:
        OutputError: The dataset is not finished or not whole, or the id is not valid.
        HubError: The hub refuses or does not answer, or another client committed meanwhile.
        CommitError: A file has changed.
    """
    from earmill.pipeline.hub.push import contents_of
    from earmill.pipeline.hub.push import push as upload
    from earmill.pipeline.hub.repo import HubRepo

    with open_output(uri, storage_options) as layout:
        contents = contents_of(layout, hashes=verify)
    repo = HubRepo(hub_id, revision)
    return upload(layout, contents, repo, private=private, message=message, replace_other=replace)


@needed_modules("earmill.report")
def report(
    uri: Uri,
    out: Uri = "report.html",
    *,
    rows: int = 1000,
    examples: int = 4,
    row_ids: Sequence[str] = (),
    seconds: float = 10.0,
    audio: bool = True,
    job: Spec | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_begin: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write one HTML page that shows a dataset, as `earmill report` does.

    Args:
        uri: Output of a job: a folder or any fsspec URI.
        storage_options: Options of the output's filesystem: credentials, endpoint.
        out: File to write, on this machine.
        rows: Most rows of the table.
        examples: Number of rows that are shown in detail, 0 to 50.
        row_ids: Ids of these rows; if empty, they are chosen by length.
        seconds: Seconds of each example from its start, 0.1 to 120.
        audio: Embed the sound of the examples, if the source can be read.
        job: The job, for credentials of the source.
        on_begin: Called with a text before each long step.
    Returns:
        Path of the file.
    Raises:
        SourceError: There is no dataset, no commit yet, or no row with one of the ids.
        CommitError: A file of the dataset is damaged.
        OutputError: `out` cannot be written.
        ValueError: A number is out of its range.
        SpecError: `job` is not valid.
    """
    from earmill.jobs.report.build import Options, write_report

    return write_report(
        os.fspath(uri),
        Path(out),
        options=Options(rows, examples, row_ids, seconds, audio),
        storage_options=storage_options or {},
        job=None if job is None else JobSpec.load(job),
        on_begin=logged_text(on_begin),
    )


def _listed(overrides: Iterable[str], ray_address: str | None = None) -> list[str]:
    """Return the overrides of a job file, with the address of a cluster."""
    if isinstance(overrides, str):
        raise SpecError(f"overrides: expected a list of strings, got the string {overrides!r}")
    listed = list(overrides)
    for override in listed:
        if not isinstance(override, str):
            raise SpecError(f"overrides: expected strings such as 'a.b=c', got {override!r}")
    address = [] if ray_address is None else [f"run.ray_address={json.dumps(ray_address)}"]
    return listed + address


def _checked(end: JobFinished, check: bool) -> JobFinished:
    if check and end.exit_code:
        raise JobFailedError(end)
    return end


@contextmanager
def _sink(progress: Progress) -> Iterator[Callable[[Event], None]]:
    """Yield the function that receives the events of a run, and logs them."""
    if callable(progress):
        yield logged(progress)
    elif progress:
        with closing(notebook_reporter() or make_reporter()) as reporter:
            yield logged(reporter)
    else:
        yield logged(ignore)
