"""Commit records: the content of one shard, and the record of a shard that counts.

`commits/<shard>.json` is generation 0. A replacing record is created beside it, if absent, as
`commits/<shard>.r1.json`; the highest generation counts. Readers of an older index use the older
record. A plan row is covered by one or more good rows (channels may be rows of their own) or by one
quarantine row; a quarantine row `<id>#ch<k>` stands for one channel.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

import pyarrow as pa
from pydantic import AfterValidator
from pydantic_core import to_json

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.machine import Threads
from earmill.pipeline.common.text import few
from earmill.pipeline.dataset.description import read_dataset
from earmill.pipeline.formats.format import Format, Promise, format_name, format_of
from earmill.pipeline.formats.moments import StoredMoments
from earmill.pipeline.formats.row_table import QUARANTINE_SCHEMA, quarantine_table
from earmill.pipeline.formats.rows import OutFile, QuarantineRow
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.documents import (
    Strict,
    UnreadableVersionError,
    read_table,
    versioned_json,
)
from earmill.pipeline.storage.layout import Layout

T = TypeVar("T")

READ_THREADS = 16
FILES_A_THREAD = 64  # Small files on a disk for which one more thread pays.
# In `CommitRecord.info`; records of earlier releases have none.
BAD_BY_CLASS = "bad_by_class"
COMPUTE_AGAIN = "run `earmill extract` with --resume --repair, which computes the shard again"
NAMED = 5  # Names that a message shows of a list.
# End of the id of a row that is one of several channels.
CHANNEL = re.compile(r"(?<=.)#ch[0-9]+\Z", re.DOTALL)


@dataclass(frozen=True)
class CommitRecord(Strict):
    """The files and totals of one shard; the content of `commits/<shard>.json`."""

    shard: str
    attempt: str
    plan_id: str
    spec_sha256: str
    formats: tuple[Annotated[str, AfterValidator(format_name)], ...]
    dtype: str
    rows_ok: int
    rows_bad: int
    plan_rows: int  # Not the sum of good and bad rows if channels are rows.
    seconds: float  # Audio behind the good rows.
    frames: Mapping[str, int]  # By stream, as `values_sha256` (`formats.digest`).
    values_sha256: Mapping[str, str]
    files: tuple[OutFile, ...]  # Files inside a Zarr store included.
    # By stream; empty before layout version 3.
    moments: Mapping[str, StoredMoments] = field(default_factory=dict)
    # timings_s, cpu_s (`common.monitoring`), device, versions, worker, created. With several models
    # model_cpu_s, seconds by model. With quarantined rows bad_by_class, rows by error class.
    info: Mapping[str, Any] = field(default_factory=dict)
    layout_version: int = paths.LAYOUT_VERSION
    generation: int = 0  # How often the shard was committed before.
    replaces: str | None = None  # Attempt of the generation before, if its record could be read.
    # Hash of the file that the record was read from.
    sha256: str = field(default="", compare=False)

    @property
    def nbytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def path(self, kind: str) -> str | None:
        """Return the path of the `rows`, the `quarantine` or a format's part, or None;
        ExtensionError if the format is not installed here."""
        if kind == "rows":
            return paths.rows_path(self.shard, self.attempt)
        if kind == "quarantine":
            return paths.quarantine_path(self.shard, self.attempt) if self.rows_bad else None
        if kind not in self.formats:
            return None
        return paths.data_path(self.shard, self.attempt, format_of(kind).suffix)

    def to_json(self) -> str:
        return to_json(self, indent=1, exclude={"sha256"}).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> CommitRecord:
        return parsed_json(cls, text, "a commit record")


@dataclass(frozen=True, slots=True)
class Committed:
    """The facts that a driver keeps of the record of each shard."""

    rows_ok: int
    rows_bad: int
    nbytes: int  # Bytes of its data files.
    seconds: float  # Audio of its good rows.
    bad_by_class: Mapping[str, int] = field(default_factory=dict)  # Quarantined rows.
    generation: int = 0
    attempt: str = ""

    @classmethod
    def of(cls, record: CommitRecord) -> Committed:
        return cls(
            rows_ok=record.rows_ok,
            rows_bad=record.rows_bad,
            nbytes=record.nbytes,
            seconds=record.seconds,
            bad_by_class=record.info.get(BAD_BY_CLASS, {}),
            generation=record.generation,
            attempt=record.attempt,
        )


@dataclass(frozen=True)
class Recommit:
    """The recommit of a shard: the number of the new record, 0 for the first, and the quarantined
    rows that are not tried again."""

    generation: int = 0
    keep: tuple[QuarantineRow, ...] = ()


def parsed_json(kind: type[T], text: str | bytes, what: str) -> T:
    """Return a file of commits or snapshots as its dataclass; CommitError if it is not `what`."""
    try:
        return versioned_json(kind, text)
    except UnreadableVersionError as err:
        raise CommitError(f"{err}; read it with the release that wrote it") from err
    except ValueError as err:
        raise CommitError(f"not {what}: {err}") from err


def newest_generations(layout: Layout) -> dict[str, int]:
    """Return every shard with a record that no revision dropped, and its newest generation."""
    dataset = read_dataset(layout) if layout.list("revisions") else None
    dropped = frozenset() if dataset is None else dataset.dropped
    found = all_generations(layout).items()
    return {shard: numbers[-1] for shard, numbers in found if shard not in dropped}


def all_generations(layout: Layout) -> dict[str, list[int]]:
    """Return the generations of all shards, shards of older snapshots included."""
    found: dict[str, list[int]] = {}
    for name in layout.list("commits"):
        parsed = paths.parse_commit_path(name)
        if parsed is not None:
            found.setdefault(parsed[0], []).append(parsed[1])
    return {shard: sorted(numbers) for shard, numbers in sorted(found.items())}


def committed_shards(layout: Layout) -> set[str]:
    return set(newest_generations(layout))


def read_commit(layout: Layout, shard_id: str, generation: int = 0) -> CommitRecord | None:
    """Return a record of a shard, or None; CommitError if it is damaged, or of another generation
    than its name says."""
    name = paths.commit_path(shard_id, generation)
    if (text := layout.read_if_there(name)) is None:
        return None
    try:
        record = CommitRecord.from_json(text)
    except CommitError as err:
        raise CommitError(f"{layout.url(name)}: {err}; {COMPUTE_AGAIN}") from err
    if record.generation != generation:
        raise CommitError(
            f"{layout.url(name)}: expected generation {generation}, got {record.generation}"
        )
    return replace(record, sha256=hashlib.sha256(text).hexdigest())


def commits(layout: Layout) -> dict[str, CommitRecord]:
    """Return the current record of every committed shard, in order."""
    return commits_as(layout, lambda record: record)


def commits_as(
    layout: Layout, part: Callable[[CommitRecord], T], without: Container[str] = ()
) -> dict[str, T]:
    """Return only `part(record)` of each current record, except of shards in `without`; `part` is
    called in several threads."""
    newest = [entry for entry in newest_generations(layout).items() if entry[0] not in without]

    def read(entry: tuple[str, int]) -> T | None:
        record = read_commit(layout, *entry)
        return None if record is None else part(record)

    with reading_pool(layout, len(newest)) as pool:
        found = zip(newest, pool.map(read, newest), strict=True)
        return {shard: one for (shard, _), one in found if one is not None}


def reading_pool(layout: Layout, files: int) -> Threads:
    """Return threads that read many small files: a store makes each wait, a disk does not."""
    few = min(READ_THREADS, 2 + files // FILES_A_THREAD)
    return Threads(few if layout.is_local else READ_THREADS)


def promise_of(
    record: CommitRecord,
    streams: Mapping[str, Mapping[str, Any] | StreamInfo],
    dtype: str,
    fmt: Format,
) -> Promise:
    layouts = {name: fmt.layout_of(info) for name, info in streams.items()}
    return Promise(
        rows=record.rows_ok,
        frames={name: record.frames[name] for name in streams},
        columns={k: (v.stored_width, v.stored_dtype(dtype)) for k, v in layouts.items()},
        files={file.path: file for file in record.files},
    )


def bad_rows(layout: Layout, record: CommitRecord) -> pa.Table:
    """Return the table of quarantined rows that a commit names; empty if it names none."""
    path = record.path("quarantine")
    return quarantine_table([]) if path is None else read_table(layout, path)


def quarantined_rows(layout: Layout, record: CommitRecord) -> list[QuarantineRow]:
    table = bad_rows(layout, record).select(QUARANTINE_SCHEMA.names)
    return [QuarantineRow(**row) for row in table.to_pylist()]


def plan_row_of(row_id: str, plan_rows: Container[str]) -> str:
    """Return the plan row of a quarantine row; the id itself where the plan has it."""
    return row_id if row_id in plan_rows else CHANNEL.sub("", row_id)


def row_problems(
    ok: Sequence[tuple[str, str]], bad: Sequence[str], plan_rows: Sequence[str]
) -> list[str]:
    """Find problems in (row id, plan row id) of a shard's good rows and the ids of its bad rows."""
    planned = frozenset(plan_rows)
    good_plan = {plan_row for _, plan_row in ok}
    covered = good_plan | {plan_row_of(row_id, planned) for row_id in bad}
    counts = Counter([row_id for row_id, _ in ok] + list(bad))
    found = {
        "row twice": [row_id for row_id, count in counts.items() if count > 1],
        "row not in the plan": covered - planned,
        "row missing": planned - covered,
        "row both good and in quarantine": good_plan & set(bad) & planned,
    }
    return [f"{what}: {some(names)}" for what, names in found.items() if names]


def some(names: Iterable[str]) -> str:
    return few([repr(name) for name in sorted(names)], NAMED, ", ")
