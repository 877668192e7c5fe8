"""Every kind of damage is found and named; a whole dataset has no problem."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.snapshot import name_of
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.outputs import PLAN, make_row, publish, s3_server, small_dataset, write_plan

CHUNK = "data/00001-00000001.zarr/modulation/values/c/0/0"
FEATURES = "data/00001-00000001.parquet"


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


def flip(layout: Layout, name: str) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(layout.read_bytes(name))
    data[len(data) // 2] ^= 1
    layout.write_bytes(name, bytes(data))


def cut(layout: Layout, name: str) -> None:
    layout.write_bytes(name, layout.read_bytes(name)[:-1])


def edit_commit(layout: Layout, shard: str, **changes: Any) -> None:
    """Change a commit record behind everybody's back."""
    name = f"commits/{shard}.json"
    data = json.loads(layout.read_bytes(name))
    layout.write_bytes(name, json.dumps({**data, **changes}).encode())


def edit_rows(layout: Layout, change: Callable[[Any], Any]) -> None:
    """Change the row table of shard 00000 and make the commit agree with the new file."""
    name = "rows/00000-00000000.parquet"
    sink = io.BytesIO()
    pq.write_table(change(pq.read_table(layout.path(name))), sink)
    layout.write_bytes(name, sink.getvalue())
    files = json.loads(layout.read_bytes("commits/00000.json"))["files"]
    for file in files:
        if file["path"] == name:
            file.update(
                bytes=len(sink.getvalue()),
                sha256=hashlib.sha256(Path(layout.path(name)).read_bytes()).hexdigest(),
            )
    edit_commit(layout, "00000", files=files)


@pytest.fixture(scope="module")
def whole_on_s3(s3: dict[str, Any]) -> Layout:
    """A closed dataset in a bucket, which is only read."""
    layout = small_dataset("s3://out/whole", s3)
    finalise(layout)
    return layout


@pytest.fixture(scope="module")
def files_on_s3(whole_on_s3: Layout) -> dict[str, bytes]:
    """The content of each file of the dataset in the bucket."""
    return {name: whole_on_s3.read_bytes(name) for name in whole_on_s3.everything()}


def test_a_whole_dataset_has_no_problem(
    tmp_path: Path, whole_on_s3: Layout, files_on_s3: dict[str, bytes]
) -> None:
    local = small_dataset(tmp_path)
    finalise(local)
    reports = []
    for layout in (local, whole_on_s3):
        report = verify(layout)
        assert report.ok and report.problems == [] and report.orphans == []
        assert (report.shards, report.shards_planned) == (3, 3)
        assert (report.rows_ok, report.rows_bad, report.plan_rows) == (3, 2, 5)
        assert report.seconds == pytest.approx(1.57)
        named = [file for record in commits(layout).values() for file in record.files]
        assert report.files == len(named)
        reports.append(report)
    assert reports[0] == reports[1]
    assert reports[1].bytes == sum(len(files_on_s3[file.path]) for file in named)


def test_credentials_reach_no_file(files_on_s3: dict[str, bytes]) -> None:
    assert json.loads(files_on_s3["croissant.json"])["url"] == "s3://out/whole"
    for name, content in files_on_s3.items():
        assert b"user-key" not in content and b"user-secret" not in content, name


FAULTS: dict[str, tuple[Callable[[Layout], object], list[str]]] = {
    "file missing": (lambda at: at.delete(FEATURES), [f"{FEATURES}: missing"]),
    "chunk missing": (lambda at: at.delete(CHUNK), [f"{CHUNK}: missing"]),
    "file cut": (lambda at: cut(at, FEATURES), [f"{FEATURES}: expected"]),
    "file longer": (
        lambda at: at.write_bytes(FEATURES, at.read_bytes(FEATURES) + b"\0"),
        [f"{FEATURES}: expected"],
    ),
    "chunk cut": (lambda at: cut(at, CHUNK), [f"{CHUNK}: expected"]),
    "byte flipped": (lambda at: flip(at, FEATURES), [f"{FEATURES}: content changed"]),
    "chunk flipped": (lambda at: flip(at, CHUNK), [f"{CHUNK}: content changed"]),
    "metadata flipped": (
        lambda at: flip(at, "data/00000-00000000.zarr/zarr.json"),
        ["data/00000-00000000.zarr/zarr.json: content changed"],
    ),
    "commit missing": (
        lambda at: at.delete("commits/00001.json"),
        ["1 of 3 shards have no commit: '00001'"],
    ),
    "commit cut": (
        lambda at: cut(at, "commits/00001.json"),
        ["commits/00001.json: not a commit record", "1 of 3 shards have no commit: '00001'"],
    ),
    "commit misnamed": (
        lambda at: at.write_bytes("commits/1.json", b"{}"),
        ["commits/1.json: not the name of a commit record"],
    ),
    "commit of another shard": (
        lambda at: at.write_bytes("commits/00001.json", at.read_bytes("commits/00000.json")),
        ["shard 00001: its commit record names shard 00000"],
    ),
    "commit of another spec": (
        lambda at: edit_commit(at, "00001", spec_sha256="x"),
        ["shard 00001: commit of another spec, x"],
    ),
    "commit of another plan": (
        lambda at: edit_commit(at, "00001", plan_id="x"),
        ["shard 00001: commit of plan x, not plan0"],
    ),
    "shard beyond the plan": (
        lambda at: publish(at, "00003", rows=[make_row("d")]),
        ["commits of shards that are not in the plan: '00003'"],
    ),
    "row lost": (
        lambda at: edit_rows(at, lambda rows: rows.slice(1)),
        [
            "shard 00000: row missing: 'a.wav'",
            "shard 00000: the commit says 2 good rows, counted 1",
            "shard 00000: the commit says 37 frames of modulation, counted 7",
        ],
    ),
    "row replaced": (
        lambda at: edit_rows(
            at,
            lambda rows: rows.set_column(1, "plan_row_id", [["a.wav", "z.wav"]]),
        ),
        ["shard 00000: row not in the plan: 'z.wav'", "shard 00000: row missing: 'b.wav'"],
    ),
    "row twice": (
        lambda at: edit_rows(at, lambda rows: rows.take([0, 0, 1])),
        ["shard 00000: row twice: 'a.wav'"],
    ),
    "plan grown": (
        lambda at: write_plan(at, {**PLAN, "00001": ["c.flac", "new.wav"]}),
        [
            "shard 00001: row missing: 'new.wav'",
            "shard 00001: the commit says 1 rows of the plan, counted 2",
        ],
    ),
    "quarantine missing": (
        lambda at: at.delete("quarantine/00000-00000000.parquet"),
        [
            "quarantine/00000-00000000.parquet: missing",
            "shard 00000: its row tables cannot be read: FileNotFoundError",
        ],
    ),
    "quarantine not listed": (
        lambda at: edit_commit(
            at,
            "00002",
            files=[
                file
                for file in json.loads(at.read_bytes("commits/00002.json"))["files"]
                if not file["path"].startswith("quarantine")
            ],
        ),
        ["shard 00002: the commit names no file of quarantine/00002-00000002.parquet"],
    ),
    "count changed": (
        lambda at: edit_commit(at, "00000", rows_bad=2),
        ["shard 00000: the commit says 2 rows in quarantine, counted 1"],
    ),
    "plan without rows": (
        lambda at: write_plan(at, {}),
        ["commits of shards that are not in the plan: '00000', '00001', '00002'"],
    ),
    "plan missing": (
        lambda at: at.delete("plan/plan0.parquet"),
        ["plan plan0 cannot be read: FileNotFoundError"],
    ),
    "plan cut": (
        lambda at: cut(at, "plan/plan0.parquet"),
        ["plan plan0 cannot be read: ArrowInvalid"],
    ),
    "index flipped": (
        lambda at: flip(at, at.list("index")[0]),
        [".parquet: content changed, its name is not the start of its sha256"],
    ),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_each_fault_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    finalise(layout)
    damage, expected = FAULTS[name]
    damage(layout)
    report = verify(layout)
    assert not report.ok
    assert all("\n" not in line for line in report.problems)
    for line in expected:
        assert any(line in found for found in report.problems), report.problems
    accused = set(re.findall(r"shard (\d+):", "\n".join(report.problems)))
    assert accused <= set(re.findall(r"\d{5}", "\n".join(expected)))


def test_sizes_alone_miss_a_flipped_byte_and_find_a_cut(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    flip(layout, CHUNK)
    quick = verify(layout, hashes=False)
    assert quick.ok and not quick.hashed
    assert [line.split(":")[0] for line in verify(layout).problems] == [CHUNK]
    cut(layout, CHUNK)
    assert len(verify(layout, hashes=False).problems) == 1


def test_an_index_of_fewer_rows_is_stale(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    name = finalise(layout).index.path
    sink = io.BytesIO()
    pq.write_table(pq.read_table(layout.path(name)).slice(1), sink)
    layout.delete(name)
    layout.write_bytes(f"index/{name_of(sink.getvalue())}.parquet", sink.getvalue())
    (problem,) = verify(layout).problems
    assert f"{name}: FileNotFoundError" in problem
    # Layout version 1 names no index, so the only one is counted.
    layout.delete("current.json")
    for name in ("dataset.json", *layout.list("commits")):
        data = json.loads(layout.read_bytes(name)) | {"layout_version": 1}
        layout.write_bytes(name, json.dumps(data).encode())
    (problem,) = verify(layout).problems
    assert "expected 5 rows, got 4" in problem


def test_leftovers_of_crashed_attempts_are_reported_apart(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    layout.write_bytes("data/00001-deadbeef.zarr/zarr.json", b"{}")
    layout.write_bytes("rows/00001-deadbeef.parquet", b"")
    layout.write_bytes("data/.00001-unfinished.parquet", b"")
    report = verify(layout)
    assert report.ok
    assert report.orphans == ["data/00001-deadbeef.zarr/zarr.json", "rows/00001-deadbeef.parquet"]


def test_one_thread_finds_what_many_find(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    flip(layout, CHUNK)
    cut(layout, FEATURES)
    assert verify(layout, threads=1) == verify(layout, threads=16)


def test_there_must_be_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"holds no dataset\.json"):
        verify(Layout.open(tmp_path))
