"""Begin a revision: other rows, or the same in other shards, with all that can stay as it is.

Plan and table of copied rows are written first, then the description, put-if-absent. From then
on the dataset is that revision, not closed yet. Shards of new rows are computed by the
next run, copies made before that; a run that is killed goes on with what has no commit. Until the
dataset is closed again, the snapshot of before counts.

Features of carried rows are copied from earlier shards, not computed. A table, stored with the
revision, names for every row of a new shard the commit that has its features. So rows whose
neighbours have changed, rows of small shards that are merged, and rows whose file was only moved
cost reading and writing. A copy is a shard like any other, published put-if-absent: a run that was
killed goes on with the shards that have no commit, and each comes out the same.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from earmill.pipeline.common.errors import CommitError, OutputError, OvertakenError, UnreadableError
from earmill.pipeline.common.machine import Threads
from earmill.pipeline.dataset.commit_record import CommitRecord, commits, generations, read_commit
from earmill.pipeline.dataset.description import Change, DatasetFile, raise_version, read_dataset
from earmill.pipeline.dataset.driver_lock import UNFENCED, Fence, overtaken
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.publish import publish_shard, shard_attrs
from earmill.pipeline.dataset.snapshot import (
    described,
    is_closed,
    name_of,
    read_checked,
    read_current,
)
from earmill.pipeline.dataset.stored_rows import stored_bad_rows, stored_rows
from earmill.pipeline.formats.rows import FeatureRow, OutFile, QuarantineRow
from earmill.pipeline.formats.values import CastError, total
from earmill.pipeline.planning.equal_rows import Equal, copying
from earmill.pipeline.planning.make_plan import SHARD_DIGITS
from earmill.pipeline.planning.plan import Plan, plan_of
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.sources.base import Item
from earmill.pipeline.storage.documents import table_of
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import LAYOUT_VERSION, carried_path, new_attempt, plan_path

THREADS = 2
# How often copying says how far it is.
PROGRESS_S = 5.0
Tell = Callable[[str], None]
# Provenance columns that say where a row's bytes lie.
PLACE = ("uri", "etag", "size", "mtime")


@dataclass(frozen=True, slots=True)
class CarriedRow:
    """Where the features of a row are taken from.

    Args:
        shard, row_id: The row of the new plan.
        from_shard, from_generation: The commit that has it. from_row_id: Its name there.
    """

    shard: str
    row_id: str
    from_shard: str
    from_generation: int
    from_row_id: str


SCHEMA = pa.schema(
    [
        ("shard", pa.string()),
        ("row_id", pa.string()),
        ("from_shard", pa.string()),
        ("from_generation", pa.int64()),
        ("from_row_id", pa.string()),
    ]
)


def write_carried(layout: Layout, rows: Iterable[CarriedRow]) -> OutFile | None:
    """Store the table; None where no row is copied."""
    listed = [asdict(row) for row in rows]
    if not listed:
        return None
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(listed, schema=SCHEMA), sink, compression="zstd")
    content = sink.getvalue()
    file = described(carried_path(name_of(content)), content)
    if not layout.create_own(file.path, content):
        layout.write_bytes(file.path, content)
    return file


def carried_rows(layout: Layout, dataset: DatasetFile) -> dict[str, list[CarriedRow]]:
    """The rows that the newest revision copies, by their new shard."""
    if dataset.change is None or dataset.change.carried is None:
        return {}
    found: dict[str, list[CarriedRow]] = {}
    for row in table_of(read_checked(layout, dataset.change.carried)).to_pylist():
        found.setdefault(row["shard"], []).append(CarriedRow(**row))
    return found


def carry_over(
    layout: Layout,
    dataset: DatasetFile,
    plan: Plan,
    on_step: Tell = lambda text: None,
    fence: Fence = UNFENCED,
) -> int:
    """Publish the copied shards of a revision that have no commit; return how many.

    Args:
        on_step: Called with a line about long steps and their progress.
        fence: The run's right to write here.
    Raises:
        OvertakenError: Another command has taken the output over.
        CommitError: A commit or file that is copied from is gone or damaged, or the output failed.
    """
    carried = carried_rows(layout, dataset)
    if not carried:
        return 0
    done = generations(layout)
    shards = [s for s in plan.shards if s.shard_id in carried and s.shard_id not in done]
    _each(
        shards,
        lambda shard: _copy(layout, dataset, shard, carried[shard.shard_id], fence),
        "copying rows that are there",
        on_step,
    )
    return len(shards)


def copy_equal(
    layout: Layout,
    dataset: DatasetFile,
    shards: Sequence[Shard],
    on_step: Tell = lambda text: None,
    fence: Fence = UNFENCED,
) -> None:
    """Publish shards of rows that are equal to others, which are all committed.

    A row is in quarantine where the other one is, and where that had other bytes than planned.

    Args:
        on_step, fence: As of `carry_over`.
    Raises:
        OvertakenError, CommitError: As of `carry_over`.
    """
    newest = {shard: numbers[-1] for shard, numbers in generations(layout).items()}

    def copy(shard: Shard) -> None:
        pairs = [(item, item.equal_to) for item in shard.items if item.equal_to is not None]
        rows = [
            CarriedRow(shard.shard_id, item.row_id, one.shard, newest[one.shard], one.row_id)
            for item, one in pairs
        ]
        _copy(layout, dataset, shard, rows, fence)

    _each(shards, copy, "copying rows of equal files", on_step)


def _each(shards: Sequence[Shard], copy: Callable[[Shard], None], what: str, on_step: Tell) -> None:
    """Copy them, a few at a time."""
    if not shards:
        return
    on_step(f"{what} into {len(shards):,} shards")
    tells_at = time.monotonic() + PROGRESS_S
    with Threads(THREADS) as pool:
        for done, _ in enumerate(pool.map(copy, shards), start=1):
            if time.monotonic() >= tells_at and done < len(shards):
                on_step(f"{what}: {done:,} of {len(shards):,} shards")
                tells_at = time.monotonic() + PROGRESS_S


def _copy(
    layout: Layout,
    dataset: DatasetFile,
    shard: Shard,
    carried: Sequence[CarriedRow],
    fence: Fence,
) -> None:
    from amtcore.features.base import StreamInfo

    items = {item.row_id: item for item in shard.items}
    good: list[FeatureRow] = []
    bad: list[QuarantineRow] = []
    sources = _commits(layout, carried)
    for key, record in sources.items():
        wanted: dict[str, list[Item]] = {}
        for row in carried:
            if (row.from_shard, row.from_generation) == key:
                wanted.setdefault(row.from_row_id, []).append(items[row.row_id])
        for stored in stored_rows(layout, dataset, record, wanted):
            for item in wanted[stored.plan_row_id]:
                if _is_as_planned(stored, key[0], item):
                    good.append(_renamed(stored, item))
                else:
                    bad.append(_not_equal(stored, item))
        for row_id, rows in stored_bad_rows(layout, record, wanted).items():
            bad += [_bad(row, row_id, item) for row in rows for item in wanted[row_id]]
    output = dataset.spec["output"]
    publish_shard(
        layout,
        shard_id=shard.shard_id,
        attempt=new_attempt(),
        plan_id=dataset.plan_id,
        rows=good,
        bad=bad,
        streams=[StreamInfo.from_dict(info) for info in dataset.streams],
        formats=output["formats"],
        attrs=shard_attrs(dataset.spec, dataset.spec_sha256),
        info=_info(list(sources.values()), len(good)),
        dtype=output["dtype"],
        row_group_profile=output["row_group_profile"],
        parquet_form=dataset.parquet_form,
        plan_rows=[item.row_id for item in shard.items],
        extra_types=dataset.extra_types or None,
        fence=fence,
    )


def _commits(layout: Layout, carried: Sequence[CarriedRow]) -> dict[tuple[str, int], CommitRecord]:
    """The commits that rows are copied from, in their order."""
    found = {}
    for key in sorted({(row.from_shard, row.from_generation) for row in carried}):
        record = read_commit(layout, *key)
        if record is None:
            raise CommitError(
                f"{layout.url()}: the commit of shard {key[0]}, whose rows are to be copied, is "
                "gone; restore it from a copy"
            )
        found[key] = record
    return found


def _renamed(row: FeatureRow, item: Item) -> FeatureRow:
    """A stored row under the name that it has now, and with where its audio lies now."""
    channel = row.row_id.removeprefix(row.plan_row_id)  # `#ch0` where channels are rows
    place = {name: getattr(item, name) for name in PLACE}
    return replace(
        row,
        row_id=item.row_id + channel,
        plan_row_id=item.row_id,
        facts={**row.facts, **place},
        extra=dict(item.extra),
    )


def _is_as_planned(row: FeatureRow, shard: str, item: Item) -> bool:
    """Return False if an item was planned as a copy of a stored row that has other bytes.

    Any other stored row is the item's own, carried over by a later revision.
    """
    one = item.equal_to
    if one is None or (one.shard, one.row_id) != (shard, row.plan_row_id):
        return True
    return row.facts.get("bytes_sha256") == one.sha256


def _not_equal(row: FeatureRow, item: Item) -> QuarantineRow:
    channel = row.row_id.removeprefix(row.plan_row_id)
    return QuarantineRow(
        row_id=item.row_id + channel,
        uri=item.uri,
        stage=UnreadableError.stage,
        error_class=UnreadableError.error_class,
        message=f"expected the bytes of {row.plan_row_id!r}, which was planned to be equal and has "
        "changed since; `earmill retry` computes it",
        attempts=1,
    )


def _bad(row: QuarantineRow, plan_row_id: str, item: Item) -> QuarantineRow:
    channel = row.row_id.removeprefix(plan_row_id)
    message = row.message.replace(row.uri, item.uri) if row.uri else row.message
    return replace(row, row_id=item.row_id + channel, uri=item.uri, message=message)


def _info(records: Sequence[CommitRecord], rows: int) -> dict[str, Any]:
    """How the copy came about; device and rounding where all of it is known."""
    found: dict[str, Any] = {
        "copied_from": [f"{record.shard}-{record.attempt}" for record in records]
    }
    for name in ("device", "versions"):
        of_sources = [record.info.get(name) for record in records]
        if of_sources[0] and all(each == of_sources[0] for each in of_sources):
            found[name] = of_sources[0]
    if rows == sum(record.rows_ok for record in records):
        costs = [record.info.get("cast_errors") or {} for record in records]
        whole = total({k: CastError(**v) for k, v in part.items()} for part in costs)
        found["cast_errors"] = {name: asdict(error) for name, error in sorted(whole.items())}
    return found


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
    """Close a finished dataset again with other licences; return False where they are the same.

    Licences that are not in `wanted` stay. Call this with the driver's lock, whose fence it takes.
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
