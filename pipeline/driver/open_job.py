"""A job that may start: its plan and dataset.json are stored or checked, and it says what is left.

The output is the only state: resume is the stored plan minus the commits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.common.extension_points import FORMATS, SOURCES
from earmill.pipeline.dataset.carry import carry_over
from earmill.pipeline.dataset.commit_record import BAD_BY_CLASS, CommitRecord, commits_as
from earmill.pipeline.dataset.description import (
    DatasetFile,
    check_dataset,
    open_dataset,
    read_dataset,
)
from earmill.pipeline.dataset.lease import UNFENCED, Fence
from earmill.pipeline.dataset.provenance import run_provenance
from earmill.pipeline.dataset.recompute import Again, Chooser, open_again
from earmill.pipeline.dataset.revision import look_again
from earmill.pipeline.driver import events
from earmill.pipeline.driver.shard_tracker import WITNESSES, Committed, smallest
from earmill.pipeline.driver.source_changes import update_hint
from earmill.pipeline.formats.format import BINARY
from earmill.pipeline.formats.registry import stored_streams
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.sources import Item, Source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.messages import describe_changes
from earmill.pipeline.spec.spans import warm_up_s
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.scratch import clear_scratch, sweep

if TYPE_CHECKING:
    from amtcore.features.base import Extractor


@dataclass(frozen=True)
class OpenJob:
    """A job that may start: everything is checked, the lock is held.

    Args:
        before: Commits of earlier runs. pending: Shards that have none, or are done again.
        again: The latter. copies: Shards without a commit that are copied once all others have one.
        fence: The run's right to write to the output.
        scratch: The folder of its workers below that of the output's.
    """

    spec: JobSpec
    layout: Layout
    plan: Plan
    dataset: DatasetFile
    before: dict[str, Committed]
    pending: tuple[Shard, ...]
    again: Mapping[str, Again] = field(default_factory=dict)
    copies: tuple[Shard, ...] = ()
    fence: Fence = UNFENCED
    scratch: str = field(default_factory=lambda: f"run-{secrets.token_hex(4)}")

    def started(self) -> events.JobStarted:
        """The event that opens the run."""
        records = self.before.values()
        total_s = sum(shard.seconds for shard in self.plan.shards)
        return events.JobStarted(
            job=self.spec.name,
            output=self.layout.url(),
            plan_id=self.plan.plan_id,
            shards_total=len(self.plan.shards),
            shards_done=len(self.before),
            rows_total=self.plan.rows,
            rows_ok=sum(record.rows_ok for record in records),
            rows_bad=sum(record.rows_bad for record in records),
            seconds_total=total_s,
            seconds_done=total_s - sum(shard.seconds for shard in (*self.pending, *self.copies)),
            audio_s_done=sum(record.seconds for record in records),
        )

    def witnesses(self) -> list[Item]:
        """Rows that an earlier run could read: those of its best shards."""
        bad = {name: one.rows_bad / one.rows_ok for name, one in self.before.items() if one.rows_ok}
        best = sorted(bad, key=bad.__getitem__)[:WITNESSES]
        shards = {shard.shard_id: shard for shard in self.plan.shards}
        return [smallest(shards[name]) for name in best if name in shards]


def committed_of(record: CommitRecord) -> Committed:
    """What the driver keeps of a commit record, which names every file."""
    return Committed(
        rows_ok=record.rows_ok,
        rows_bad=record.rows_bad,
        nbytes=record.nbytes,
        seconds=record.seconds,
        bad_by_class=record.info.get(BAD_BY_CLASS, {}),
        generation=record.generation,
        attempt=record.attempt,
    )


def stored_dataset(spec: JobSpec, layout: Layout) -> DatasetFile | None:
    """The output's own description, None where it is new; OutputError if it is another job's."""
    stored = read_dataset(layout)
    if stored is not None and stored.spec_sha256 != spec.sha256():
        changed = describe_changes(stored.spec, spec.canonical()) or "not visible in the spec"
        raise OutputError(
            f"{layout.url()} belongs to another spec (different: {changed}); use another output.uri"
        )
    return stored


def open_job(
    spec: JobSpec,
    layout: Layout,
    plan: Plan,
    extractors: Sequence[Extractor],
    source: Source,
    *,
    resume: bool,
    again: Chooser | None,
    beside: bool,
    stored: DatasetFile | None,
    fences: tuple[Fence, Fence] = (UNFENCED, UNFENCED),
    on_step: Callable[[str], None] = lambda text: None,
) -> OpenJob:
    """Write or check plan and dataset.json; refuse to go on unasked.

    Args:
        beside: Without the lock: other drivers may be at work, and it is one of them.
        stored: The output's description; None where it has none yet.
        fences: The right to write here, while the job is opened and for the rest of the run.
        on_step: Told what takes a while.
    """

    def may_write(layout: Layout) -> None:
        for fence in {*fences}:
            fence.check(layout)

    opening, fence = fences
    wanted = _describe(spec, plan, extractors)
    if stored is None:
        may_write(layout)
        plan.write(layout)
        dataset = open_dataset(layout, wanted, may_write)
        look_again(layout, dataset, opening)
    else:
        check_dataset(stored, wanted)
        dataset = stored
    chosen = again(layout) if again is not None else {}
    before = commits_as(layout, committed_of, without=chosen)
    if before and not (resume or beside):
        raise OutputError(
            f"{layout.url()} already holds {len(before)} of {len(plan.shards)} shards of this job; "
            f"add --resume to go on with it{update_hint(source, plan)}, or use another output.uri"
        )
    may_write(layout)
    if not beside:
        clear_scratch(layout)
    sweep()  # a run without pending shards starts no Ray, which would do it
    if not beside and carry_over(layout, dataset, plan, on_step, opening):
        before = commits_as(layout, committed_of, without=chosen)
    left = [shard for shard in plan.shards if shard.shard_id not in before]
    waiting = {shard.shard_id for shard in plan.copies} - chosen.keys()
    copies = tuple(shard for shard in left if shard.shard_id in waiting)
    pending = tuple(shard for shard in left if shard.shard_id not in waiting)
    may_write(layout)
    again_ = open_again(layout, chosen)
    return OpenJob(spec, layout, plan, dataset, before, pending, again_, copies, fence)


def _describe(spec: JobSpec, plan: Plan, extractors: Sequence[Extractor]) -> DatasetFile:
    described = [extractor.describe() for extractor in extractors]
    return DatasetFile(
        name=spec.name,
        spec=spec.canonical(),
        spec_sha256=spec.sha256(),
        plan_id=plan.plan_id,
        streams=tuple(
            info.to_dict()
            for model in extractors
            for info in stored_streams(model.streams, spec.output.dtype, spec.output.formats)
        ),
        buffers_sha256={
            _unique(index, spec): model.buffers_sha256() for index, model in enumerate(extractors)
        },
        provenance=run_provenance(described, device=spec.run.device, dtype=spec.output.dtype)
        | {"extensions": _extensions(spec)}
        | _spans(spec, extractors),
        parquet_form=spec.output.parquet_form or BINARY,
        licenses=spec.licenses.to_dict(),
        extra_types=plan.extra_types,
        extra_labels=plan.extra_labels,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _extensions(spec: JobSpec) -> dict[str, object]:
    """The distributions that bring the job's source and formats: what a reader may have to get."""
    return {
        "source": SOURCES.owner(spec.source.kind),
        "formats": {name: FORMATS.owner(name) for name in spec.output.formats},
    }


def _spans(spec: JobSpec, extractors: Sequence[Extractor]) -> dict[str, object]:
    """How long recordings were cut, and what the models heard before each span."""
    if spec.audio.spans is None:
        return {}
    warm_s = warm_up_s(spec.audio.spans, extractors, [entry.model for entry in spec.extract])
    return {"spans": {"seconds": spec.audio.spans.seconds, "warm_up_s": warm_s}}


def _unique(index: int, spec: JobSpec) -> str:
    """The model's name; a second entry of the same model gets a number."""
    name = spec.extract[index].model
    earlier = sum(entry.model == name for entry in spec.extract[:index])
    return f"{name}#{earlier}" if earlier else name
