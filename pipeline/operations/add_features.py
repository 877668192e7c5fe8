"""Add another model's streams to the rows of a dataset.

An addition is a dataset below `additions/<name>`, with the good rows of the current snapshot in the
same shards. When its job is finished, a new snapshot of the dataset names it. After rows have
changed, the next snapshot drops it, until the same command has computed the new rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from earmill.pipeline.common.errors import OutputError, OvertakenError, SpecError
from earmill.pipeline.dataset.commit_record import some
from earmill.pipeline.dataset.description import DatasetFile, require_dataset
from earmill.pipeline.dataset.driver_lock import held, overtaken
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.revision import is_finished
from earmill.pipeline.dataset.snapshot import (
    Current,
    facts_of,
    good_plan_rows,
    read_current,
    read_snapshot,
    require_current,
)
from earmill.pipeline.driver import events
from earmill.pipeline.operations.open_job import compare, stored_dataset
from earmill.pipeline.operations.retry import damaged
from earmill.pipeline.operations.run_job import EXIT_FAILED, run_job
from earmill.pipeline.operations.update import UPDATE, finished_job
from earmill.pipeline.planning.make_plan import check_listeners
from earmill.pipeline.planning.plan import Plan, plan_of
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec, read_mapping
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import addition_path

# Facts by which the audio of rows is compared.
HEARD = ("bytes_sha256", "pcm_sha256", "reference_pcm_sha256")


def add_features(
    uri: str,
    job: str | Mapping[str, Any],
    *,
    storage_options: Mapping[str, Any] | None = None,
    overrides: Iterable[str] = (),
    sink: events.Sink = events.ignore,
    stop: events.StopRequest | None = None,
    repair: bool = False,
) -> events.JobFinished:
    """Compute other models' streams for the rows of a dataset that lack them. `job` has `extract`,
    and perhaps `name`, `run` and `source.storage_options`; the other sections are the dataset's.
    With `repair` every added file is read, and damaged shards of them are computed again.
    Raises OvertakenError if the dataset changed meanwhile, and the errors of `run_job`."""
    layout = Layout.open(uri, storage_options)
    dataset, plan = _finished(layout)
    current = require_current(layout)
    spec, name = _spec_of(dataset, uri, job, storage_options or {}, overrides)
    place = Layout.open(spec.output.uri, storage_options)
    good = good_plan_rows(layout, read_snapshot(layout, current))
    shards = [
        Shard(shard.shard_id, items)
        for shard in plan.shards
        if (items := tuple(item for item in shard.items if item.row_id in good))
    ]
    if not shards:
        raise OutputError(f"{layout.url()}: expected good rows to add features to, got none")
    check_listeners(spec, plan.extra_types)
    rows = plan_of(
        shards, spec.sha256(), extra_types=plan.extra_types, extra_labels=plan.extra_labels
    )

    def quiet(event: events.Event) -> None:
        # The rows are the dataset's, so changes of the source's listing do not matter.
        if not isinstance(event, events.SourceChanged):
            sink(event)

    again = damaged if repair else None
    stored_dataset(spec, place, "give the job another name")
    while True:
        _check_unchanged(layout, current)
        _take_changes(spec, rows)
        end = run_job(spec, resume=True, again=again, plan=rows, sink=quiet, stop=stop)
        if end.exit_code == EXIT_FAILED:
            return end
        # An addition that was cut off is finished as planned, before changes are taken in.
        if not compare(_finished(place)[1].items(), rows.items()):
            break
    made = read_current(place)
    if made is None:
        raise overtaken(place)
    _check_same_audio(layout, current, place, made)
    with held(layout) as fence:
        _check_unchanged(layout, current)
        file = replace(made.snapshot, path=f"{addition_path(name)}/{made.snapshot.path}")
        finalise(layout, add={name: file}, fence=fence)
    return end


def _check_unchanged(layout: Layout, current: Current) -> None:
    """Raise OvertakenError unless the snapshot whose rows the features belong to is current."""
    if read_current(layout) != current:
        raise OvertakenError(
            f"{layout.url()}: another command changed or removed the dataset after this one began; "
            "run this command again"
        )


def _check_same_audio(layout: Layout, current: Current, place: Layout, made: Current) -> None:
    """Raise OutputError if the features were added to rows of other audio than the dataset's."""
    own, added = (
        facts_of(where, snapshot, snapshot.commits, HEARD)
        for where, snapshot in (
            (layout, read_snapshot(layout, current)),
            (place, read_snapshot(place, made)),
        )
    )
    both = own.keys() & added.keys()
    changed = [row_id for row_id in both if not _is_same(own[row_id], added[row_id])]
    if changed:
        raise OutputError(
            f"{layout.url()}: expected the audio that the dataset was made of, got other audio in "
            f"{len(changed):,} rows ({some(changed)}); run `earmill extract` with --update, then "
            "this command again"
        )


def _is_same(own: Sequence[object], added: Sequence[object]) -> bool:
    """Return False if one of `HEARD` differs. The bytes of a file decide if both rows have their
    hash, because another release of a decoder may give other samples."""
    pairs = zip(own, added, strict=True)
    file, samples, reference = (None if None in pair else pair[0] == pair[1] for pair in pairs)
    return (samples if file is None else file) is not False and reference is not False


def _finished(layout: Layout) -> tuple[DatasetFile, Plan]:
    dataset = require_dataset(layout)
    plan = Plan.read(layout, dataset.plan_id)
    if not is_finished(layout, plan):
        raise OutputError(
            f"{layout.url()}: expected a finished dataset; run `earmill extract` with --resume"
        )
    return dataset, plan


def _spec_of(
    dataset: DatasetFile,
    uri: str,
    job: str | Mapping[str, Any],
    storage_options: Mapping[str, Any],
    overrides: Iterable[str],
) -> tuple[JobSpec, str]:
    where, given = ("job", job) if isinstance(job, Mapping) else read_mapping(job)
    if not isinstance(given, Mapping) or not given.get("extract"):
        raise SpecError(f"{where}: expected a mapping with extract: the models to add")
    models = [str(entry.get("model")) for entry in given["extract"] if isinstance(entry, Mapping)]
    name = str(given.get("name") or "-".join(models))
    try:
        place = f"{uri.rstrip('/')}/{addition_path(name)}"
    except ValueError as error:
        raise SpecError(f"{where}: name: {error}") from error
    source = dict(given.get("source") or {})
    known = {key: source[key] for key in ("storage_options",) if key in source}
    spec = {
        **dataset.spec,
        "name": name,
        "source": {**dataset.spec["source"], **known},
        "extract": given["extract"],
        "output": {**dataset.spec["output"], "uri": place, "storage_options": storage_options},
        "licenses": dataset.licenses,
        **({"run": given["run"]} if "run" in given else {}),
    }
    return JobSpec.load(spec, overrides=overrides), name


def _take_changes(spec: JobSpec, rows: Plan) -> None:
    """Begin a revision for rows that have changed since the addition was finished."""
    with finished_job(spec) as job:
        if job is not None and (changes := compare(job.plan.items(), rows.items())):
            source = open_source(spec.source, spec.audio.array_rate_hz)
            # This source has listed no rows, so it does not know the types of their columns.
            about = {"extra_types": rows.extra_types, "extra_labels": rows.extra_labels}
            job.revise(source, [*rows.items()], changes, UPDATE, about)
