"""Do index, snapshot, cards and current.json belong to the commits that are there?

All of them are small, so they are hashed even where `verify` looks at sizes only. A dataset of
layout version 1 names no index: it is whole with one index of as many rows as the commits, and
both cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import pyarrow as pa

from earmill.pipeline.common.errors import CLOSE_AGAIN, CommitError
from earmill.pipeline.dataset.commit_record import StoredCommit
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.dataset.snapshot import (
    CARDS,
    Snapshot,
    moments_of,
    name_of,
    read_checked,
    read_current,
    read_snapshot,
)
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import CURRENT_FILE, commit_path


@dataclass
class Closing:
    """What is wrong with it, and which shards a changed commit record makes doubtful."""

    problems: list[str] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)


def check_closing(
    layout: Layout, dataset: DatasetFile, stored: Mapping[str, StoredCommit]
) -> Closing:
    """Compare what closes a dataset with its commits."""
    found = Closing()
    try:
        current = read_current(layout)
    except CommitError as err:
        found.problems.append(str(err))
        return found
    found.problems += _misnamed(layout)
    if current is None:
        found.problems += _not_closed(layout, dataset, stored)
        return found
    for card in current.cards:
        found.problems += _changed(layout, card)
    found.problems += [
        f"{name}: missing in {CURRENT_FILE}; {CLOSE_AGAIN}"
        for name in sorted(set(CARDS) - {card.path for card in current.cards})
    ]
    try:
        snapshot = read_snapshot(layout, current)
    except CommitError as err:
        found.problems.append(str(err))
        return found
    for file in (snapshot.dataset, snapshot.plan, snapshot.index):
        found.problems += _changed(layout, file)
    _compare_commits(snapshot, stored, found)
    if not found.problems and snapshot.moments != moments_of(stored, dataset.streams):
        found.problems.append(
            f"{current.snapshot.path}: its statistics are not those of the commits; {CLOSE_AGAIN}"
        )
    return found


def _changed(layout: Layout, file: OutFile) -> list[str]:
    try:
        read_checked(layout, file)
    except CommitError as err:
        return [str(err)]
    return []


def _misnamed(layout: Layout) -> list[str]:
    """Immutable files whose content is not what they are named by."""
    found = []
    for name in (*layout.list("index"), *layout.list("snapshots")):
        if name_of(layout.read_bytes(name)) != PurePosixPath(name).stem:
            found.append(
                f"{name}: content changed, its name is not the start of its sha256; --resume "
                "writes the one that counts again, one of an earlier closing may be removed"
            )
    return found


def _compare_commits(
    snapshot: Snapshot, stored: Mapping[str, StoredCommit], found: Closing
) -> None:
    for shard, ref in snapshot.commits.items():
        one = stored.get(shard)
        if one is None:
            continue  # reported as missing or unreadable
        name = commit_path(shard, one.record.generation)
        if ref.is_lost_in(one):
            found.damaged.add(shard)
            found.problems.append(
                f"{name}: content changed since the dataset was closed"
                if one.record.generation == ref.generation
                else f"{commit_path(shard, ref.generation)}: missing, it replaced {name}"
            )
        elif (one.record.generation, one.record.attempt) != (ref.generation, ref.attempt):
            found.problems.append(
                f"{name}: attempt {one.record.attempt}, but the index was made of attempt "
                f"{ref.attempt}; {CLOSE_AGAIN}"
            )
    if extra := sorted(set(stored) - set(snapshot.commits)):
        found.problems.append(
            f"{CURRENT_FILE}: the index lacks {len(extra)} committed shards, {extra[0]} first; "
            f"{CLOSE_AGAIN}"
        )


def _not_closed(
    layout: Layout, dataset: DatasetFile, stored: Mapping[str, StoredCommit]
) -> list[str]:
    """Parts of a closing without the file that completes it."""
    indexes = layout.list("index")
    cards = [name for name in CARDS if layout.exists(name)]
    if not indexes and not cards and not layout.list("snapshots"):
        return []
    if dataset.layout_version > 1 or not indexes:
        return [f"{CURRENT_FILE}: missing, the dataset was not closed to the end; {CLOSE_AGAIN}"]
    found = [f"{name}: missing; {CLOSE_AGAIN}" for name in CARDS if name not in cards]
    if len(indexes) > 1:
        found.append(f"{len(indexes)} index files and nothing says which one counts; {CLOSE_AGAIN}")
    rows = sum(one.record.rows_ok + one.record.rows_bad for one in stored.values())
    for name in indexes:
        held = _rows_of(layout, name)
        if held is not None and held != rows:
            found.append(f"{name}: expected {rows} rows, got {held}; {CLOSE_AGAIN}")
    return found


def _rows_of(layout: Layout, name: str) -> int | None:
    try:
        return int(read_table(layout, name, ["row_id"]).num_rows)
    except (OSError, ValueError, pa.ArrowException):
        return None  # reported by its name
