"""Snapshots of before: their log, one of them by number or date, and what differs between two.

A row is known by its id. It is *changed* where both snapshots have it and its state differs (good,
or the reason of its quarantine), or its audio does: samples (their sha256), span or channel. Rows
of a shard whose commit is in both are not looked at; a row that only moved to another shard or file
is the same row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from pathlib import PurePosixPath

import pyarrow as pa

from earmill.pipeline.common.errors import CommitError, OutputError
from earmill.pipeline.common.text import Shown
from earmill.pipeline.dataset.commit_record import read_commit, reading_pool
from earmill.pipeline.dataset.snapshot import (
    CommitRef,
    EarlierSnapshot,
    LogEntry,
    Snapshot,
    described,
    name_of,
    read_checked,
    read_current,
    read_snapshot,
    require_current,
)
from earmill.pipeline.storage.documents import read_table, table_of
from earmill.pipeline.storage.layout import Layout

Which = int | str | date
PREVIOUS, CURRENT = "previous", "current"
AUDIO = ("pcm_sha256", "start_s", "end_s", "channel")
OK = "ok"
_MIN_NAME_CHARS = 4
_NAMED_SNAPSHOTS = 5


@dataclass(frozen=True, repr=False)
class SnapshotDiff(Shown):
    """Rows by which two snapshots differ, good and quarantined ones.

    Args:
        before, after: The log entries of the two.
        added, removed, changed: Row ids, sorted.
        states: Row id of each of them to its state in both: `ok`, the reason of its quarantine, or
            None where the snapshot has no such row.
    """

    before: LogEntry
    after: LogEntry
    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    states: Mapping[str, tuple[str | None, str | None]]

    def __bool__(self) -> bool:
        return bool(self.states)

    def shown(self) -> dict[str, str]:
        """Return how many rows differ, in words."""
        return {
            "snapshots": f"{self.before.number} to {self.after.number}",
            "added": f"{len(self.added):,}",
            "removed": f"{len(self.removed):,}",
            "changed": f"{len(self.changed):,}",
        }


def log(layout: Layout) -> list[LogEntry]:
    """One entry a snapshot, the oldest first; the last one counts."""
    return [past.entry for past in require_current(layout).all_snapshots]


def find_snapshot(layout: Layout, which: Which) -> EarlierSnapshot:
    """One snapshot of a dataset.

    Args:
        which: Its number in the log; "current" or "previous"; the start of its name (at least four
            characters); or a date or time, also as ISO 8601 text: the last one closed by then
            (a date means its end; a time without zone is UTC).
    Raises:
        OutputError: There is none; the line lists the snapshots that there are.
    """
    known = require_current(layout).all_snapshots
    found = _chosen(known, which)
    if found is None:
        shown = [f"{past.entry.number} ({past.entry.created or 'no date'})" for past in known]
        more = f"{len(shown) - _NAMED_SNAPSHOTS} older ones, " * (len(shown) > _NAMED_SNAPSHOTS)
        raise OutputError(
            f"{layout.url()}: expected a snapshot, got {which!r}; there are {more}"
            f"{', '.join(shown[-_NAMED_SNAPSHOTS:])}: see `earmill log`"
        )
    return found


def diff(layout: Layout, before: Which, after: Which = CURRENT) -> SnapshotDiff:
    """Rows by which two snapshots differ; each as of `find_snapshot`."""
    found = (find_snapshot(layout, before), find_snapshot(layout, after))
    old, new = (replace(read_snapshot(layout, past), entry=past.entry) for past in found)
    return compare_snapshots(layout, old, new)


def next_entry(
    layout: Layout, made: Snapshot, known: Sequence[EarlierSnapshot], begun: LogEntry
) -> LogEntry:
    """Complete the log entry of a snapshot that is about to count: number, time, changed rows."""
    number = max((one.entry.number for one in known), default=0) + 1
    created = datetime.now(UTC).isoformat(timespec="seconds")
    entry = replace(begun, number=number, created=created)
    if not known:
        return replace(entry, added=entry.rows_ok + entry.rows_bad)
    try:
        found = compare_snapshots(layout, read_snapshot(layout, known[-1]), made)
    except (CommitError, OSError, pa.ArrowException):
        return entry  # damaged: what it held is not known any more
    return replace(
        entry, added=len(found.added), changed=len(found.changed), removed=len(found.removed)
    )


def known_snapshots(layout: Layout) -> tuple[EarlierSnapshot, ...]:
    """Return all snapshots that were current, the oldest first.

    They are found by their files where `current.json` is damaged or lost."""
    try:
        current = read_current(layout)
        if current is not None:
            return current.all_snapshots
    except CommitError:
        pass
    found = []
    for name in layout.list("snapshots"):
        content = layout.read_bytes(name)
        if name_of(content) == PurePosixPath(name).stem:
            file = described(name, content)
            found.append(EarlierSnapshot(file, Snapshot.from_json(content).entry))
    return tuple(sorted(found, key=lambda past: (past.entry.number, past.entry.created)))


def compare_snapshots(layout: Layout, old: Snapshot, new: Snapshot) -> SnapshotDiff:
    """Rows by which two snapshots differ."""
    before, after = _states(layout, old), _states(layout, new)
    added, removed = after.keys() - before.keys(), before.keys() - after.keys()
    changed, suspects = set[str](), set[str]()
    for row_id in before.keys() & after.keys():
        (state, shard), (state_now, shard_now) = before[row_id], after[row_id]
        if state != state_now:
            changed.add(row_id)
        elif state == OK and (
            shard != shard_now or old.commits.get(shard) != new.commits.get(shard)
        ):
            suspects.add(row_id)  # its audio may differ
    audio = _audio(layout, old, {before[row_id][1] for row_id in suspects})
    audio_now = _audio(layout, new, {after[row_id][1] for row_id in suspects})
    changed |= {row_id for row_id in suspects if audio.get(row_id) != audio_now.get(row_id)}
    states = {
        row_id: (before.get(row_id, (None,))[0], after.get(row_id, (None,))[0])
        for row_id in sorted(added | removed | changed)
    }
    return SnapshotDiff(
        old.entry,
        new.entry,
        added=tuple(sorted(added)),
        removed=tuple(sorted(removed)),
        changed=tuple(sorted(changed)),
        states=states,
    )


def _states(layout: Layout, snapshot: Snapshot) -> dict[str, tuple[str, str]]:
    """Return the state and the shard of every row."""
    table = table_of(read_checked(layout, snapshot.index))
    names = ("row_id", "status", "error_class", "shard")
    columns = (table.column(name).to_pylist() for name in names)
    return {
        row_id: (OK if status == OK else str(reason), shard)
        for row_id, status, reason, shard in zip(*columns, strict=True)
    }


def _audio(layout: Layout, snapshot: Snapshot, shards: set[str]) -> dict[str, tuple[object, ...]]:
    """Return the identity of the audio of every good row of some shards."""
    refs = {shard: snapshot.commits[shard] for shard in sorted(shards)}

    def of_shard(named: tuple[str, CommitRef]) -> Iterator[tuple[str, tuple[object, ...]]]:
        shard, ref = named
        record = read_commit(layout, shard, ref.generation)
        if record is None or record.attempt != ref.attempt:
            raise CommitError(
                f"{layout.url()}: the commit of shard {shard} that a snapshot was made of is gone; "
                "run `earmill verify`"
            )
        table = read_table(layout, str(record.path("rows")), ["row_id", *AUDIO])
        rows = (table.column(name).to_pylist() for name in ("row_id", *AUDIO))
        return ((row_id, tuple(facts)) for row_id, *facts in zip(*rows, strict=True))

    with reading_pool(layout, len(refs)) as pool:
        return dict(pair for pairs in pool.map(of_shard, refs.items()) for pair in pairs)


def _chosen(known: tuple[EarlierSnapshot, ...], which: Which) -> EarlierSnapshot | None:
    if isinstance(which, bool):
        return None
    if isinstance(which, str) and re.fullmatch(r"[0-9]{1,9}", which):
        which = int(which)
    if isinstance(which, int):
        return next((past for past in known if past.entry.number == which), None)
    if which == CURRENT:
        return known[-1]
    if which == PREVIOUS:
        return known[-2] if len(known) > 1 else None
    until = _end_of(which)
    if until is not None:
        dated = [past for past in known if past.entry.created]
        closed = [p for p in dated if datetime.fromisoformat(p.entry.created) <= until]
        return closed[-1] if closed else None
    name = str(which)
    named = [p for p in known if PurePosixPath(p.snapshot.path).stem.startswith(name)]
    return named[0] if len(named) == 1 and len(name) >= _MIN_NAME_CHARS else None


def _end_of(which: str | date) -> datetime | None:
    """The last moment that a date or time means; None where it is none."""
    if isinstance(which, str):
        try:
            which = date.fromisoformat(which) if len(which) <= 10 else datetime.fromisoformat(which)
        except ValueError:
            return None
    if not isinstance(which, datetime):
        which = datetime(which.year, which.month, which.day, 23, 59, 59, 999999)
    return which if which.tzinfo else which.replace(tzinfo=UTC)
