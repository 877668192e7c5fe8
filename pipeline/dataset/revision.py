"""Revisions: other rows, or the same rows in other shards, with all that can stay as it is.

Plan and table of copied rows are written first, then the description, put-if-absent: from then on
the dataset is that revision, not closed yet. Copies (`dataset.copied_rows`) are made before new
rows are computed. Until the dataset is closed again, the earlier snapshot counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from earmill.pipeline.common.arrow_types import MOST_EXACT
from earmill.pipeline.common.errors import OutputError, OvertakenError
from earmill.pipeline.common.gathering import within
from earmill.pipeline.dataset.commit_record import CommitRecord, commits, newest_generations
from earmill.pipeline.dataset.copied_rows import CarriedRow, carried_rows, carry_over, write_carried
from earmill.pipeline.dataset.description import Change, DatasetFile, raise_version, require_dataset
from earmill.pipeline.dataset.driver_lock import UNFENCED, Fence, held, overtaken
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.snapshot import LogEntry, is_closed, require_current
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.planning.equal_rows import Equal, copying
from earmill.pipeline.planning.make_plan import SHARD_DIGITS
from earmill.pipeline.planning.plan import Plan, plan_of
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.sources.base import Item
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.scratch import clear_scratch

# Why a revision was begun, in the log.
LICENSES, COMPACT = "licences", "compact"
NUMBERS = {"int64", "double"}
# A copy is made in memory: merged shards have no more features than this, uncompressed.
MOST_BYTES = 512 * 2**20


@dataclass(frozen=True)
class NewShard:
    """A new shard: its rows, and for each the shard and row id to copy; None to compute them."""

    items: tuple[Item, ...]
    carried: tuple[tuple[str, str], ...] | None = None


def is_finished(layout: Layout, plan: Plan) -> bool:
    """Return True if the dataset is closed as it is described now, with every shard of its plan."""
    records = commits(layout)
    return records.keys() == {s.shard_id for s in plan.shards} and is_closed(layout, records)


def begin_revision(
    layout: Layout,
    dataset: DatasetFile,
    plan: Plan,
    *,
    why: str,
    dropped: Iterable[str],
    added: Sequence[NewShard],
    about: Mapping[str, Any] | None = None,
    licenses: Mapping[str, Mapping[str, str]] | None = None,
    equal: Equal | None = None,
    fence: Fence = UNFENCED,
) -> DatasetFile:
    """Store a new description of a finished dataset; call it with the driver's lock. `about` has
    fields of `Plan` that have changed; `equal` names, for rows in the last of `added`, the computed
    rows there whose bytes they have. Raises OutputError if a carried-through column has another
    type than before, or no row is left; OvertakenError if another command was faster."""
    gone = frozenset(dropped)
    before = dataset.change
    first = before.next_shard if before else 1 + max(int(s.shard_id) for s in plan.shards)
    new = [Shard(f"{first + k:0{SHARD_DIGITS}d}", shard.items) for k, shard in enumerate(added)]
    new, copied = _with_equal(new, equal or {})
    kept = [shard for shard in plan.shards if shard.shard_id not in gone]
    if not kept and not new:
        raise OutputError(f"{layout.url()}: expected rows to be left, the change removes them all")
    kept_facts = ("skipped", "dropped", "extra_types", "extra_labels")
    facts: dict[str, Any] = {name: getattr(plan, name) for name in kept_facts}
    facts |= {"copied": copied, **(about or {})}
    types = facts["extra_types"]
    facts["extra_types"] = _joined(plan.extra_types, types)
    _check_exact([*kept, *new], facts["extra_types"], (plan.extra_types, types))
    revised = plan_of([*kept, *new], plan.spec_sha256, **facts)
    fence.check(layout)
    revised.write(layout)
    current = require_current(layout)
    newest = newest_generations(layout)
    carried = [
        CarriedRow(shard.shard_id, item.row_id, source, newest[source], row_id)
        for shard, one in zip(new, added, strict=True)
        for item, (source, row_id) in zip(one.items, one.carried or (), strict=bool(one.carried))
    ]
    change = Change(
        number=(before.number if before else 0) + 1,
        why=why,
        base=current.snapshot.path,
        plans=tuple(sorted(dataset.plan_ids - {revised.plan_id})),
        dropped=tuple(sorted(dataset.dropped | gone)),
        next_shard=first + len(new),
        carried=write_carried(layout, carried),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    description = replace(
        dataset,
        plan_id=revised.plan_id,
        extra_types=revised.extra_types,
        extra_labels=revised.extra_labels,
        licenses=dataset.licenses if licenses is None else licenses,
        change=change,
        layout_version=paths.LAYOUT_VERSION,
    )
    fence.check(layout)
    raise_version(layout)
    if not layout.create_own(description.path, description.to_json().encode()):
        raise overtaken(layout)
    look_again(layout, description, fence)
    return description


def look_again(layout: Layout, made: DatasetFile, fence: Fence) -> None:
    """Take a description back if this process was stopped just before storing it, and the files
    that it names were removed meanwhile. A whole description stays for the next run."""
    try:
        fence.check(layout)
    except OvertakenError:
        needed = [paths.plan_path(made.plan_id)]
        if made.change is not None and made.change.carried is not None:
            needed.append(made.change.carried.path)
        if not all(map(layout.exists, needed)):
            layout.remove_own(made.path, made.to_json().encode())
        raise


def restate_licenses(
    layout: Layout, wanted: Mapping[str, Mapping[str, str]], fence: Fence = UNFENCED
) -> bool:
    """Close a finished dataset again with other licences; return False if they are the same.
    Licences that `wanted` lacks stay. Call this with the driver's lock."""
    dataset = require_dataset(layout)
    licenses = {**dataset.licenses, **wanted}
    if licenses == dict(dataset.licenses):
        return False
    plan = Plan.read(layout, dataset.plan_id)
    begin_revision(
        layout, dataset, plan, why=LICENSES, dropped=(), added=(), licenses=licenses, fence=fence
    )
    finalise(layout, fence=fence)
    return True


def _with_equal(shards: Sequence[Shard], equal: Equal) -> tuple[list[Shard], int]:
    """Return the shards with `equal_to` set in their rows, and the number of shards of copies."""
    places = {item.row_id: shard.shard_id for shard in shards for item in shard.items}
    found, copied = [], 0
    for shard in shards:
        if shard.items[0].row_id in equal:
            shard = Shard(shard.shard_id, tuple(copying(shard.items, equal, places)))
            copied += 1
        found.append(shard)
    return found, copied


def _joined(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    found = {**before, **now}
    for name in before.keys() & now.keys():
        if before[name] == now[name]:
            continue
        if not {str(before[name]), str(now[name])} <= NUMBERS:
            raise OutputError(
                f"column {name!r} of the source was {before[name]} and is {now[name]} now, so its "
                "old and new rows do not fit into one table; use another output.uri"
            )
        found[name] = "double"
    return dict(sorted(found.items()))


def _check_exact(
    shards: Iterable[Shard], joined: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]
) -> None:
    """Raise OutputError if whole numbers would be rounded in a column that becomes double."""
    widened = [k for k, kind in joined.items() if any(part.get(k, kind) != kind for part in parts)]
    for shard in shards if widened else ():
        for item in shard.items:
            for name in widened:
                value = item.extra.get(name)
                if isinstance(value, int) and abs(value) > MOST_EXACT:
                    raise OutputError(
                        f"column {name!r} of the source has whole numbers and decimals, and double "
                        f"would round {value} of row {item.row_id!r}; use another output.uri"
                    )


def compact(
    layout: Layout,
    *,
    shard_seconds: float | None = None,
    shard_rows: int | None = None,
    on_begin: Callable[[str], None] = lambda text: None,
) -> LogEntry | None:
    """Merge neighbouring small shards in a new snapshot; values are the same bit for bit. After a
    kill, the same command or `extract` with --resume goes on. Limits of a merged shard that are
    None are the job's. Returns the log entry of the new snapshot, or None if nothing is small."""
    require_dataset(layout)
    with held(layout) as fence:
        # Read with the lock: another command may have changed the dataset before.
        dataset = require_dataset(layout)
        plan = Plan.read(layout, dataset.plan_id)
        if is_finished(layout, plan):
            output = dataset.spec["output"]
            limits = (shard_seconds or output["shard_seconds"], shard_rows or output["shard_rows"])
            groups = _groups(plan, commits(layout), dataset, *limits)
            if not groups:
                return None
            dataset = begin_revision(
                layout,
                dataset,
                plan,
                why=COMPACT,
                dropped=[shard.shard_id for group in groups for shard in group],
                added=[
                    NewShard(
                        tuple(item for shard in group for item in shard.items),
                        tuple((shard.shard_id, k.row_id) for shard in group for k in shard.items),
                    )
                    for group in groups
                ],
                fence=fence,
            )
            plan = Plan.read(layout, dataset.plan_id)
        there = {*commits(layout), *carried_rows(layout, dataset)}
        left = [shard.shard_id for shard in plan.shards if shard.shard_id not in there]
        if left:  # rows that are still to be computed are a job's work
            raise OutputError(
                f"{layout.url()}: expected a finished dataset, but {len(left)} of "
                f"{len(plan.shards)} shards are not committed; run `earmill extract` with --resume "
                "first"
            )
        fence.check(layout)
        clear_scratch(layout)
        carry_over(layout, dataset, plan, on_begin, fence)
        on_begin("writing the index")
        finalise(layout, fence=fence)
    return require_current(layout).entry


def _groups(
    plan: Plan,
    records: Mapping[str, CommitRecord],
    dataset: DatasetFile,
    shard_seconds: float,
    shard_rows: int,
) -> list[list[Shard]]:
    layouts = [layout_of(info) for info in dataset.streams]

    def sizes(shard: Shard) -> tuple[float, int, int]:
        record = records[shard.shard_id]
        nbytes = sum(record.frames[each.name] * each.row_bytes(record.dtype) for each in layouts)
        return (record.seconds, record.plan_rows, nbytes)

    groups = within(plan.shards, sizes, (shard_seconds, shard_rows, MOST_BYTES))
    return [group for group in groups if len(group) > 1]
