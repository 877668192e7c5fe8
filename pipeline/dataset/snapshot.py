"""Snapshots of a dataset: the current index and the commits that it belongs to.

A snapshot is immutable and named by its content: one index, its plan and dataset.json, and the
generation, attempt and hash of every commit record. `current.json` names the current snapshot and
its cards. The file is written last and replaced whole, so a dataset is closed by the earlier
snapshot or by the new one. Index files cannot be confused, and an index cannot be read with the
files of another attempt. Earlier snapshots stay readable: `current.json` lists them with hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from earmill.pipeline.common.errors import CLOSE_AGAIN, CommitError, OutputError
from earmill.pipeline.dataset.commit_record import StoredCommit, parsed_json
from earmill.pipeline.dataset.description import read_dataset
from earmill.pipeline.formats.moments import StoredMoments, dataset_moments
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.documents import Strict
from earmill.pipeline.storage.layout import Layout

CONTENT_CHARS = 16
# Cards that every closed dataset has.
CARDS = (paths.README_FILE, paths.CROISSANT_FILE)


class Attempt(Protocol):
    """The attempt on a shard that a commit is of, as `CommitRecord` states it."""

    @property
    def generation(self) -> int: ...

    @property
    def attempt(self) -> str: ...


@dataclass(frozen=True, slots=True)
class CommitRef(Strict):
    """The commit record a snapshot was made of."""

    generation: int
    attempt: str
    sha256: str

    def is_lost_in(self, stored: StoredCommit) -> bool:
        """Return True if the current record is this one damaged, or an older generation."""
        now = stored.record
        if now.generation < self.generation:
            return True
        same = (now.generation, now.attempt) == (self.generation, self.attempt)
        return same and stored.sha256 != self.sha256


@dataclass(frozen=True)
class LogEntry(Strict):
    """How a snapshot came about, and its rows.

    Args:
        number: 1, 2, ... in the order of closing; 0 where the release that wrote it did not count.
        created: When it was closed, ISO 8601, UTC. why: Kind of the run that made it.
        rows_ok, rows_bad: Good and quarantined rows in it.
        revision: Of the description that it was closed with, 0 for dataset.json.
        added, changed, removed: Rows against the snapshot before; see `dataset.history`.
    """

    number: int = 0
    created: str = ""
    why: str = ""
    revision: int = 0
    rows_ok: int = 0
    rows_bad: int = 0
    added: int = 0
    changed: int = 0
    removed: int = 0


@dataclass(frozen=True)
class Snapshot(Strict):
    """Files that belong together.

    Args:
        commits: Commit records by shard.
        moments: Statistics of the dataset, of each stream that every commit has them of.
        additions: Name of each set of features beside these rows, in `additions/<name>`, to its
            snapshot there; the path is relative to this root.
        entry: How it came about; closing again what has not changed keeps the one of before.
    """

    index: OutFile
    plan: OutFile
    dataset: OutFile
    commits: Mapping[str, CommitRef]
    moments: Mapping[str, StoredMoments] = field(default_factory=dict)
    additions: Mapping[str, OutFile] = field(default_factory=dict)
    entry: LogEntry = LogEntry()
    layout_version: int = paths.LAYOUT_VERSION

    def to_json(self) -> str:
        """Return the JSON text, one commit a line; `from_json` gives an equal object."""
        return _canonical(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Snapshot:
        """Parse a snapshot; CommitError where it is none."""
        return parsed_json(cls, text, "a snapshot")

    def is_of(self, records: Mapping[str, Attempt]) -> bool:
        """Return True if the snapshot was made of these commits."""
        made_of = {shard: (ref.generation, ref.attempt) for shard, ref in self.commits.items()}
        return made_of == {shard: (r.generation, r.attempt) for shard, r in records.items()}


@dataclass(frozen=True)
class EarlierSnapshot(Strict):
    """A snapshot that counted before, and its entry in the log."""

    snapshot: OutFile
    entry: LogEntry


@dataclass(frozen=True)
class Current(Strict):
    """The content of current.json.

    Args:
        snapshot: The snapshot that counts.
        cards: README.md, croissant.json and, but in datasets of earlier releases,
            provenance.jsonld, made from the snapshot.
        entry: Log entry of the snapshot.
        history: Earlier snapshots, the oldest first.
        sha256: Hash of the other fields, where they were read from a file.
    """

    snapshot: OutFile
    cards: tuple[OutFile, ...]
    entry: LogEntry = LogEntry()
    history: tuple[EarlierSnapshot, ...] = ()
    layout_version: int = paths.LAYOUT_VERSION
    sha256: str = field(default="", compare=False)

    def to_json(self) -> str:
        """Return the JSON text with its own hash; `from_json` gives an equal object."""
        data = asdict(self)
        del data["sha256"]
        if self.entry == LogEntry():  # of a release that kept no log
            del data["entry"], data["history"]
        return _canonical({**data, "sha256": _sha256(_canonical(data).encode())})

    @property
    def all_snapshots(self) -> tuple[EarlierSnapshot, ...]:
        """Return all snapshots that can be read, the oldest first, the current one last."""
        return (*self.history, EarlierSnapshot(self.snapshot, self.entry))

    @classmethod
    def from_json(cls, text: str | bytes) -> Current:
        """Parse current.json; CommitError where it is damaged in any byte."""
        current = parsed_json(cls, text, paths.CURRENT_FILE)
        if current.to_json() != (text if isinstance(text, str) else text.decode()):
            raise CommitError(f"not {paths.CURRENT_FILE} as it was written: its content changed")
        return current


def _canonical(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=1, sort_keys=True) + "\n"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def require_current(layout: Layout) -> Current:
    """Return `current.json`, or raise OutputError where the dataset was never closed."""
    current = read_current(layout)
    if current is None:
        raise OutputError(
            f"{layout.url()}: expected a closed dataset, found no snapshot; run the job to its end"
        )
    return current


def moments_of(
    stored: Mapping[str, StoredCommit], streams: Sequence[Mapping[str, Any]]
) -> dict[str, StoredMoments]:
    """Merge the statistics of the commits, in the order of shards."""
    return dataset_moments([one.record.moments for _, one in sorted(stored.items())], streams)


def described(path: str, content: bytes) -> OutFile:
    """A small file with its hash."""
    return OutFile(path, len(content), _sha256(content))


def name_of(content: bytes) -> str:
    """How an immutable file is named: by the start of its sha256."""
    return _sha256(content)[:CONTENT_CHARS]


def put_named(layout: Layout, path_of: Callable[[str], str], content: bytes) -> OutFile:
    """Write a file that is named by its content; one that was damaged since is written again."""
    file = described(path_of(name_of(content)), content)
    if not layout.create_own(file.path, content):
        layout.write_bytes(file.path, content)
    return file


def read_checked(layout: Layout, file: OutFile) -> bytes:
    """The content of a file that something else names with its hash; CommitError where the file is
    missing or holds something else."""
    try:
        content = layout.read_bytes(file.path)
    except (OSError, ValueError) as err:  # a ValueError: the path leads out of the dataset
        raise CommitError(
            f"{layout.url()}, {file.path}: {type(err).__name__}: {err}; {CLOSE_AGAIN}"
        ) from err
    if _sha256(content) != file.sha256:
        raise CommitError(
            f"{layout.url(file.path)}: content changed (expected sha256 {file.sha256[:12]}, got "
            f"{_sha256(content)[:12]}): it is damaged; {CLOSE_AGAIN}"
        )
    return content


def read_current(layout: Layout) -> Current | None:
    """Return `current.json`, or None where the dataset was never closed or is of layout version 1;
    CommitError where it is damaged."""
    try:
        return Current.from_json(layout.read_bytes(paths.CURRENT_FILE))
    except FileNotFoundError:
        return None
    except CommitError as err:
        raise CommitError(f"{layout.url(paths.CURRENT_FILE)}: {err}; {CLOSE_AGAIN}") from err


def read_snapshot(layout: Layout, named: Current | EarlierSnapshot) -> Snapshot:
    """The snapshot that counts, or one of before; CommitError where it is missing or damaged."""
    return Snapshot.from_json(read_checked(layout, named.snapshot))


def current_index(layout: Layout) -> str | None:
    """Path of the index that counts; None before the dataset is closed.

    A dataset of layout version 1 names none: there the only index counts, and of several none.
    """
    current = read_current(layout)
    if current is not None:
        return read_snapshot(layout, current).index.path
    found = layout.list("index")
    return found[0] if len(found) == 1 else None


def is_closed(layout: Layout, records: Mapping[str, Attempt]) -> bool:
    """Return True if index and cards of exactly these commits exist, in the newest revision."""
    try:
        current = read_current(layout)
        if current is None or not {card.path for card in current.cards} >= set(CARDS):
            return False
        snapshot = read_snapshot(layout, current)
        for file in (*current.cards, snapshot.plan, snapshot.dataset, snapshot.index):
            read_checked(layout, file)
        dataset = read_dataset(layout)
        is_newest = dataset is not None and dataset.path == snapshot.dataset.path
        return is_newest and snapshot.is_of(records)
    except CommitError:
        return False
