"""Remove files that nothing names: attempts that lost, replaced commits, shards that were dropped.

Unwanted snapshots first leave the history, by one replacement of current.json; then files that only
they named are removed, records before the files they name. So a killed run leaves a whole dataset.
Files younger than the grace time stay, and attempts on a shard without a commit: a worker that was
cut off long ago may still commit it. Half-written files and locks of killed drivers go as well.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from earmill.pipeline.common.text import Shown, bytes_text
from earmill.pipeline.dataset.commit_record import all_generations, read_commit
from earmill.pipeline.dataset.copied_rows import carried_rows
from earmill.pipeline.dataset.description import DatasetFile, require_dataset
from earmill.pipeline.dataset.driver_lock import held
from earmill.pipeline.dataset.finalise import closed_by_another
from earmill.pipeline.dataset.snapshot import (
    Current,
    EarlierSnapshot,
    LogEntry,
    read_snapshot,
    require_current,
)
from earmill.pipeline.dataset.verify import PUBLISHED
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.backend import Entry
from earmill.pipeline.storage.layout import Layout

GRACE_S = 24 * 3600.0
# A hidden file or folder, and the second lock with which earlier releases took over. Additions are
# skipped, because they are datasets of their own.
_UNFINISHED = re.compile(r"(?!additions/)(?:[^/.][^/]*/)*\.[^/]+|driver\.json\.[^/]+")
# A part of any format, installed here or not: its path, shard and attempt.
_PART = re.compile(r"(?:data|rows|quarantine)/([0-9]{5,})-([0-9a-f]{8})\.[^/]+")
# In the order of removal: files that name other files come first.
FOLDERS = ("snapshots", "index", "plan", "revisions", "commits", *PUBLISHED)


@dataclass(frozen=True, repr=False)
class Collected(Shown):
    """Files and snapshots that a collection removes.

    Args:
        snapshots: Log entries of the snapshots that leave the history, the oldest first.
        parts: Files and folders; `files`, `bytes` are the number of files in them, and their size.
        young: Files that no snapshot names but are younger than the grace time: they stay.
    """

    snapshots: tuple[LogEntry, ...]
    parts: tuple[str, ...]
    files: int
    bytes: int
    young: int

    def shown(self) -> dict[str, str]:
        return {
            "snapshots": f"{len(self.snapshots):,}",
            "files": f"{self.files:,}, {bytes_text(self.bytes)}",
            "too young to go": f"{self.young:,}",
        }


def collect_garbage(
    layout: Layout,
    *,
    keep: int | None = None,
    older_than: timedelta | None = None,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
) -> Collected:
    """Remove files that no snapshot names, and snapshots on request; the current one always stays.

    Args:
        keep: Keep this many snapshots, the newest.
        older_than: Remove snapshots closed longer ago than this. With both a snapshot goes that
            neither keeps; with none all stay.
        grace_s: Age of a file below which it stays, s.
    Raises:
        CommitError: A snapshot or commit record is damaged, so that what it names is unknown.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"expected to keep at least 1 snapshot, got {keep}")
    require_dataset(layout)
    require_current(layout)
    now = time.time()
    with held(layout) as fence:
        # Read with the lock: another command may have changed the dataset before.
        dataset, current = require_dataset(layout), require_current(layout)
        gone = _expired(current, keep, older_than, now)
        kept = replace(current, history=tuple(past for past in current.history if past not in gone))
        named = _named(layout, dataset, kept)
        known = {*all_generations(layout), *dataset.dropped}
        parts, files, young = list[str](), list[Entry](), 0
        for path, entries in _unnamed(layout, named, known):
            if any(file.modified is None or file.modified > now - grace_s for file in entries):
                young += len(entries)
            else:
                parts.append(path)
                files += entries
        if not dry_run:
            if gone:
                seen, shorter = current.to_json().encode(), kept.to_json().encode()
                fence.check(layout)
                if not layout.replace_own(paths.CURRENT_FILE, shorter, seen):
                    raise closed_by_another(layout)
            for part in parts:
                # Names come back: the index of the same rows has the same name.
                fence.check(layout)
                layout.delete(part)
    nbytes = sum(file.nbytes for file in files)
    return Collected(tuple(past.entry for past in gone), tuple(parts), len(files), nbytes, young)


def _expired(
    current: Current, keep: int | None, older_than: timedelta | None, now_s: float
) -> list[EarlierSnapshot]:
    if keep is None and older_than is None:
        return []
    candidates = [*current.history][: len(current.history) + 1 - (keep or 1)]
    if older_than is None:
        return candidates
    until = datetime.fromtimestamp(now_s, UTC) - older_than
    # A snapshot without a date is older than all that have one.
    return [
        past
        for past in candidates
        if not past.entry.created or datetime.fromisoformat(past.entry.created) < until
    ]


def _named(layout: Layout, dataset: DatasetFile, current: Current) -> set[str]:
    named = {dataset.path, paths.plan_path(dataset.plan_id)}
    if dataset.change is not None and dataset.change.carried is not None:
        named.add(dataset.change.carried.path)
    keys = set()
    for past in current.all_snapshots:
        snapshot = read_snapshot(layout, past)
        named |= {past.snapshot.path, snapshot.index.path, snapshot.plan.path}
        named.add(snapshot.dataset.path)
        keys |= {(shard, ref.generation) for shard, ref in snapshot.commits.items()}
    # Commits that are not closed yet, and commits that rows are still copied from.
    found = all_generations(layout)
    keys |= {(shard, ns[-1]) for shard, ns in found.items() if shard not in dataset.dropped}
    for rows in carried_rows(layout, dataset).values():
        keys |= {(row.from_shard, row.from_generation) for row in rows if row.shard not in found}
    records = [record for key in sorted(keys) if (record := read_commit(layout, *key)) is not None]
    named |= {paths.commit_path(record.shard, record.generation) for record in records}
    named |= {file.path for record in records for file in record.files}
    return named


def _unnamed(
    layout: Layout, named: set[str], known: Collection[str]
) -> Iterator[tuple[str, list[Entry]]]:
    """Yield unnamed files and folders, and the files in them, in the order of their removal.
    Attempts on shards that are not `known` (committed or dropped) may be under way."""
    committed = {part[0] for name in named if (part := _PART.match(name)) is not None}
    for folder in FOLDERS:
        entries, parts = layout.entries(folder), defaultdict[str, list[Entry]](list)
        for name in entries.keys() - named:
            part = _PART.match(name)
            if paths.plan_of_part(name) in named:
                continue
            if folder not in PUBLISHED:
                parts[name] = [entries[name]]
            # A foreign file in a committed store must not take the store with it.
            elif part is not None and part[1] in known and part[0] not in committed:
                parts[part[0]].append(entries[name])
        yield from sorted(parts.items())
    # Unfinished parts of processes that are gone, and second locks of earlier releases.
    unfinished = defaultdict[str, list[Entry]](list)
    for name, entry in layout.everything().items():
        if (found := _UNFINISHED.match(name)) is not None:
            unfinished[found[0]].append(entry)
    yield from sorted(unfinished.items())
