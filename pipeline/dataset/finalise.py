"""Close a complete dataset: one index over all rows, good and bad, the cards, and current.json.

Refuses unless plan and commits add up row by row. The index is sorted by the plan and named by its
own content, so that running twice, or finalising a resumed and an undisturbed run, gives the same
file. `current.json` comes last and names it all with hashes: until it is replaced, what it named
before still counts. Nothing else is touched: a dataset can be read without being finalised.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from earmill.pipeline.common.errors import CommitError, OutputError, OvertakenError
from earmill.pipeline.dataset.card import (
    cards_of,
    put_cards_back,
    read_cards,
    read_if_there,
    replace_cards,
)
from earmill.pipeline.dataset.commit_record import StoredCommit, reading_pool, stored_commits
from earmill.pipeline.dataset.description import DatasetFile, read_dataset
from earmill.pipeline.dataset.driver_lock import UNFENCED, Fence
from earmill.pipeline.dataset.history import compare_snapshots, known_snapshots, next_entry
from earmill.pipeline.dataset.lineage import lineage_of
from earmill.pipeline.dataset.row_coverage import some
from earmill.pipeline.dataset.row_index import STATUS_OK, IndexPart, build_index, index_part
from earmill.pipeline.dataset.snapshot import (
    CommitRef,
    Current,
    EarlierSnapshot,
    LogEntry,
    Snapshot,
    described,
    moments_of,
    name_of,
    read_current,
    read_snapshot,
)
from earmill.pipeline.dataset.verify import (
    commit_problems,
    read_tables,
    table_problems,
)
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.planning.plan import read_row_ids
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.documents import table_of
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import CURRENT_FILE

# Kinds of runs, in the log.
WHY_FIRST, WHY_AGAIN, WHY_ADDED = "extract", "retry or repair", "add-features"
_NAMED_PROBLEMS = 5


@dataclass(frozen=True)
class Finalised:
    """A closed dataset.

    Args:
        snapshot: Path of the snapshot. path: Of the index. Both relative to the root.
        rows_ok, rows_bad: Rows in it. seconds: Audio behind the good ones, s.
    """

    snapshot: str
    path: str
    rows_ok: int
    rows_bad: int
    seconds: float


def finalise(
    layout: Layout, add: Mapping[str, OutFile] | None = None, fence: Fence = UNFENCED
) -> Finalised:
    """Write index, snapshot, cards and current.json; doing it again changes nothing.

    Args:
        add: Sets of features beside these rows, see `Snapshot.additions`; those of before stay as
            long as no row changes.
        fence: The right of the command to write here.
    Raises:
        CommitError: A shard is not committed, a row is missing, double or foreign, or a file that
            never changes is another than when the dataset was closed before.
        OutputError: There is no dataset here.
        OvertakenError: Another command has taken the output over, or closed the dataset meanwhile.
    """
    seen = read_if_there(layout, CURRENT_FILE)
    cards_seen = read_cards(layout)
    dataset = read_dataset(layout)
    if dataset is None:
        raise OutputError(f"{layout.url()} holds no dataset.json: run a job first")
    plan = read_row_ids(layout, dataset.plan_id)
    stored = stored_commits(layout)
    _refuse_changed(layout, dataset, stored)
    records = {shard: one.record for shard, one in stored.items()}
    _refuse(commit_problems(dataset, plan, records))

    def read(shard: str) -> IndexPart | list[str]:
        tables = read_tables(layout, records[shard])
        problems = table_problems(tables, plan[shard])
        return problems or index_part(tables, plan[shard], dataset.streams)

    with reading_pool(layout, len(plan)) as pool:
        found = list(pool.map(read, plan))
    _refuse([line for one in found if isinstance(one, list) for line in one])
    index = build_index([one for one in found if isinstance(one, IndexPart)])
    del found
    file = _store(layout, index, fence)
    made = _snapshot(layout, dataset, file, stored)
    snapshot, entry, history = _store_snapshot(layout, made, dataset, index, add or {}, fence)
    # Before the cards, which go with what counts, are overwritten.
    if read_if_there(layout, CURRENT_FILE) != seen:
        fence.check(layout)
        raise closed_by_another(layout)
    cards = cards_of(layout, dataset, list(records.values()), index, file)
    cards |= lineage_of(
        layout, dataset, list(records.values()), history, EarlierSnapshot(snapshot, entry)
    )
    named = tuple(described(name, content) for name, content in cards.items())
    current = Current(snapshot, named, entry, history)
    try:
        replace_cards(layout, cards, cards_seen, fence)
        fence.check(layout)
        if not layout.replace_own(CURRENT_FILE, current.to_json().encode(), seen):
            raise closed_by_another(layout)
        fence.check(layout)
    except OvertakenError:
        _open_again(layout, current, seen, file)
        put_cards_back(layout, cards, cards_seen)
        raise
    return Finalised(
        snapshot=snapshot.path,
        path=file.path,
        rows_ok=sum(record.rows_ok for record in records.values()),
        rows_bad=sum(record.rows_bad for record in records.values()),
        seconds=sum(record.seconds for record in records.values()),
    )


def _open_again(layout: Layout, made: Current, seen: bytes | None, index: OutFile) -> None:
    """Take current.json back where this process was stopped just before it was replaced, and the
    files that it names were collected as garbage meanwhile. A closing that is whole stays."""
    if layout.exists(made.snapshot.path) and layout.exists(index.path):
        return
    mine = made.to_json().encode()
    if seen is None:
        layout.remove_own(CURRENT_FILE, mine)
    else:
        layout.replace_own(CURRENT_FILE, seen, mine)


def closed_by_another(layout: Layout) -> OvertakenError:
    """Why current.json is not replaced: what was reckoned from the one before is out of date."""
    return OvertakenError(
        f"another driver closed {layout.url()} while this one was at it, frozen or without its "
        "output for longer than its lock lasts; what that one wrote counts, nothing was replaced"
    )


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        more = len(problems) - _NAMED_PROBLEMS
        tail = f"; and {more} more, see `earmill verify`" if more > 0 else ""
        raise CommitError(
            f"cannot finalise, plan and commits do not add up: "
            f"{'; '.join(problems[:_NAMED_PROBLEMS])}{tail}"
        )


def _refuse_changed(
    layout: Layout, dataset: DatasetFile, stored: Mapping[str, StoredCommit]
) -> None:
    """Refuse to close a dataset whose files were damaged or lost since the last closing.

    Where a replacing record is gone, the one it replaced would count again.
    """
    try:
        current = read_current(layout)
        before = None if current is None else read_snapshot(layout, current)
    except CommitError:
        return  # damaged itself: it is written anew
    if before is None:
        return
    changed = [
        paths.commit_path(shard, ref.generation)
        for shard, ref in before.commits.items()
        if (one := stored.get(shard)) is not None and ref.is_lost_in(one)
    ]
    plan = _read(layout, paths.plan_path(dataset.plan_id))
    if plan.path == before.plan.path and plan != before.plan:
        changed.append(plan.path)
    if dataset.path == before.dataset.path and not _same_dataset(
        _read(layout, dataset.path), before.dataset, dataset
    ):
        changed.append(dataset.path)
    if changed:
        raise CommitError(
            f"changed since the dataset was closed: {some(changed)}; restore them from a copy; "
            "what belongs to a shard is computed again by `earmill extract` with --resume --repair"
        )


def _same_dataset(now: OutFile, before: OutFile, dataset: DatasetFile) -> bool:
    """Equal, or the same with the layout version raised, as a replacing commit does."""
    spelled = [
        described(dataset.path, replace(dataset, layout_version=version).to_json().encode())
        for version in (dataset.layout_version, *paths.READABLE_VERSIONS)
    ]
    return now == before or (now == spelled[0] and before in spelled)


def _store(layout: Layout, index: pa.Table, fence: Fence) -> OutFile:
    """Write the index unless an equal one is there.

    Tables are compared, because another pyarrow may encode the same rows into other bytes.
    """
    for path in layout.list("index"):
        content = layout.read_bytes(path)
        if path == paths.index_path(name_of(content)) and table_of(content).equals(index):
            return described(path, content)
    buffer = io.BytesIO()
    pq.write_table(index, buffer, compression="zstd", compression_level=3, write_page_index=True)
    content = buffer.getvalue()
    return _put_named(layout, paths.index_path(name_of(content)), content, fence)


def _snapshot(
    layout: Layout, dataset: DatasetFile, index: OutFile, stored: Mapping[str, StoredCommit]
) -> Snapshot:
    """These commits and what they were indexed with."""
    return Snapshot(
        index=index,
        plan=_read(layout, paths.plan_path(dataset.plan_id)),
        dataset=_read(layout, dataset.path),
        commits={
            shard: CommitRef(one.record.generation, one.record.attempt, one.sha256)
            for shard, one in stored.items()
        },
        moments=moments_of(stored, dataset.streams),
    )


def _store_snapshot(
    layout: Layout,
    made: Snapshot,
    dataset: DatasetFile,
    index: pa.Table,
    add: Mapping[str, OutFile],
    fence: Fence,
) -> tuple[OutFile, LogEntry, tuple[EarlierSnapshot, ...]]:
    """Write a snapshot with its log entry, unless the current snapshot is the same.

    Returns:
        Its file, its entry, and the earlier snapshots.
    """
    known = known_snapshots(layout)
    made = replace(made, additions={**_additions(layout, made, known), **add})
    if known:
        again = _encoded(replace(made, entry=known[-1].entry))
        if again[0] == known[-1].snapshot:
            return _put_named(layout, again[0].path, again[1], fence), known[-1].entry, known[:-1]
    good = sum(status == STATUS_OK for status in index.column("status").to_pylist())
    why, revision = _why(known, dataset)
    why = WHY_ADDED if add else why
    begun = LogEntry(why=why, revision=revision, rows_ok=good, rows_bad=len(index) - good)
    entry = next_entry(layout, made, known, begun)
    file, content = _encoded(replace(made, entry=entry))
    return _put_named(layout, file.path, content, fence), entry, known


def _additions(
    layout: Layout, made: Snapshot, known: Sequence[EarlierSnapshot]
) -> Mapping[str, OutFile]:
    """Sets beside the rows of before, if these are the same: features of another audio under the
    same name would be read as this one's."""
    try:
        before = read_snapshot(layout, known[-1]) if known else None
        if before is None or not before.additions or compare_snapshots(layout, before, made):
            return {}
    except CommitError:
        return {}  # damaged: `add-features` finds them again, and computes nothing
    return before.additions


def _why(known: Sequence[EarlierSnapshot], dataset: DatasetFile) -> tuple[str, int]:
    """Return the kind of run that closes a snapshot, and the snapshot's revision."""
    change = dataset.change
    if change is not None and (not known or known[-1].entry.revision != change.number):
        return change.why, change.number
    return WHY_AGAIN if known else WHY_FIRST, change.number if change else 0


def _encoded(snapshot: Snapshot) -> tuple[OutFile, bytes]:
    content = snapshot.to_json().encode()
    return described(paths.snapshot_path(name_of(content)), content), content


def _read(layout: Layout, rel: str) -> OutFile:
    return described(rel, layout.read_bytes(rel))


def _put_named(layout: Layout, rel: str, content: bytes, fence: Fence) -> OutFile:
    """Write a file that is named by its content; one that was damaged since is written again."""
    fence.check(layout)
    if not layout.create_own(rel, content):
        layout.write_bytes(rel, content)
    return described(rel, content)
