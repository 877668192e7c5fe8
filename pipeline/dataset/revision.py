"""Begin a revision: other rows, or the same in other shards, with all that can stay as it is.

What it needs is written first (plan, table of copied rows), then its description, put-if-absent;
from then on the dataset is that revision, not closed yet. Shards of new rows are computed by the
next run, copies made before that; a run that is killed goes on with what has no commit. Until the
dataset is closed again, the snapshot of before counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from earmill.pipeline.common.errors import CommitError, OutputError, OvertakenError
from earmill.pipeline.dataset.carry import CarriedRow, write_carried
from earmill.pipeline.dataset.commit_record import commits, generations
from earmill.pipeline.dataset.description import Change, DatasetFile, raise_version, read_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.lease import UNFENCED, Fence, overtaken
from earmill.pipeline.dataset.snapshot import is_closed, read_current
from earmill.pipeline.planning.equal_rows import Equal, copying
from earmill.pipeline.planning.make_plan import SHARD_DIGITS
from earmill.pipeline.planning.plan import Plan, plan_of
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.sources.base import Item
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import LAYOUT_VERSION, plan_path

NUMBERS = {"int64", "double"}
# Why, in the log.
LICENSES = "licences"


@dataclass(frozen=True)
class NewShard:
    """A shard that a revision adds.

    Args:
        items: Its rows.
        carried: For each of them the shard and row id that has its features; None to compute them.
    """

    items: tuple[Item, ...]
    carried: tuple[tuple[str, str], ...] | None = None


def is_finished(layout: Layout, plan: Plan) -> bool:
    """Whether the dataset is closed as it is described now, with every shard of its plan."""
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
    """Describe the dataset anew; call it with the driver's lock, on a finished dataset.

    Args:
        plan: The stored one. why: As the log is to say it.
        dropped: Shards that go. added: Those that come, in order.
        about: What the plan says of the source, where that has changed: fields of `Plan`.
        licenses: Where they have changed, all of them.
        equal: Rows of the last of `added` that have the bytes of others there, which are computed.
        fence: The right of the command to write here.
    Raises:
        OutputError: A carried-through column has another type than before, or no row is left.
        OvertakenError: Another command has taken the output over, or began a revision meanwhile.
    """
    gone = frozenset(dropped)
    before = dataset.change
    first = before.next_shard if before else 1 + max(int(s.shard_id) for s in plan.shards)
    new = [Shard(f"{first + k:0{SHARD_DIGITS}d}", shard.items) for k, shard in enumerate(added)]
    new, copied = _with_equal(new, equal or {})
    kept = [shard for shard in plan.shards if shard.shard_id not in gone]
    if not kept and not new:
        raise OutputError(f"{layout.url()}: expected rows to be left, the change removes them all")
    facts: dict[str, Any] = {"skipped": plan.skipped, "dropped": plan.dropped}
    facts |= {"extra_types": plan.extra_types, "extra_labels": plan.extra_labels}
    facts |= {"copied": copied, **(about or {})}
    facts["extra_types"] = _joined(plan.extra_types, facts["extra_types"])
    revised = plan_of([*kept, *new], plan.spec_sha256, **facts)
    fence.check(layout)
    revised.write(layout)
    current = read_current(layout)
    if current is None:
        raise CommitError(f"{layout.url()}: expected a closed dataset; run the job to its end")
    change = Change(
        number=(before.number if before else 0) + 1,
        why=why,
        base=current.snapshot.path,
        plans=tuple(sorted(dataset.plan_ids - {revised.plan_id})),
        dropped=tuple(sorted({*(before.dropped if before else ()), *gone})),
        next_shard=first + len(new),
        carried=write_carried(layout, _carried(layout, new, added)),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    description = replace(
        dataset,
        plan_id=revised.plan_id,
        extra_types=revised.extra_types,
        extra_labels=revised.extra_labels,
        licenses=dataset.licenses if licenses is None else licenses,
        change=change,
        layout_version=LAYOUT_VERSION,
    )
    fence.check(layout)
    raise_version(layout)
    if not layout.create_own(description.path, description.to_json().encode()):
        raise overtaken(layout)
    look_again(layout, description, fence)
    return description


def look_again(layout: Layout, made: DatasetFile, fence: Fence) -> None:
    """Take a description back where this process was stopped just before it was stored, and the
    files that it names were removed meanwhile. One that is whole stays, for the next run.

    Raises:
        OvertakenError: Another command has taken the output over.
    """
    try:
        fence.check(layout)
    except OvertakenError:
        needed = [plan_path(made.plan_id)]
        if made.change is not None and made.change.carried is not None:
            needed.append(made.change.carried.path)
        if not all(map(layout.exists, needed)):
            layout.remove_own(made.path, made.to_json().encode())
        raise


def restate_licenses(
    layout: Layout, wanted: Mapping[str, Mapping[str, str]], fence: Fence = UNFENCED
) -> bool:
    """Close a finished dataset again with other licences in description and cards; whether it was.

    What is not in `wanted` stays. Call it with the driver's lock, whose fence it takes.
    """
    dataset = read_dataset(layout)
    if dataset is None or {**dataset.licenses, **wanted} == dict(dataset.licenses):
        return False
    plan = Plan.read(layout, dataset.plan_id)
    licenses = {**dataset.licenses, **wanted}
    begin_revision(
        layout, dataset, plan, why=LICENSES, dropped=(), added=(), licenses=licenses, fence=fence
    )
    finalise(layout, fence=fence)
    return True


def _with_equal(shards: Sequence[Shard], equal: Equal) -> tuple[list[Shard], int]:
    """Shards whose rows say which they are equal to, and how many there are of these, all last."""
    places = {item.row_id: shard.shard_id for shard in shards for item in shard.items}
    found, copied = [], 0
    for shard in shards:
        if shard.items[0].row_id in equal:
            shard = Shard(shard.shard_id, tuple(copying(shard.items, equal, places)))
            copied += 1
        found.append(shard)
    return found, copied


def _carried(
    layout: Layout, shards: Sequence[Shard], added: Sequence[NewShard]
) -> list[CarriedRow]:
    newest = {shard: numbers[-1] for shard, numbers in generations(layout).items()}
    return [
        CarriedRow(shard.shard_id, item.row_id, source, newest[source], row_id)
        for shard, one in zip(shards, added, strict=True)
        for item, (source, row_id) in zip(one.items, one.carried or (), strict=bool(one.carried))
    ]


def _joined(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Types of the carried-through columns of old and new rows."""
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
