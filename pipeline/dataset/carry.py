"""Rows that a revision takes from shards of before: their features are copied, not computed.

A table, stored with the revision, says for every row of a new shard which commit has its features.
So rows whose neighbours have changed, rows of small shards that are merged, and rows whose file was
only moved cost reading and writing. A copy is a shard like any other, published put-if-absent: a
run that was killed goes on with those that have no commit yet, and each comes out the same.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from earmill.pipeline.common.errors import CommitError, UnreadableError
from earmill.pipeline.common.machine import Threads
from earmill.pipeline.dataset.commit_record import CommitRecord, generations, read_commit
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.dataset.lease import UNFENCED, Fence
from earmill.pipeline.dataset.publish import publish_shard, shard_attrs
from earmill.pipeline.dataset.snapshot import described, name_of, read_checked
from earmill.pipeline.dataset.stored_rows import stored_bad_rows, stored_rows
from earmill.pipeline.formats.rows import CastError, FeatureRow, OutFile, QuarantineRow, total
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.sources.base import Item
from earmill.pipeline.storage.documents import table_of
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import carried_path, new_attempt

THREADS = 2
# How often copying says how far it is.
PROGRESS_S = 5.0
Tell = Callable[[str], None]
# What a row's provenance says of where its bytes lie.
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
    """Publish the shards of a revision that are copies, those that have no commit; how many.

    Args:
        on_step: Told what takes a while, and now and then how far it is.
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
    """Whether a stored row, if it is the one that an item was planned as a copy of, has its bytes.

    Any other is the item's own, which a later revision takes along.
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
        found["cast_errors"] = {name: error.to_dict() for name, error in sorted(whole.items())}
    return found
