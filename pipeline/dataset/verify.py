"""Is the dataset whole? Plan against commits, commits against files, row tables against the plan.

Reads only; every problem is one line that names the shard or file. Without hashes it looks at
listings and the small files, with them it reads every byte. Files that no commit names are reported
apart: they are harmless leftovers of crashed attempts. So are those that only replaced commits
name: readers of an older index may still need them, and nobody answers for them any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from earmill.pipeline.common.byte_streams import sha256_of
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.machine import Threads
from earmill.pipeline.common.text import Shown, audio, bytes_text, few
from earmill.pipeline.dataset.commit_record import CommitRecord, StoredCommit, read_stored
from earmill.pipeline.dataset.description import DatasetFile, require_dataset
from earmill.pipeline.dataset.orphans import named_files, published
from earmill.pipeline.dataset.row_coverage import row_problems, some
from earmill.pipeline.dataset.verify_closing import check_closing
from earmill.pipeline.formats.registry import installed
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.planning.plan import read_row_ids
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout

HASH_THREADS = 8


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """What `verify` found.

    Args:
        problems: One readable line each; empty where the dataset is whole.
        shards: Shards with a commit. shards_planned: Shards of the plan.
        rows_ok, rows_bad: Good and quarantined rows of the commits. plan_rows: Rows of the plan.
        seconds: Audio behind the good rows, s.
        files, bytes: What the commits name. hashed: Whether every byte was read.
        orphans: Files that no commit names. replaced: Files that only replaced commits name.
        damaged: Shards of the plan that `extract --resume --repair` would compute again.
    """

    problems: list[str]
    shards: int = 0
    shards_planned: int = 0
    rows_ok: int = 0
    rows_bad: int = 0
    plan_rows: int = 0
    seconds: float = 0.0
    files: int = 0
    bytes: int = 0
    hashed: bool = False
    orphans: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No problem found."""
        return not self.problems

    def shown(self) -> dict[str, str]:
        """Return what was found, in words."""
        found = "whole" if self.ok else f"{len(self.problems):,} problems: {few(self.problems)}"
        return {
            "found": f"{found} ({'sha256 of every file' if self.hashed else 'sizes alone'})",
            "shards": f"{self.shards:,} of {self.shards_planned:,}",
            "rows ok": f"{self.rows_ok:,}",
            "quarantined": f"{self.rows_bad:,}",
            "audio": audio(self.seconds),
            "files": f"{self.files:,}, {bytes_text(self.bytes)}",
        }


@dataclass(frozen=True)
class ShardTables:
    """The small tables of one committed shard."""

    record: CommitRecord
    rows: pa.Table
    bad: pa.Table | None


def read_tables(layout: Layout, record: CommitRecord) -> ShardTables:
    """The tables a commit names.

    Raises:
        CommitError: One of them is missing or unreadable.
    """
    bad_path = record.path("quarantine")
    try:
        rows = read_table(layout, str(record.path("rows")))
        bad = read_table(layout, bad_path) if bad_path else None
    except (OSError, pa.ArrowException) as err:
        raise CommitError(
            f"shard {record.shard}: its row tables cannot be read: {type(err).__name__}: {err}"
        ) from err
    if not {"row_id", "plan_row_id"} <= set(rows.column_names):
        raise CommitError(f"shard {record.shard}: its row table has no row ids")
    return ShardTables(record, rows, bad)


def table_problems(tables: ShardTables, plan_rows: list[str]) -> list[str]:
    """What is wrong between a commit, its tables and its part of the plan."""
    record, rows, bad = tables.record, tables.rows, tables.bad
    bad_ids = bad.column("row_id").to_pylist() if bad is not None else []
    ids = zip(
        rows.column("row_id").to_pylist(), rows.column("plan_row_id").to_pylist(), strict=True
    )
    found = row_problems(list(ids), bad_ids, plan_rows)
    counts = {
        "good rows": (record.rows_ok, rows.num_rows),
        "rows in quarantine": (record.rows_bad, len(bad_ids)),
        "rows of the plan": (record.plan_rows, len(plan_rows)),
    }
    for name, frames in record.frames.items():
        column = f"{name}_n_frames"
        held = (pc.sum(rows.column(column)).as_py() or 0) if column in rows.column_names else None
        counts[f"frames of {name}"] = (frames, held)
    found += [
        f"the commit says {said} {what}, counted {counted}"
        for what, (said, counted) in counts.items()
        if said != counted
    ]
    return [f"shard {record.shard}: {line}" for line in found]


def commit_problems(
    dataset: DatasetFile, plan: Mapping[str, list[str]], records: Mapping[str, CommitRecord]
) -> list[str]:
    """What is wrong between the set of commits, the plan and dataset.json."""
    missing, extra = set(plan) - set(records), set(records) - set(plan)
    found = []
    if missing:
        found.append(
            f"{len(missing)} of {len(plan)} shards have no commit: {some(missing)}; "
            "run the job again with --resume"
        )
    if extra:
        found.append(f"commits of shards that are not in the plan: {some(extra)}")
    for shard, record in records.items():
        if record.shard != shard:
            found.append(f"shard {shard}: its commit record is that of shard {record.shard}")
        if record.plan_id not in dataset.plan_ids:
            found.append(f"shard {shard}: commit of plan {record.plan_id}, not {dataset.plan_id}")
        if record.spec_sha256 != dataset.spec_sha256:
            found.append(f"shard {shard}: commit of another spec, {record.spec_sha256}")
    return found


def verify(layout: Layout, hashes: bool = True, threads: int = HASH_THREADS) -> Report:
    """Check a whole dataset.

    Args:
        hashes: Read every file and compare its sha256; else sizes and small files only.
        threads: Files read at the same time.

    Raises:
        OutputError: There is no dataset at this place at all.
    """
    dataset = require_dataset(layout)
    with Threads(max(1, threads)) as pool:
        return _Check(layout, dataset, hashes, pool).report()


class _Check:
    """One verification: problems as they are found, and the shards they make doubtful."""

    def __init__(self, layout: Layout, dataset: DatasetFile, hashes: bool, pool: Threads) -> None:
        self._layout, self._dataset, self._hashes, self._pool = layout, dataset, hashes, pool
        self.problems: list[str] = []
        self.damaged: set[str] = set()

    def report(self) -> Report:
        """Look at everything."""
        plan = self._plan()
        stored, replaced = self._read_commits()
        records = {shard: one.record for shard, one in stored.items()}
        if plan is not None:
            self._compare(plan, records)
        present = published(self._layout)
        named = [(shard, file) for shard, record in records.items() for file in record.files]
        for record in records.values():
            self._add(record.shard, _unnamed_parts(record))
        found = self._pool.map(lambda pair: self._file_problem(pair[1], present), named)
        for (shard, _), lines in zip(named, found, strict=True):
            self._add(shard, lines)
        shards = self._pool.map(
            lambda one: _shard_problems(self._layout, one, plan), records.values()
        )
        for shard, lines in zip(records, shards, strict=True):
            self._add(shard, lines)
        closing = check_closing(self._layout, self._dataset, stored)
        self.problems += closing.problems
        self.damaged |= closing.damaged
        known = {file.path for _, file in named}
        old = named_files(replaced) & set(present) - known
        return Report(
            problems=self.problems,
            shards=len(records),
            shards_planned=len(plan or ()),
            rows_ok=sum(record.rows_ok for record in records.values()),
            rows_bad=sum(record.rows_bad for record in records.values()),
            plan_rows=sum(len(rows) for rows in (plan or {}).values()),
            seconds=sum(record.seconds for record in records.values()),
            files=len(named),
            bytes=sum(file.bytes for _, file in named),
            hashed=self._hashes,
            orphans=sorted(set(present) - known - old),
            replaced=sorted(old),
            damaged=sorted(self.damaged & set(plan or ())),
        )

    def _add(self, shard: str, lines: list[str]) -> None:
        if lines:
            self.damaged.add(shard)
            self.problems += lines

    def _plan(self) -> dict[str, list[str]] | None:
        plan_id = self._dataset.plan_id
        try:
            return read_row_ids(self._layout, plan_id)
        except (CommitError, OSError, ValueError, KeyError, pa.ArrowException) as err:
            self.problems.append(f"plan {plan_id} cannot be read: {type(err).__name__}: {err}")
            return None

    def _compare(self, plan: Mapping[str, list[str]], records: Mapping[str, CommitRecord]) -> None:
        self.problems += commit_problems(self._dataset, plan, records)
        for shard, record in records.items():
            if not _belongs(self._dataset, shard, record):
                self.damaged.add(shard)

    def _read_commits(self) -> tuple[dict[str, StoredCommit], list[CommitRecord]]:
        """The records that count, and those that they replaced; what is neither is a problem."""
        names = self._layout.list("commits")
        parsed = {name: paths.parse_commit_path(name) for name in names}
        good = {name: key for name, key in parsed.items() if key is not None}
        problems = [
            f"{name}: not the name of a commit record" for name in names if name not in good
        ]
        dropped = self._dataset.change.dropped if self._dataset.change else ()
        newest: dict[str, int] = dict.fromkeys(dropped, -1)
        for shard, generation in good.values():
            if newest.get(shard) != -1:
                newest[shard] = max(generation, newest.get(shard, 0))

        def read(key: tuple[str, int]) -> StoredCommit | str | None:
            try:
                return read_stored(self._layout, *key)
            except CommitError as err:
                return str(err)

        counted: dict[str, StoredCommit] = {}
        replaced: list[CommitRecord] = []
        for (shard, generation), one in zip(
            good.values(), self._pool.map(read, good.values()), strict=True
        ):
            if isinstance(one, StoredCommit) and generation == newest[shard]:
                counted[shard] = one
            elif isinstance(one, StoredCommit):
                replaced.append(one.record)
            elif one is not None and generation == newest[shard]:
                problems.append(one)
                self.damaged.add(shard)
        self.problems += sorted(problems)
        return dict(sorted(counted.items())), replaced

    def _file_problem(self, file: OutFile, present: Mapping[str, int]) -> list[str]:
        size = present.get(file.path)
        if size is None:
            return [f"{file.path}: missing"]
        if size != file.bytes:
            return [f"{file.path}: expected {file.bytes} bytes, got {size}"]
        if not self._hashes:
            return []
        try:
            with self._layout.open_file(file.path) as stream:
                got = sha256_of(stream)
        except OSError as err:
            return [f"{file.path}: cannot be read: {type(err).__name__}: {err}"]
        if got == file.sha256:
            return []
        return [f"{file.path}: content changed (sha256 {got[:12]}, expected {file.sha256[:12]})"]


def _belongs(dataset: DatasetFile, shard: str, record: CommitRecord) -> bool:
    """Whether a record found under a shard's name is that of this shard of this job."""
    same = (record.shard, record.spec_sha256) == (shard, dataset.spec_sha256)
    return same and record.plan_id in dataset.plan_ids


def _unnamed_parts(record: CommitRecord) -> list[str]:
    """Parts that the record must have but does not list."""
    listed = {file.path for file in record.files}
    # Of a format that is not installed here, the name of its part is unknown, its files are not.
    kinds = (*installed(record.formats), "rows", "quarantine")
    wanted = [record.path(kind) for kind in kinds]
    return [
        f"shard {record.shard}: the commit names no file of {part}"
        for part in wanted
        if part is not None
        and part not in listed
        and not any(path.startswith(f"{part}/") for path in listed)
    ]


def _shard_problems(
    layout: Layout, record: CommitRecord, plan: Mapping[str, list[str]] | None
) -> list[str]:
    if plan is None or record.shard not in plan:
        return []  # reported with the plan or the commits
    try:
        return table_problems(read_tables(layout, record), plan[record.shard])
    except CommitError as err:
        return [str(err)]
