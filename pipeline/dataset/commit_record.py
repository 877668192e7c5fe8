"""Commit records: what one shard consists of, and which record of a shard counts.

`commits/<shard>.json` is generation 0. A record that replaces it is created beside it, if absent,
as `commits/<shard>.r1.json`, and says what it replaces; the highest generation counts. Nothing is
removed by that, so a reader of an older index goes on with the record that the index was made of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import pyarrow as pa
from pydantic import AfterValidator
from pydantic_core import to_json

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.machine import Threads
from earmill.pipeline.dataset.description import dropped_shards
from earmill.pipeline.formats.format import format_name, format_of
from earmill.pipeline.formats.moments import StoredMoments
from earmill.pipeline.formats.row_table import quarantine_table
from earmill.pipeline.formats.rows import OutFile, QuarantineRow
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.documents import (
    Strict,
    UnreadableVersionError,
    read_table,
    versioned_json,
)
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import LAYOUT_VERSION

T = TypeVar("T")

READ_THREADS = 16
# On a disk, one more thread pays for this number of small files.
FILES_A_THREAD = 64
# In `CommitRecord.info`; records of earlier releases have none.
BAD_BY_CLASS = "bad_by_class"
COMPUTE_AGAIN = "run `earmill extract` with --resume --repair, which computes the shard again"


@dataclass(frozen=True)
class CommitRecord(Strict):
    """The files and totals of one shard; the content of `commits/<shard>.json`.

    Args:
        shard: Shard id.
        attempt: The attempt that won.
        plan_id: Plan of the shard.
        spec_sha256: Hash of the job spec.
        formats: Formats of the feature files.
        dtype: Dtype of the values.
        rows_ok: Rows with features.
        rows_bad: Rows in quarantine.
        plan_rows: Rows of the plan that are covered, good or bad; differs from the sum of the two
            where channels are rows of their own.
        seconds: Audio behind the good rows, s.
        frames: Stream name to frames in the shard.
        values_sha256: Stream name to the digest of `earmill.pipeline.formats.digest`.
        files: Every file, those inside a Zarr store included.
        moments: Name of each stream of frames to its statistics, see `formats.moments`; empty in
            records of layout version 2 and before.
        info: How it came about: timings_s, cpu_s (see `common.timing`), device, versions, worker,
            created; and bad_by_class, error class to quarantined rows, where there are any.
        generation: How often the shard was committed before.
        replaces: The attempt of the generation before; None for the first and where that record
            could not be read.
    """

    shard: str
    attempt: str
    plan_id: str
    spec_sha256: str
    formats: tuple[Annotated[str, AfterValidator(format_name)], ...]
    dtype: str
    rows_ok: int
    rows_bad: int
    plan_rows: int
    seconds: float
    frames: Mapping[str, int]
    values_sha256: Mapping[str, str]
    files: tuple[OutFile, ...]
    moments: Mapping[str, StoredMoments] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    layout_version: int = LAYOUT_VERSION
    generation: int = 0
    replaces: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.files)

    def path(self, kind: str) -> str | None:
        """Path of the `rows`, the `quarantine`, or a format's part; None where there is none.

        Raises:
            ExtensionError: The shard has a part of this format, which is not installed here.
        """
        if kind == "rows":
            return paths.rows_path(self.shard, self.attempt)
        if kind == "quarantine":
            return paths.quarantine_path(self.shard, self.attempt) if self.rows_bad else None
        if kind not in self.formats:
            return None
        return paths.data_path(self.shard, self.attempt, format_of(kind).suffix)

    def to_json(self) -> str:
        """The record as JSON text; `from_json` gives an equal record."""
        return to_json(self, indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> CommitRecord:
        """Parse a record.

        Raises:
            CommitError: Not JSON, a field is missing or of another type, or another version.
        """
        return parsed_json(cls, text, "a commit record")


@dataclass(frozen=True)
class Recommit:
    """How a shard is committed again.

    Args:
        generation: Number of the new record; 0 where the shard has no record yet.
        keep: Quarantined rows that are not tried again and stay as they are.
    """

    generation: int = 0
    keep: tuple[QuarantineRow, ...] = ()


def parsed_json(kind: type[T], text: str | bytes, what: str) -> T:
    """A file of commits or snapshots as its dataclass; CommitError where it is not `what`."""
    try:
        return versioned_json(kind, text)
    except UnreadableVersionError as err:
        raise CommitError(f"{err}; read it with the release that wrote it") from err
    except ValueError as err:
        raise CommitError(f"not {what}: {err}") from err


@dataclass(frozen=True, slots=True)
class StoredCommit:
    """A commit record as it stands in the dataset, with the hash of its bytes."""

    record: CommitRecord
    sha256: str


def generations(layout: Layout) -> dict[str, list[int]]:
    """Every shard of the dataset that has a record, with its generations in order.

    Listings only, and the newest revision where there is one: it says which shards no longer count.
    """
    dropped = dropped_shards(layout)
    return {
        shard: found for shard, found in all_generations(layout).items() if shard not in dropped
    }


def all_generations(layout: Layout) -> dict[str, list[int]]:
    """Return the generations of all shards, shards of older snapshots included."""
    found: dict[str, list[int]] = {}
    for name in layout.list("commits"):
        parsed = paths.parse_commit_path(name)
        if parsed is not None:
            found.setdefault(parsed[0], []).append(parsed[1])
    return {shard: sorted(numbers) for shard, numbers in sorted(found.items())}


def committed_shards(layout: Layout) -> set[str]:
    """Ids of the shards that are done."""
    return set(generations(layout))


def read_stored(layout: Layout, shard_id: str, generation: int = 0) -> StoredCommit | None:
    """One record of a shard with the hash of its bytes, or None where it does not exist.

    Raises:
        CommitError: It cannot be parsed, or is of another generation than its name says.
    """
    name = paths.commit_path(shard_id, generation)
    try:
        text = layout.read_bytes(name)
    except FileNotFoundError:
        return None
    try:
        record = CommitRecord.from_json(text)
    except CommitError as err:
        raise CommitError(f"{layout.url(name)}: {err}; {COMPUTE_AGAIN}") from err
    if record.generation != generation:
        raise CommitError(
            f"{layout.url(name)}: expected generation {generation}, got {record.generation}"
        )
    return StoredCommit(record, hashlib.sha256(text).hexdigest())


def read_commit(layout: Layout, shard_id: str, generation: int = 0) -> CommitRecord | None:
    """One record of a shard, or None where it does not exist; see `read_stored`."""
    stored = read_stored(layout, shard_id, generation)
    return None if stored is None else stored.record


def stored_commits(layout: Layout, without: Container[str] = ()) -> dict[str, StoredCommit]:
    """The record that counts of every committed shard, in order.

    Args:
        without: Shards that are left out, unread.

    Raises:
        CommitError: One of them cannot be read; it names the file.
    """
    return _reduced(layout, lambda stored: stored, without)


def commits(layout: Layout, without: Container[str] = ()) -> dict[str, CommitRecord]:
    """The records of `stored_commits` alone."""
    return _reduced(layout, lambda stored: stored.record, without)


def commits_as(
    layout: Layout, part: Callable[[CommitRecord], T], without: Container[str] = ()
) -> dict[str, T]:
    """A part of each of these records; of the rest, which names every file, nothing is kept.

    Args:
        part: Takes it, in one of several threads.
    """
    return _reduced(layout, lambda stored: part(stored.record), without)


def _reduced(
    layout: Layout, part: Callable[[StoredCommit], T], without: Container[str]
) -> dict[str, T]:
    newest = [
        (shard, numbers[-1])
        for shard, numbers in generations(layout).items()
        if shard not in without
    ]

    def read(item: tuple[str, int]) -> T | None:
        stored = read_stored(layout, *item)
        return None if stored is None else part(stored)

    with reading_pool(layout, len(newest)) as pool:
        found = zip(newest, pool.map(read, newest), strict=True)
        return {shard: one for (shard, _), one in found if one is not None}


def reading_pool(layout: Layout, files: int) -> Threads:
    """Threads that read so many small files of a dataset: a store makes each of them wait, while a
    few on a disk are read in the time in which many threads begin."""
    few = min(READ_THREADS, 2 + files // FILES_A_THREAD)
    return Threads(few if layout.is_local else READ_THREADS)


def bad_rows(layout: Layout, record: CommitRecord) -> pa.Table:
    """The table of quarantined rows that a commit names; an empty one where it names none."""
    path = record.path("quarantine")
    return quarantine_table([]) if path is None else read_table(layout, path)
