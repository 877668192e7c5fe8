"""Copies of committed rows in other shards: rows carried over by a revision, and equal rows.

Values are the stored ones, bit for bit. Shards of copies are published as any shard, so the next
run after a kill goes on with those that have no commit. A table, stored with the revision, names
for every carried row the commit that has its features.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from earmill.pipeline.common.errors import CommitError, UnreadableError
from earmill.pipeline.common.machine import Threads
from earmill.pipeline.dataset.commit_record import (
    CommitRecord,
    newest_generations,
    plan_row_of,
    promise_of,
    quarantined_rows,
    read_commit,
)
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.dataset.driver_lock import Fence
from earmill.pipeline.dataset.publish import publish_shard
from earmill.pipeline.dataset.snapshot import put_named, read_checked
from earmill.pipeline.formats.block_cache import BlockCache, FrameSpan, IoCounts
from earmill.pipeline.formats.format import chosen, explain_damage, format_of, is_as_committed
from earmill.pipeline.formats.row_table import BASE_TYPES, EXTRA_PREFIX, fact_names
from earmill.pipeline.formats.rows import FeatureRow, OutFile, QuarantineRow
from earmill.pipeline.formats.stream_layout import StreamLayout, layout_of
from earmill.pipeline.formats.values import CastError, Spilled, Values, total
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.sources.base import Item
from earmill.pipeline.storage.documents import read_table, table_of
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import carried_path, new_attempt

THREADS = 2
PROGRESS_S = 5.0
CACHE_BYTES = 64 * 2**20
# A row whose streams are larger is held in files, and read in pieces.
SPILL_BYTES, PIECE_BYTES = 128 * 2**20, 32 * 2**20
# Provenance columns that say where a row's bytes lie.
PLACE = ("uri", "etag", "size", "mtime")
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CarriedRow:
    """A row of the new plan, and the commit and row id that its features are copied from."""

    shard: str
    row_id: str
    from_shard: str
    from_generation: int
    from_row_id: str


def write_carried(layout: Layout, rows: Iterable[CarriedRow]) -> OutFile | None:
    listed = [asdict(row) for row in rows]
    if not listed:
        return None
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(listed), sink, compression="zstd")
    return put_named(layout, carried_path, sink.getvalue())


def carried_rows(layout: Layout, dataset: DatasetFile) -> dict[str, list[CarriedRow]]:
    if dataset.change is None or dataset.change.carried is None:
        return {}
    found: dict[str, list[CarriedRow]] = {}
    for row in table_of(read_checked(layout, dataset.change.carried)).to_pylist():
        found.setdefault(row["shard"], []).append(CarriedRow(**row))
    return found


def carry_over(
    layout: Layout, dataset: DatasetFile, plan: Plan, on_step: Tell, fence: Fence
) -> int:
    """Publish the copied shards of a revision that have no commit, and return their number.
    CommitError if a commit or file to copy from is missing or damaged."""
    carried = carried_rows(layout, dataset)
    done = newest_generations(layout) if carried else {}
    shards = [s for s in plan.shards if s.shard_id in carried and s.shard_id not in done]

    def copy(shard: Shard) -> None:
        _copy(layout, dataset, shard, carried[shard.shard_id], fence)

    _each(shards, copy, "copying rows", on_step)
    return len(shards)


def copy_equal(
    layout: Layout, dataset: DatasetFile, shards: Sequence[Shard], on_step: Tell, fence: Fence
) -> None:
    """Publish shards of rows that equal committed rows. A copy goes to quarantine if the row that
    it equals is in quarantine, or had other bytes than planned."""
    newest = newest_generations(layout)

    def copy(shard: Shard) -> None:
        pairs = [(item, item.equal_to) for item in shard.items if item.equal_to is not None]
        rows = [
            CarriedRow(shard.shard_id, item.row_id, one.shard, newest[one.shard], one.row_id)
            for item, one in pairs
        ]
        _copy(layout, dataset, shard, rows, fence)

    _each(shards, copy, "copying rows of equal files", on_step)


def _each(shards: Sequence[Shard], copy: Callable[[Shard], None], what: str, on_step: Tell) -> None:
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
    layout: Layout, dataset: DatasetFile, shard: Shard, carried: Sequence[CarriedRow], fence: Fence
) -> None:
    items = {item.row_id: item for item in shard.items}
    good: list[FeatureRow] = []
    bad: list[QuarantineRow] = []
    sources: list[CommitRecord] = []
    for key in sorted({(row.from_shard, row.from_generation) for row in carried}):
        record = read_commit(layout, *key)
        if record is None:
            raise CommitError(
                f"{layout.url()}: the commit of shard {key[0]} is missing, so its rows cannot be "
                "copied; restore it from a copy"
            )
        sources.append(record)
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
        for failed in quarantined_rows(layout, record):
            plan_row_id = plan_row_of(failed.row_id, wanted)
            for item in wanted.get(plan_row_id, ()):
                message = failed.message.replace(failed.uri or item.uri, item.uri)
                row_id = _new_id(failed.row_id, plan_row_id, item)
                bad.append(replace(failed, row_id=row_id, uri=item.uri, message=message))
    publish_shard(
        layout,
        dataset,
        shard_id=shard.shard_id,
        attempt=new_attempt(),
        rows=good,
        bad=bad,
        info=_info(sources, len(good)),
        plan_rows=[item.row_id for item in shard.items],
        fence=fence,
    )


def _renamed(row: FeatureRow, item: Item) -> FeatureRow:
    """Return a stored row with its present name and the present place of its audio."""
    return replace(
        row,
        row_id=_new_id(row.row_id, row.plan_row_id, item),
        plan_row_id=item.row_id,
        facts={**row.facts, **{name: getattr(item, name) for name in PLACE}},
        extra=dict(item.extra),
    )


def _new_id(row_id: str, plan_row_id: str, item: Item) -> str:
    """Return the new row id, with `#ch0` where channels are rows."""
    return item.row_id + row_id.removeprefix(plan_row_id)


def _is_as_planned(row: FeatureRow, shard: str, item: Item) -> bool:
    """Return False if an item is a planned copy of this row, and the row has other bytes."""
    one = item.equal_to
    if one is None or (one.shard, one.row_id) != (shard, row.plan_row_id):
        return True
    return row.facts.get("bytes_sha256") == one.sha256


def _not_equal(row: FeatureRow, item: Item) -> QuarantineRow:
    return QuarantineRow(
        row_id=_new_id(row.row_id, row.plan_row_id, item),
        uri=item.uri,
        stage=UnreadableError.stage,
        error_class=UnreadableError.error_class,
        message=f"expected the bytes of {row.plan_row_id!r}, which was planned to be equal and has "
        "changed since; `earmill retry` computes it",
        attempts=1,
    )


def _info(records: Sequence[CommitRecord], rows: int) -> dict[str, Any]:
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


def stored_rows(
    layout: Layout, dataset: DatasetFile, record: CommitRecord, plan_rows: Collection[str]
) -> Iterator[FeatureRow]:
    """Yield the good rows of a shard that came of these rows of the plan, in stored order.
    CommitError if a file is damaged, ExtensionError if no format of it is installed."""
    infos = {info["name"]: info for info in dataset.streams}
    streams = {name: layout_of(info) for name, info in infos.items()}
    name = chosen(record.formats, None, {})
    fmt, rel = format_of(name), str(record.path(name))
    promise = promise_of(record, infos, record.dtype, fmt)
    where = f"shard {record.shard}"
    with explain_damage(where, str(record.path("rows"))):
        table = read_table(layout, str(record.path("rows")))
    extra = [name for name in table.column_names if name.startswith(EXTRA_PREFIX)]
    facts = fact_names(table.column_names, infos.values())

    def values(stream: StreamLayout, number: int, row: Mapping[str, Any]) -> Values:
        start, length = (int(row[name]) for name in stream.place_columns[:2])

        def frames(first: int, last: int) -> Any:
            span = FrameSpan(row["row_id"], number, start, first, last)
            found = reader.read(stream.name, span)
            return found if fmt.has_scales else stream.from_values(found)

        row_bytes = max(1, stream.row_bytes(record.dtype))
        if length * row_bytes <= SPILL_BYTES:
            return frames(0, length)
        dtype, folder = stream.stored_dtype(record.dtype), layout.root if layout.is_local else None
        whole = Spilled(dtype, stream.stored_width, folder)
        step = max(1, PIECE_BYTES // row_bytes)
        for at in range(0, length, step):
            whole.append(frames(at, min(length, at + step)))
        return whole

    with explain_damage(where, rel, lambda: is_as_committed(layout, rel, promise)):
        cache = BlockCache(CACHE_BYTES, IoCounts())
        with closing(fmt.open(layout, rel, promise, cache)) as reader:
            for number, row in enumerate(table.to_pylist()):
                if row["plan_row_id"] in plan_rows:
                    yield FeatureRow(
                        **{name: row[name] for name in BASE_TYPES},
                        facts={name: row[name] for name in facts},
                        extra={name.removeprefix(EXTRA_PREFIX): row[name] for name in extra},
                        streams={k: values(each, number, row) for k, each in streams.items()},
                        steps={
                            name: int(row[each.length_column])
                            for name, each in streams.items()
                            if each.row_counts
                        },
                    )
