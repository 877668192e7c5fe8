"""Verify a dataset: plan against commits, commits against files, row tables against the plan.

Reads only; every problem is one line that names the shard or file. Files that no commit names are
reported apart: they are harmless leftovers of crashed attempts. So are files that only replaced
commits name, because readers of an older index may need them. Index, snapshot, cards and
`current.json` are small, so they are hashed even where `verify` looks at sizes only. A dataset of
layout version 1 names no index: it is whole with one index of as many rows as the commits, and both
cards.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.compute as pc

from earmill.pipeline.common.byte_streams import sha256_of
from earmill.pipeline.common.errors import CLOSE_AGAIN, CommitError, OutputError
from earmill.pipeline.common.machine import Threads
from earmill.pipeline.common.text import Shown, audio, bytes_text, few
from earmill.pipeline.dataset.commit_record import (
    CommitRecord,
    bad_rows,
    read_commit,
    row_problems,
    some,
)
from earmill.pipeline.dataset.description import DatasetFile, require_dataset
from earmill.pipeline.dataset.snapshot import (
    CARDS,
    Snapshot,
    moments_of,
    name_of,
    read_checked,
    read_current,
    read_snapshot,
)
from earmill.pipeline.formats.format import installed
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.planning.plan import read_row_ids
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout

PUBLISHED = ("data", "rows", "quarantine")  # Folders whose files commits name.
HASH_THREADS = 8


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """The result of `verify`.

    Args:
        problems: One readable line each; empty where the dataset is whole.
        shards: Shards with a commit.
        shards_planned: Shards of the plan.
        rows_ok, rows_bad: Good and quarantined rows of the commits.
        plan_rows: Rows of the plan.
        seconds: Audio behind the good rows, s.
        files, bytes: Files that commits name, and their size.
        hashed: True if every byte was read.
        orphans: Files that no commit names.
        replaced: Files that only replaced commits name.
        damaged: Shards of the plan that `extract --resume --repair` would compute again.
        damaged_additions: Names of added features with such shards; `add-features --repair`.
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
    damaged_additions: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if no problem was found."""
        return not self.problems

    def shown(self) -> dict[str, str]:
        found = "whole" if self.ok else f"{len(self.problems):,} problems: {few(self.problems)}"
        return {
            "found": f"{found} ({'sha256 of every file' if self.hashed else 'sizes alone'})",
            "shards": f"{self.shards:,} of {self.shards_planned:,}",
            "rows ok": f"{self.rows_ok:,}",
            "quarantined": f"{self.rows_bad:,}",
            "audio": audio(self.seconds),
            "files": f"{self.files:,}, {bytes_text(self.bytes)}",
        }


def read_tables(layout: Layout, record: CommitRecord) -> tuple[pa.Table, pa.Table]:
    """Return the tables of a shard's good and quarantined rows."""
    try:
        rows, bad = read_table(layout, str(record.path("rows"))), bad_rows(layout, record)
    except (OSError, pa.ArrowException) as err:
        raise CommitError(
            f"shard {record.shard}: its row tables cannot be read: {type(err).__name__}: {err}"
        ) from err
    if not {"row_id", "plan_row_id"} <= set(rows.column_names):
        raise CommitError(f"shard {record.shard}: its row table has no row ids")
    return rows, bad


def table_problems(
    record: CommitRecord, rows: pa.Table, bad: pa.Table, plan_rows: list[str]
) -> list[str]:
    """Find contradictions between a commit, its tables and its part of the plan."""
    ids = (rows.column(name).to_pylist() for name in ("row_id", "plan_row_id"))
    found = row_problems([*zip(*ids, strict=True)], bad.column("row_id").to_pylist(), plan_rows)
    counts = {
        "good rows": (record.rows_ok, rows.num_rows),
        "rows in quarantine": (record.rows_bad, bad.num_rows),
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
    """Find contradictions between the commits, the plan and dataset.json."""
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
        found += _foreign(dataset, shard, record)
    return found


def _foreign(dataset: DatasetFile, shard: str, record: CommitRecord) -> list[str]:
    """Find signs that a shard's record belongs to another shard or job."""
    plan, spec = record.plan_id, record.spec_sha256
    signs = {
        f"its commit record names shard {record.shard}": record.shard != shard,
        f"commit of plan {plan}, not {dataset.plan_id}": plan not in dataset.plan_ids,
        f"commit of another spec, {spec}": spec != dataset.spec_sha256,
    }
    return [f"shard {shard}: {sign}" for sign, is_found in signs.items() if is_found]


def verify(layout: Layout, hashes: bool = True, threads: int = HASH_THREADS) -> Report:
    """Check a whole dataset and what was added to its rows; without `hashes` sizes and small files
    only. The report counts shards, rows and files of the dataset alone."""
    dataset = require_dataset(layout)
    with Threads(max(1, threads)) as pool:
        check = _Check(layout, dataset, hashes, pool)
        report = check.report()
    for name in check.additions:
        where = paths.addition_path(name)
        try:
            added = verify(layout.below(where), hashes, threads)
        except (CommitError, OutputError) as error:
            added = Report([str(error)])
        report.problems.extend(f"{where}: {problem}" for problem in added.problems)
        if added.damaged:
            report.damaged_additions.append(name)
    return report


class _Check:
    """One verification: problems as they are found, and the shards they make doubtful."""

    def __init__(self, layout: Layout, dataset: DatasetFile, hashes: bool, pool: Threads) -> None:
        self._layout, self._dataset, self._hashes, self._pool = layout, dataset, hashes, pool
        self.problems: list[str] = []
        self.damaged: set[str] = set()
        self.additions: tuple[str, ...] = ()  # Names of features added to the rows.

    def report(self) -> Report:
        plan_id, plan, is_readable = self._dataset.plan_id, dict[str, list[str]](), True
        try:
            plan = read_row_ids(self._layout, plan_id)
        except (CommitError, OSError, ValueError, KeyError, pa.ArrowException) as err:
            is_readable = False
            self.problems.append(f"plan {plan_id} cannot be read: {type(err).__name__}: {err}")
        records, replaced = self._read_commits()
        if is_readable:
            self.problems += commit_problems(self._dataset, plan, records)
            self.damaged |= {k for k, one in records.items() if _foreign(self._dataset, k, one)}
        present = {
            name: size for folder in PUBLISHED for name, size in self._layout.sizes(folder).items()
        }
        named = [(shard, file) for shard, record in records.items() for file in record.files]
        for record in records.values():
            # A part is a file or a folder, such as data/00000-0a1b2c3d.zarr.
            listed = {"/".join(file.path.split("/")[:2]) for file in record.files}
            # A format that is not installed has a part of unknown name, but its files are listed.
            kinds = (*installed(record.formats), "rows", "quarantine")
            parts = [part for kind in kinds if (part := record.path(kind)) and part not in listed]
            lines = [f"shard {record.shard}: the commit names no file of {part}" for part in parts]
            self._add(record.shard, lines)
        found = self._pool.map(lambda pair: self._file_problem(pair[1], present), named)
        for (shard, _), lines in zip(named, found, strict=True):
            self._add(shard, lines)
        shards = self._pool.map(lambda one: self._table_problems(one, plan), records.values())
        for shard, lines in zip(records, shards, strict=True):
            self._add(shard, lines)
        self._check_closing(records)
        known = {file.path for _, file in named}
        old = {file.path for record in replaced for file in record.files} & set(present) - known
        return Report(
            problems=self.problems,
            shards=len(records),
            shards_planned=len(plan),
            rows_ok=sum(record.rows_ok for record in records.values()),
            rows_bad=sum(record.rows_bad for record in records.values()),
            plan_rows=sum(len(rows) for rows in plan.values()),
            seconds=sum(record.seconds for record in records.values()),
            files=len(named),
            bytes=sum(file.bytes for _, file in named),
            hashed=self._hashes,
            orphans=sorted(set(present) - known - old),
            replaced=sorted(old),
            damaged=sorted(self.damaged & set(plan)),
        )

    def _add(self, shard: str, lines: list[str]) -> None:
        if lines:
            self.damaged.add(shard)
            self.problems += lines

    def _read_commits(self) -> tuple[dict[str, CommitRecord], list[CommitRecord]]:
        """Return the current records and the replaced ones; any other file is a problem."""
        parsed = {name: paths.parse_commit_path(name) for name in self._layout.list("commits")}
        problems = [f"{k}: not the name of a commit record" for k, key in parsed.items() if not key]
        keys = sorted(key for key in parsed.values() if key is not None)
        newest = {shard: number for shard, number in keys if shard not in self._dataset.dropped}

        def read(key: tuple[str, int]) -> CommitRecord | str | None:
            try:
                return read_commit(self._layout, *key)
            except CommitError as err:
                return str(err)

        counted: dict[str, CommitRecord] = {}
        replaced: list[CommitRecord] = []
        for (shard, generation), one in zip(keys, self._pool.map(read, keys), strict=True):
            is_newest = newest.get(shard) == generation
            if isinstance(one, CommitRecord) and is_newest:
                counted[shard] = one
            elif isinstance(one, CommitRecord):
                replaced.append(one)
            elif one is not None and is_newest:
                problems.append(one)
                self.damaged.add(shard)
        self.problems += sorted(problems)
        return counted, replaced

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

    def _table_problems(self, record: CommitRecord, plan: Mapping[str, list[str]]) -> list[str]:
        if record.shard not in plan:
            return []  # reported with the plan or the commits
        try:
            tables = read_tables(self._layout, record)
            return table_problems(record, *tables, plan[record.shard])
        except CommitError as err:
            return [str(err)]

    def _check_closing(self, records: Mapping[str, CommitRecord]) -> None:
        layout, found = self._layout, list[str]()
        try:
            current = read_current(layout)
            found += [
                f"{name}: content changed, its name is not the start of its sha256; --resume "
                "writes the current one again, a file of an earlier snapshot may be removed"
                for name in (*layout.list("index"), *layout.list("snapshots"))
                if name_of(layout.read_bytes(name)) != PurePosixPath(name).stem
            ]
            if current is None:
                self.problems += found + _not_closed(layout, self._dataset, records)
                return
            for card in current.cards:
                found += _changed(layout, card)
            found += [
                f"{name}: missing in {paths.CURRENT_FILE}; {CLOSE_AGAIN}"
                for name in sorted(set(CARDS) - {card.path for card in current.cards})
            ]
            snapshot = read_snapshot(layout, current)
        except CommitError as err:
            self.problems += [*found, str(err)]
            return
        self.additions = tuple(snapshot.additions)
        for file in (snapshot.dataset, snapshot.plan, snapshot.index, *snapshot.additions.values()):
            found += _changed(layout, file)
        found += self._compare_commits(snapshot, records)
        if not found and snapshot.moments != moments_of(records, self._dataset.streams):
            found.append(
                f"{current.snapshot.path}: its statistics are not those of the commits; "
                f"{CLOSE_AGAIN}"
            )
        self.problems += found

    def _compare_commits(
        self, snapshot: Snapshot, records: Mapping[str, CommitRecord]
    ) -> list[str]:
        found = []
        for shard, ref in snapshot.commits.items():
            record = records.get(shard)
            if record is None:
                continue  # reported as missing or unreadable
            name = paths.commit_path(shard, record.generation)
            if ref.is_lost_in(record):
                self.damaged.add(shard)
                found.append(
                    f"{name}: content changed since the dataset was closed"
                    if record.generation == ref.generation
                    else f"{paths.commit_path(shard, ref.generation)}: missing, it replaced {name}"
                )
            elif (record.generation, record.attempt) != (ref.generation, ref.attempt):
                found.append(
                    f"{name}: attempt {record.attempt}, but the index was made of attempt "
                    f"{ref.attempt}; {CLOSE_AGAIN}"
                )
        if extra := sorted(set(records) - set(snapshot.commits)):
            found.append(
                f"{paths.CURRENT_FILE}: the index lacks {len(extra)} committed shards, "
                f"{extra[0]} first; {CLOSE_AGAIN}"
            )
        return found


def _changed(layout: Layout, file: OutFile) -> list[str]:
    try:
        read_checked(layout, file)
    except CommitError as err:
        return [str(err)]
    return []


def _not_closed(
    layout: Layout, dataset: DatasetFile, records: Mapping[str, CommitRecord]
) -> list[str]:
    indexes = layout.list("index")
    cards = [name for name in CARDS if layout.exists(name)]
    if not indexes and not cards and not layout.list("snapshots"):
        return []
    if dataset.layout_version > 1 or not indexes:
        return [
            f"{paths.CURRENT_FILE}: missing, the dataset was not closed to the end; {CLOSE_AGAIN}"
        ]
    found = [f"{name}: missing; {CLOSE_AGAIN}" for name in CARDS if name not in cards]
    if len(indexes) > 1:
        found.append(f"{len(indexes)} index files and nothing says which one counts; {CLOSE_AGAIN}")
    rows = sum(record.rows_ok + record.rows_bad for record in records.values())
    for name in indexes:
        with suppress(OSError, ValueError, pa.ArrowException):  # reported by its name
            held = read_table(layout, name, ["row_id"]).num_rows
            if held != rows:
                found.append(f"{name}: expected {rows} rows, got {held}; {CLOSE_AGAIN}")
    return found
