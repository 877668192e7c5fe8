"""Files that no commit names: leftovers of crashed attempts, and how they go.

Only whole attempts are removed, only of shards that are committed (an attempt on one that is not
may still be under way on another host, and would then commit what is gone), and only while holding
the driver's lock. Anything else is listed and left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset.commit_record import CommitRecord, all_generations, read_commit
from earmill.pipeline.dataset.description import require_dataset
from earmill.pipeline.dataset.driver_lock import held
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.scratch import clear_scratch

PUBLISHED = ("data", "rows", "quarantine")
# A part of any format, installed here or not.
_PART = re.compile(r"(?:data|rows|quarantine)/([0-9]{5,})-([0-9a-f]{8})\.[^/]+")


@dataclass(frozen=True)
class Removed:
    """Orphans that were removed, and orphans that were kept.

    Args:
        parts: Files and stores that were removed.
        kept: Orphans that were left, file by file.
    """

    parts: list[str]
    kept: list[str]


@dataclass(frozen=True, slots=True)
class Part:
    """One attempt's file or store in `data`, `rows` or `quarantine`."""

    path: str
    shard: str
    attempt: str


def part_of(name: str) -> Part | None:
    """The part that a file is, or is in; None where its name is not one that we write."""
    match = _PART.match(name)
    return None if match is None else Part(match.group(0), match.group(1), match.group(2))


def published(layout: Layout) -> dict[str, int]:
    """Every file in the folders that commits name files of, with its bytes."""
    present: dict[str, int] = {}
    for folder in PUBLISHED:
        present |= layout.sizes(folder)
    return present


def named_files(records: Iterable[CommitRecord]) -> set[str]:
    """All files of some commits."""
    return {file.path for record in records for file in record.files}


def remove_orphans(layout: Layout) -> Removed:
    """Remove the attempts that no commit of any generation names.

    Raises:
        OutputError: There is no dataset at this place.
        LockedError: A live driver works on this output.
        OvertakenError: Another command took it over while this one gave no sign of life.
    """
    require_dataset(layout)
    with held(layout) as fence:
        records, unclear = _all_records(layout)
        present = published(layout)
        orphans = sorted(set(present) - named_files(records))
        parts = _removable(orphans, [one for one in records if one.shard not in unclear])
        for part in parts:
            fence.check(layout)
            layout.delete(part)
        fence.check(layout)
        clear_scratch(layout)
    return Removed(parts, [name for name in orphans if not _below(name, parts)])


def _all_records(layout: Layout) -> tuple[list[CommitRecord], set[str]]:
    """Records of every generation, and the shards with one of which nobody knows what it names."""
    found: list[CommitRecord] = []
    unclear: set[str] = set()
    for shard, numbers in all_generations(layout).items():
        for number in numbers:
            try:
                record = read_commit(layout, shard, number)
            except CommitError:
                record = None
            if record is None or record.shard != shard:
                unclear.add(shard)
            else:
                found.append(record)
    return found, unclear


def _removable(orphans: Iterable[str], records: Iterable[CommitRecord]) -> list[str]:
    """Files and stores of attempts that lost, of shards that are committed."""
    attempts: dict[str, set[str]] = {}
    for record in records:
        attempts.setdefault(record.shard, set()).add(record.attempt)
    parts = set()
    for name in orphans:
        part = part_of(name)
        if part and part.shard in attempts and part.attempt not in attempts[part.shard]:
            parts.add(part.path)
    return sorted(parts)


def _below(name: str, parts: Iterable[str]) -> bool:
    return any(name == part or name.startswith(f"{part}/") for part in parts)
