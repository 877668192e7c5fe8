"""Is the dataset whole? Plan against commits, commits against files, row tables against the plan.

Reads only; every problem is one line that names the shard or file. Without hashes it looks at
listings and the small tables, with them it reads every byte. Files that no commit names are
reported apart: they are harmless leftovers of crashed attempts.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import layout as paths
from pipeline.accounts import row_problems, some
from pipeline.commit import CommitRecord, hash_stream, read_commit
from pipeline.dataset_file import DatasetFile, read_dataset
from pipeline.errors import CommitError, OutputError
from pipeline.layout import Layout
from pipeline.rows import OutFile

HASH_THREADS = 8
SNAPSHOT_CHARS = 16
_PUBLISHED = ("data", "rows", "quarantine")


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Args:
        problems: One readable line each; empty where the dataset is whole.
        shards: Shards with a commit. shards_planned: Shards of the plan.
        rows_ok, rows_bad: Good and quarantined rows of the commits. plan_rows: Rows of the plan.
        seconds: Audio behind the good rows, s.
        files, bytes: What the commits name. hashed: Whether every byte was read.
        orphans: Files that no commit names.
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

    @property
    def ok(self) -> bool:
        """No problem found."""
        return not self.problems


@dataclass(frozen=True)
class ShardTables:
    """The small tables of one committed shard."""

    record: CommitRecord
    rows: pa.Table
    bad: pa.Table | None


def read_table(layout: Layout, rel: str, columns: list[str] | None = None) -> pa.Table:
    """A small Parquet table of the dataset."""
    return pq.read_table(io.BytesIO(layout.read_bytes(rel)), columns=columns)


def read_plan(layout: Layout, plan_id: str) -> dict[str, list[str]]:
    """Row ids of the stored plan by shard, both in order."""
    table = read_table(layout, paths.plan_path(plan_id), ["shard", "row_id"])
    shards: dict[str, list[str]] = {}
    for shard, row_id in zip(
        table.column("shard").to_pylist(), table.column("row_id").to_pylist(), strict=True
    ):
        shards.setdefault(shard, []).append(row_id)
    return dict(sorted(shards.items()))


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
        if record.plan_id != dataset.plan_id:
            found.append(f"shard {shard}: commit of plan {record.plan_id}, not {dataset.plan_id}")
        if record.spec_sha256 != dataset.spec_sha256:
            found.append(f"shard {shard}: commit of another spec, {record.spec_sha256}")
    return found


def verify(layout: Layout, hashes: bool = True, threads: int = HASH_THREADS) -> Report:
    """Check a whole dataset.

    Args:
        hashes: Read every file and compare its sha256; else sizes and tables only.
        threads: Files read at the same time.

    Raises:
        OutputError: There is no dataset at this place at all.
    """
    dataset = read_dataset(layout)
    if dataset is None:
        raise OutputError(f"{layout.url()} holds no dataset.json: expected the output of a job")
    try:
        plan = read_plan(layout, dataset.plan_id)
    except (OSError, pa.ArrowException, KeyError) as err:
        return Report([f"plan {dataset.plan_id} cannot be read: {type(err).__name__}: {err}"])
    with ThreadPoolExecutor(max(1, threads)) as pool:
        return _verify(layout, dataset, plan, hashes, pool)


def _verify(
    layout: Layout,
    dataset: DatasetFile,
    plan: Mapping[str, list[str]],
    hashes: bool,
    pool: ThreadPoolExecutor,
) -> Report:
    records, problems = _read_commits(layout, pool)
    problems += commit_problems(dataset, plan, records)
    present = _present(layout)
    named = [file for record in records.values() for file in record.files]
    for record in records.values():
        problems += _unnamed_parts(record)
    for found in pool.map(lambda file: _file_problem(layout, file, present, hashes), named):
        problems += found
    for found in pool.map(lambda r: _shard_problems(layout, r, plan), records.values()):
        problems += found
    problems += _index_problems(layout, records)
    known = {file.path for file in named}
    return Report(
        problems=problems,
        shards=len(records),
        shards_planned=len(plan),
        rows_ok=sum(record.rows_ok for record in records.values()),
        rows_bad=sum(record.rows_bad for record in records.values()),
        plan_rows=sum(len(rows) for rows in plan.values()),
        seconds=sum(record.seconds for record in records.values()),
        files=len(named),
        bytes=sum(file.bytes for file in named),
        hashed=hashes,
        orphans=sorted(set(present) - known),
    )


def _read_commits(
    layout: Layout, pool: ThreadPoolExecutor
) -> tuple[dict[str, CommitRecord], list[str]]:
    """All readable records; a problem for each file in commits/ that is none."""
    problems: list[str] = []

    def read(name: str) -> CommitRecord | None:
        shard = name.removeprefix("commits/").removesuffix(".json")
        if not paths.is_shard_id(shard) or not name.endswith(".json"):
            problems.append(f"{name}: not the name of a commit record")
            return None
        try:
            return read_commit(layout, shard)
        except CommitError as err:
            problems.append(str(err))
            return None

    names = layout.list("commits")
    found = zip(names, pool.map(read, names), strict=True)
    records = {name[len("commits/") : -len(".json")]: record for name, record in found if record}
    return records, sorted(problems)


def _present(layout: Layout) -> dict[str, int]:
    present: dict[str, int] = {}
    for folder in _PUBLISHED:
        present |= layout.sizes(folder)
    return present


def _unnamed_parts(record: CommitRecord) -> list[str]:
    """Parts that the record must have but does not list."""
    listed = {file.path for file in record.files}
    wanted = [record.path(kind) for kind in (*record.formats, "rows", "quarantine")]
    return [
        f"shard {record.shard}: the commit names no file of {part}"
        for part in wanted
        if part is not None
        and part not in listed
        and not any(path.startswith(f"{part}/") for path in listed)
    ]


def _file_problem(
    layout: Layout, file: OutFile, present: Mapping[str, int], hashes: bool
) -> list[str]:
    size = present.get(file.path)
    if size is None:
        return [f"{file.path}: missing"]
    if size != file.bytes:
        return [f"{file.path}: expected {file.bytes} bytes, got {size}"]
    if not hashes:
        return []
    try:
        with layout.open_file(file.path) as stream:
            got = hash_stream(stream.read)
    except OSError as err:
        return [f"{file.path}: cannot be read: {type(err).__name__}: {err}"]
    if got != file.sha256:
        return [f"{file.path}: content changed (sha256 {got[:12]}, expected {file.sha256[:12]})"]
    return []


def _shard_problems(
    layout: Layout, record: CommitRecord, plan: Mapping[str, list[str]]
) -> list[str]:
    if record.shard not in plan:
        return []  # reported with the commits
    try:
        return table_problems(read_tables(layout, record), plan[record.shard])
    except CommitError as err:
        return [str(err)]


def _index_problems(layout: Layout, records: Mapping[str, CommitRecord]) -> list[str]:
    """Each index snapshot against its own name and against the number of committed rows."""
    found = []
    rows = sum(record.rows_ok + record.rows_bad for record in records.values())
    for name in layout.list("index"):
        content = layout.read_bytes(name)
        if snapshot_of(content) != name.removeprefix("index/").removesuffix(".parquet"):
            found.append(f"{name}: content changed, its name is not the start of its sha256")
            continue
        held = pq.ParquetFile(io.BytesIO(content)).metadata.num_rows
        if held != rows:
            found.append(f"{name}: expected {rows} rows, got {held}; finalise again")
    return found


def snapshot_of(content: bytes) -> str:
    """Name of an index snapshot: the start of its sha256."""
    return hashlib.sha256(content).hexdigest()[:SNAPSHOT_CHARS]
