"""Close a complete dataset: one index over all rows, good and bad, the cards, and current.json.

The index is sorted by the plan and named by its own content, so a resumed and an undisturbed run
give the same file. Until current.json, the last file, is replaced, the earlier snapshot counts.

Names of card files are fixed, so a driver that was stopped while it closed a dataset could
overwrite the cards of a later snapshot. So each card is replaced only while its content is as it
was when the closing began.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from earmill.pipeline.common.errors import CommitError, OvertakenError
from earmill.pipeline.common.text import few
from earmill.pipeline.dataset.card import readme
from earmill.pipeline.dataset.commit_record import (
    CommitRecord,
    commits,
    plan_row_of,
    reading_pool,
    some,
)
from earmill.pipeline.dataset.croissant import croissant
from earmill.pipeline.dataset.description import DatasetFile, require_dataset
from earmill.pipeline.dataset.driver_lock import UNFENCED, Fence
from earmill.pipeline.dataset.lineage import lineage_of
from earmill.pipeline.dataset.snapshot import (
    CARDS,
    STATUS_BAD,
    STATUS_OK,
    CommitRef,
    Current,
    EarlierSnapshot,
    LogEntry,
    Snapshot,
    compare_snapshots,
    described,
    described_file,
    known_snapshots,
    moments_of,
    name_of,
    put_named,
    read_current,
    read_snapshot,
)
from earmill.pipeline.dataset.verify import commit_problems, read_tables, table_problems
from earmill.pipeline.formats.row_table import EXTRA_PREFIX, VARIANT_COLUMNS, columns_of
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.planning.plan import read_row_ids
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.documents import table_of
from earmill.pipeline.storage.layout import Layout

# Kinds of runs, in the log.
WHY_FIRST, WHY_AGAIN, WHY_ADDED = "extract", "retry or repair", "add-features"


def finalise(
    layout: Layout, add: Mapping[str, OutFile] | None = None, fence: Fence = UNFENCED
) -> Snapshot:
    """Write index, snapshot, cards and current.json; doing it again changes nothing.

    Argument `add` names sets of features beside these rows, see `Snapshot.additions`; earlier sets
    stay as long as no row changes. Raises CommitError unless plan and commits add up row by row, or
    if an immutable file has changed since the last closing; OvertakenError if another command has
    taken the output over, or closed the dataset meanwhile.
    """
    seen = layout.read_if_there(paths.CURRENT_FILE)
    cards_seen = {name: layout.read_if_there(name) for name in (*CARDS, paths.PROVENANCE_FILE)}
    dataset = require_dataset(layout)
    plan = read_row_ids(layout, dataset.plan_id)
    records = commits(layout)
    _refuse_changed(layout, dataset, records)
    _refuse(commit_problems(dataset, plan, records))

    def read(shard: str) -> tuple[list[str], list[pa.Table]]:
        rows, bad = read_tables(layout, records[shard])
        problems = table_problems(records[shard], rows, bad, plan[shard])
        if problems:
            return problems, []
        tables = [_good_lines(shard, rows, dataset.streams)]
        return [], tables + ([_bad_lines(shard, bad, plan[shard])] if bad.num_rows else [])

    with reading_pool(layout, len(plan)) as pool:
        found = list(pool.map(read, plan))
    _refuse([line for problems, _ in found for line in problems])
    index = build_index([table for _, tables in found for table in tables], plan)
    del found
    file = _store(layout, index, fence)
    made = Snapshot(
        index=file,
        plan=described_file(layout, paths.plan_path(dataset.plan_id)),
        dataset=described_file(layout, dataset.path),
        commits={
            shard: CommitRef(record.generation, record.attempt, record.sha256)
            for shard, record in records.items()
        },
        moments=moments_of(records, dataset.streams),
    )
    made, named, history = _store_snapshot(layout, made, dataset, index, add or {}, fence)
    # Check before cards are overwritten, because they belong to the current snapshot.
    if layout.read_if_there(paths.CURRENT_FILE) != seen:
        fence.check(layout)
        raise closed_by_another(layout)
    made_of = list(records.values())
    now = EarlierSnapshot(named, made.entry)
    cards = {
        paths.README_FILE: readme(dataset, made_of, index, file).encode(),
        paths.CROISSANT_FILE: _as_json(croissant(dataset, made_of, file, layout.url())),
        paths.PROVENANCE_FILE: _as_json(lineage_of(layout, dataset, made_of, history, now)),
    }
    card_files = tuple(described(name, content) for name, content in cards.items())
    current = Current(named, card_files, made.entry, history)
    try:
        replace_cards(layout, cards, cards_seen, fence)
        fence.check(layout)
        if not layout.replace_own(paths.CURRENT_FILE, current.to_json().encode(), seen):
            raise closed_by_another(layout)
        fence.check(layout)
    except OvertakenError:
        _open_again(layout, current, seen, file)
        put_cards_back(layout, cards, cards_seen)
        raise
    return made


def _as_json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1) + "\n").encode()


def replace_cards(
    layout: Layout, cards: Mapping[str, bytes], seen: Mapping[str, bytes | None], fence: Fence
) -> None:
    for name, content in cards.items():
        before = seen.get(name)
        fence.check(layout)
        while not layout.replace_own(name, content, before):
            # Another command has the output now, or an overtaken one has just woken.
            fence.check(layout)
            before = layout.read_if_there(name)


def put_cards_back(
    layout: Layout, cards: Mapping[str, bytes], seen: Mapping[str, bytes | None]
) -> None:
    """Undo `replace_cards` if the current snapshot names the cards that were seen."""
    with suppress(CommitError):
        current = read_current(layout)
        for card in () if current is None else current.cards:
            before, written = seen.get(card.path), cards.get(card.path)
            if before is not None and written is not None and card == described(card.path, before):
                layout.replace_own(card.path, before, written)


def _open_again(layout: Layout, made: Current, seen: bytes | None, index: OutFile) -> None:
    """Take current.json back if this process was stopped just before it was replaced, and the files
    that it names were collected as garbage meanwhile."""
    if layout.exists(made.snapshot.path) and layout.exists(index.path):
        return
    mine = made.to_json().encode()
    if seen is None:
        layout.remove_own(paths.CURRENT_FILE, mine)
    else:
        layout.replace_own(paths.CURRENT_FILE, seen, mine)


def closed_by_another(layout: Layout) -> OvertakenError:
    return OvertakenError(
        f"another driver closed {layout.url()} while this driver was frozen, or cut off from it, "
        "for longer than its lock lasts; the other driver's files count, nothing was replaced"
    )


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise CommitError(
            f"cannot finalise, plan and commits do not add up: {few(problems)}; see "
            "`earmill verify`"
        )


def _refuse_changed(
    layout: Layout, dataset: DatasetFile, records: Mapping[str, CommitRecord]
) -> None:
    """Refuse to close a dataset whose files were damaged or lost since the last closing: if a
    replacing record is missing, the replaced one would count again."""
    try:
        if (current := read_current(layout)) is None:
            return
        before = read_snapshot(layout, current)
    except CommitError:
        return  # current.json is damaged: it is written again
    changed = [
        paths.commit_path(shard, ref.generation)
        for shard, ref in before.commits.items()
        if (record := records.get(shard)) is not None and ref.is_lost_in(record)
    ]
    plan = described_file(layout, paths.plan_path(dataset.plan_id))
    if plan.path == before.plan.path and plan != before.plan:
        changed.append(plan.path)
    if dataset.path == before.dataset.path and not _same_dataset(
        described_file(layout, dataset.path), before.dataset, dataset
    ):
        changed.append(dataset.path)
    if changed:
        raise CommitError(
            f"changed since the dataset was closed: {some(changed)}; restore them from a copy; "
            "what belongs to a shard is computed again by `earmill extract` with --resume --repair"
        )


def _same_dataset(now: OutFile, before: OutFile, dataset: DatasetFile) -> bool:
    """Return True if they are equal but for the version, which a replacing commit raises."""
    versions = [replace(dataset, layout_version=number) for number in paths.READABLE_VERSIONS]
    spelled = [described(now.path, each.to_json().encode()) for each in versions]
    return now == before or {now, before} <= {*spelled}


def _store(layout: Layout, index: pa.Table, fence: Fence) -> OutFile:
    """Write the index unless an equal table exists, which another pyarrow may encode otherwise."""
    for path in layout.list("index"):
        content = layout.read_bytes(path)
        if path == paths.index_path(name_of(content)) and table_of(content).equals(index):
            return described(path, content)
    buffer = io.BytesIO()
    pq.write_table(index, buffer, compression="zstd", compression_level=3, write_page_index=True)
    fence.check(layout)
    return put_named(layout, paths.index_path, buffer.getvalue())


def _store_snapshot(
    layout: Layout,
    made: Snapshot,
    dataset: DatasetFile,
    index: pa.Table,
    add: Mapping[str, OutFile],
    fence: Fence,
) -> tuple[Snapshot, OutFile, tuple[EarlierSnapshot, ...]]:
    """Write a snapshot unless it is the current one; return it, its file, and earlier snapshots."""
    known = known_snapshots(layout)
    diff, kept, outdated = None, dict[str, OutFile](), set[str]()
    # A damaged snapshot is compared with nothing: its rows are not known any more.
    with suppress(CommitError, OSError, pa.ArrowException):
        if known:
            before = read_snapshot(layout, known[-1])
            outdated = {*before.outdated, *before.additions} - {*add}
            diff = compare_snapshots(layout, before, made)
            # Added features stay if the rows do: they would be read as features of other audio.
            kept = {} if diff else dict(before.additions)
            outdated -= {*kept}
    left = tuple(
        name
        for name in sorted(outdated)
        if layout.exists(f"{paths.addition_path(name)}/{paths.CURRENT_FILE}")
    )
    made = replace(made, additions={**kept, **add}, outdated=left)
    again = replace(made, entry=known[-1].entry) if known else made
    if known and described(known[-1].snapshot.path, again.to_json().encode()) == known[-1].snapshot:
        made, known = again, known[:-1]
    else:
        good = sum(status == STATUS_OK for status in index.column("status").to_pylist())
        change = dataset.change
        revision = change.number if change is not None else 0
        why = WHY_AGAIN if known else WHY_FIRST
        if change is not None and (not known or known[-1].entry.revision != revision):
            why = change.why
        counts = {"added": 0 if known else len(index)}
        if diff is not None:
            counts = {name: len(getattr(diff, name)) for name in ("added", "changed", "removed")}
        entry = LogEntry(
            number=1 + max((one.entry.number for one in known), default=0),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            why=WHY_ADDED if add else why,
            revision=revision,
            rows_ok=good,
            rows_bad=len(index) - good,
            **counts,
        )
        made = replace(made, entry=entry)
    fence.check(layout)
    return made, put_named(layout, paths.snapshot_path, made.to_json().encode()), known


def build_index(lines: Sequence[pa.Table], plan: Mapping[str, Sequence[str]]) -> pa.Table:
    """Return the lines of all shards in the order of the plan, then by channel and row id."""
    whole = pa.concat_tables(_same_extras(lines), promote_options="default").combine_chunks()
    planned = pa.array(chain.from_iterable(plan.values()), pa.string())
    keys = {
        "position": pc.index_in(whole["plan_row_id"], planned),
        "channel": pc.fill_null(whole["channel"], -1),  # a bad row has no channel
        "row_id": whole["row_id"],
    }
    by = [(key, "ascending") for key in keys]
    order = np.asarray(pc.sort_indices(pa.table(keys), sort_keys=by))
    if not np.array_equal(order, np.arange(len(order))):
        whole = whole.take(order)
    return whole.replace_schema_metadata(None)


def _bad_lines(shard: str, bad: pa.Table, plan_rows: Sequence[str]) -> pa.Table:
    """Return the lines of quarantined rows; the index has null for cells that they lack."""
    planned, row_ids = frozenset(plan_rows), bad.column("row_id").to_pylist()
    kept = ("row_id", "uri", "stage", "error_class", "message", "attempts")
    columns = {
        "plan_row_id": pa.array([plan_row_of(k, planned) for k in row_ids], pa.string()),
        "shard": pa.repeat(shard, bad.num_rows),
        "status": pa.repeat(STATUS_BAD, bad.num_rows),
    }
    return pa.table(columns | {name: bad.column(name) for name in kept})


def _good_lines(shard: str, rows: pa.Table, streams: Sequence[Mapping[str, Any]]) -> pa.Table:
    n = rows.num_rows
    variants = [name for name in VARIANT_COLUMNS if name in rows.column_names]
    places = [name for stream in streams for name in columns_of(stream)]
    extras = [name for name in rows.column_names if name.startswith(EXTRA_PREFIX)]

    def kept(*names: str) -> dict[str, pa.ChunkedArray]:
        return {name: rows.column(name) for name in names}

    return pa.table(
        kept("row_id", "plan_row_id", "channel")
        | {"shard": pa.repeat(shard, n), "row": pa.array(np.arange(n))}
        | kept("seconds", "uri", *variants, *places)
        | {"status": pa.repeat(STATUS_OK, n)}
        | dict.fromkeys(("stage", "error_class", "message"), pa.nulls(n, pa.string()))
        | {"attempts": pa.nulls(n, pa.int64())}
        | kept(*extras)
    )


def _same_extras(parts: Sequence[pa.Table]) -> list[pa.Table]:
    """Give every carried-through column one type: numbers of two types become double, else text."""
    kinds: dict[str, set[pa.DataType]] = {}
    for part in parts:
        for column in part.schema:
            if column.name.startswith(EXTRA_PREFIX) and part.num_rows:
                kinds.setdefault(column.name, set()).add(column.type)
    common = {}
    for name, seen in kinds.items():
        mixed = pa.float64() if seen <= {pa.int64(), pa.float64()} else pa.string()
        common[name] = pa.field(name, mixed if len(seen) > 1 else seen.pop())
    same = []
    for part in parts:
        schema = pa.schema([common.get(column.name, column) for column in part.schema])
        same.append(part.cast(schema) if part.num_rows else schema.empty_table())
    return same
