"""An opened job: its plan, its description, the shards without a commit, and changes of its source.
A stored plan never changes, whatever the source lists now."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import zip_longest

from earmill.pipeline.common.errors import EarmillError, OutputError
from earmill.pipeline.common.extension_points import FORMATS, SOURCES
from earmill.pipeline.dataset.commit_record import Committed, Recommit, some
from earmill.pipeline.dataset.description import DatasetFile, read_dataset
from earmill.pipeline.dataset.driver_lock import UNFENCED, Fence, Heartbeat
from earmill.pipeline.dataset.provenance import run_provenance
from earmill.pipeline.driver import events
from earmill.pipeline.driver.shard_ledger import WITNESSES, smallest
from earmill.pipeline.formats.format import BINARY, stored_streams
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.shards import Shard, extra_json
from earmill.pipeline.sources.base import Item, Reference, Source, listing
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.messages import describe_changes
from earmill.pipeline.spec.models import BuiltModel
from earmill.pipeline.spec.spans import warm_up_s
from earmill.pipeline.storage.layout import Layout

WHAT_TO_DO = "this output keeps to its plan: `earmill extract` with --update takes them in"


@dataclass(frozen=True)
class Changes:
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        """`rows: 2 added ('a.wav', 'b.wav'), 1 changed ('c.wav')`."""
        kinds = (("added", self.added), ("removed", self.removed), ("changed", self.changed))
        parts = [f"{len(names):,} {what} ({some(names)})" for what, names in kinds if names]
        return f"rows: {', '.join(parts)}"


def compare(planned: Iterable[Item], listed: Iterable[Item]) -> Changes:
    """Return how a listing differs from the plan in rows, places, tags, sizes, times or columns.
    Both have one order, so they are read side by side; only rows without a partner are held."""
    old, new = dict[str, Item](), dict[str, Item]()
    changed = list[str]()
    for was, now in zip_longest(planned, listed):
        for item, own, others in ((now, new, old), (was, old, new)):
            if item is None:
                continue
            found = others.pop(item.row_id, None)
            if found is None:
                own[item.row_id] = item
                continue
            before, after = (found, item) if own is new else (item, found)
            if other_audio(before, after) or extra_json(found.extra) != extra_json(item.extra):
                changed.append(item.row_id)
    return Changes(tuple(sorted(new)), tuple(sorted(old)), tuple(sorted(changed)))


def other_audio(old: Item, new: Item) -> bool:
    """Return True if the audio or its reference recording may have changed, by place, span, variant
    and tag. Without a tag, size and time decide."""
    places = [(item.uri, item.start_s, item.end_s, item.variant) for item in (old, new)]
    if places[0] != places[1] or _other_file(old, new):
        return True
    if old.reference is None or new.reference is None:
        return old.reference is not new.reference
    is_moved = old.reference.uri != new.reference.uri
    return is_moved or _other_file(old.reference, new.reference)


def other_features(old: Item, new: Item, columns: Sequence[str]) -> bool:
    """Return True if the audio, or a column that decides features, may have changed."""
    return other_audio(old, new) or any(old.extra.get(c) != new.extra.get(c) for c in columns)


def _other_file(old: Item | Reference, new: Item | Reference) -> bool:
    if old.etag is not None and new.etag is not None:
        return old.etag != new.etag
    was, now = ((one.size, one.mtime) for one in (old, new))
    if (old.etag, *was) == (None, None, None):
        # The file was not there at the earlier listing, so no later change of it would show.
        return (new.etag, *now) != (None, None, None)
    pairs = zip(was, now, strict=True)
    return any(one is not None and other is not None and one != other for one, other in pairs)


def source_changed(source: Source, plan: Plan) -> events.SourceChanged | None:
    try:
        found = compare(plan.items(), listing(source))
    except EarmillError as error:
        text = f"the source could not be listed again, so changes in it would not show: {error}"
        return events.SourceChanged(added=0, removed=0, changed=0, text=text)
    if not found:
        return None
    return events.SourceChanged(
        added=len(found.added),
        removed=len(found.removed),
        changed=len(found.changed),
        text=f"the source differs from the plan, {found}; {WHAT_TO_DO}",
    )


@dataclass(frozen=True)
class OpenJob:
    spec: JobSpec
    layout: Layout
    plan: Plan
    dataset: DatasetFile
    before: dict[str, Committed]
    pending: tuple[Shard, ...]
    again: Mapping[str, Recommit] = field(default_factory=dict)
    copies: tuple[Shard, ...] = ()
    lease: Heartbeat | None = None  # None for a driver beside others that only closes.
    scratch: str = field(default_factory=lambda: f"run-{secrets.token_hex(4)}")

    @property
    def fence(self) -> Fence:
        """The run's right to write to the output."""
        return UNFENCED if self.lease is None else self.lease.fence

    def started(self) -> events.JobStarted:
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
        """Return rows of the best shards of earlier runs, to test the source with."""
        bad = {name: one.rows_bad / one.rows_ok for name, one in self.before.items() if one.rows_ok}
        best = sorted(bad, key=bad.__getitem__)[:WITNESSES]
        shards = {shard.shard_id: shard for shard in self.plan.shards}
        return [smallest(shards[name]) for name in best if name in shards]


def stored_dataset(
    spec: JobSpec, layout: Layout, advice: str = "use another output.uri"
) -> DatasetFile | None:
    """Return the output's description; None if the output is new, OutputError if of another job."""
    stored = read_dataset(layout)
    if stored is not None and stored.spec_sha256 != spec.sha256():
        changed = describe_changes(stored.spec, spec.canonical()) or "not visible in the spec"
        raise OutputError(
            f"{layout.url()} belongs to another spec (different: {changed}); {advice}"
        )
    return stored


def describe(spec: JobSpec, plan: Plan, models: Sequence[BuiltModel]) -> DatasetFile:
    """Return the description of a new dataset of a job."""
    records, descriptions = [m.record for m in models], [m.description for m in models]
    names = [entry.model for entry in spec.extract]
    buffers = {}
    for index, record in enumerate(records):
        earlier = names[:index].count(names[index])  # a second entry of a model has a number
        name = f"{names[index]}#{earlier}" if earlier else names[index]
        buffers[name] = record["buffers_sha256"]
    provenance = run_provenance(records, device=spec.run.device, dtype=spec.output.dtype)
    # Distributions of the job's source and formats, which a reader may need.
    provenance["extensions"] = {
        "source": SOURCES.owner(spec.source.kind),
        "formats": {name: FORMATS.owner(name) for name in spec.output.formats},
    }
    if spec.audio.spans is not None:
        warm_s = warm_up_s(spec.audio.spans, descriptions, names)
        provenance["spans"] = {"seconds": spec.audio.spans.seconds, "warm_up_s": warm_s}
    return DatasetFile(
        name=spec.name,
        spec=spec.canonical(),
        spec_sha256=spec.sha256(),
        plan_id=plan.plan_id,
        streams=tuple(
            info.to_dict()
            for model in descriptions
            for info in stored_streams(model.streams, spec.output.dtype, spec.output.formats)
        ),
        buffers_sha256=buffers,
        provenance=provenance,
        parquet_form=spec.output.parquet_form or BINARY,
        licenses=spec.licenses.to_dict(),
        extra_types=plan.extra_types,
        extra_labels=plan.extra_labels,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
