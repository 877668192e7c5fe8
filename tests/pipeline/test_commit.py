"""A shard is committed exactly once, and its record says what is there."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from earmill.pipeline.common.errors import CommitError, OvertakenError
from earmill.pipeline.dataset.commit_record import (
    CommitRecord,
    commits,
    committed_shards,
    read_commit,
    reading_pool,
)
from earmill.pipeline.dataset.description import open_dataset
from earmill.pipeline.dataset.driver_lock import DriverLock
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import DRIVER_FILE, commit_path
from tests.pipeline.commit_data import (
    BAD,
    ROWS,
    all_files,
)
from tests.pipeline.outputs import (
    STREAMS,
    dataset_file,
    make_bad,
    make_row,
    publish,
    s3_server,
)
from tests.waiting import DEADLINE_S


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


@pytest.fixture(params=["local", "memory", "s3"])
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Layout:
    if request.param == "s3":
        return Layout.open(f"s3://out/{tmp_path.name}", request.getfixturevalue("s3"))
    return Layout.open(tmp_path if request.param == "local" else f"memory://{tmp_path.name}")


def test_the_record_describes_what_is_there(layout: Layout) -> None:
    assert publish(layout, "00007", "0badcafe", ROWS, BAD) is True
    record = read_commit(layout, "00007")
    assert record is not None
    assert (record.rows_ok, record.rows_bad, record.plan_rows) == (3, 2, 5)
    assert record.seconds == pytest.approx(0.37)
    assert record.frames == {"modulation": 37, "envelope": 37}
    assert record.info["device"] == "cpu"
    assert record.info["timings_s"]["extract"] == 1.5
    assert record.info["timings_s"]["encode_zarr"] > 0
    assert "created" in record.info
    stored = all_files(layout)
    assert {file.path for file in record.files} | {"commits/00007.json"} == set(stored)
    for file in record.files:
        assert len(stored[file.path]) == file.bytes
        assert hashlib.sha256(stored[file.path]).hexdigest() == file.sha256
    assert record.path("quarantine") == "quarantine/00007-0badcafe.parquet"
    assert commits(layout) == {"00007": record}
    assert committed_shards(layout) == {"00007"}
    assert read_commit(layout, "00008") is None


def test_value_digests_can_be_recomputed_by_hand(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    publish(layout, rows=ROWS)
    record = read_commit(layout, "00000")
    assert record is not None
    for info in STREAMS:
        joined = b"".join(row.streams[info.name].tobytes() for row in ROWS)
        sizes = np.array([30, 7, 0], "<i8").tobytes()
        by_hand = hashlib.sha256(sizes + hashlib.sha256(joined).digest()).hexdigest()
        assert record.values_sha256[info.name] == by_hand


def test_a_record_survives_json(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    publish(layout, rows=ROWS, bad=BAD)
    record = commits(layout)["00000"]
    assert CommitRecord.from_json(record.to_json()) == record
    assert CommitRecord.from_json(record.to_json().encode()) == record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: json.dumps(data)[:-30], "not a commit record"),
        (
            lambda data: json.dumps({**data, "layout_version": 4}),
            "expected layout version 1, 2 or 3, got 4",
        ),
        (lambda data: json.dumps({k: v for k, v in data.items() if k != "files"}), "files"),
        (lambda data: json.dumps({**data, "colour": "red"}), "colour"),
        (lambda data: "[]", "not a commit record"),
    ],
)
def test_a_damaged_record_is_refused_by_name(
    change: Callable[[dict[str, Any]], str], message: str, tmp_path: Path
) -> None:
    layout = Layout.open(tmp_path)
    publish(layout, rows=ROWS)
    text = change(json.loads(layout.read_bytes("commits/00000.json")))
    layout.write_bytes("commits/00000.json", text.encode())
    with pytest.raises(CommitError, match=message) as caught:
        commits(layout)
    assert "commits/00000.json" in str(caught.value)


def test_equal_rows_give_equal_bytes_whatever_attempt_time_and_batch_order(tmp_path: Path) -> None:
    plan_rows = [row.row_id for row in ROWS] + [row.row_id for row in BAD]
    stored = []
    for number, order in enumerate(((0, 1, 2), (2, 0, 1))):
        layout = Layout.open(tmp_path / str(number))
        publish(
            layout,
            attempt=f"{number:08x}",
            rows=[ROWS[i] for i in order],
            bad=BAD[:: 1 - 2 * number],
            plan_rows=plan_rows,
            info={"worker": f"w{number}"},
        )
        files = all_files(layout)
        del files["commits/00000.json"]
        stored.append({name.replace(f"{number:08x}", "*"): data for name, data in files.items()})
        assert not any(f"{number:08x}".encode() in data for data in files.values())
    assert stored[0] == stored[1]


def test_rows_of_channels_follow_their_plan_row(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    rows = [make_row(f"{n}#ch{k}", plan_row_id=n, channel=k) for k in (1, 0) for n in ("b", "a")]
    publish(layout, rows=rows, bad=[make_bad("b#ch2")], plan_rows=["a", "b"])
    table = pq.read_table(tmp_path / "rows" / "00000-00000001.parquet")
    assert table.column("row_id").to_pylist() == ["a#ch0", "a#ch1", "b#ch0", "b#ch1"]
    record = commits(layout)["00000"]
    assert (record.rows_ok, record.rows_bad, record.plan_rows) == (4, 1, 2)


@pytest.mark.parametrize("formats", [("zarr",), ("parquet",), ("zarr", "parquet")])
def test_a_shard_of_bad_rows_only_is_a_commit(formats: tuple[str, ...], tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    assert publish(layout, bad=BAD, formats=formats, plan_rows=["x.wav", "y.wav"])
    record = commits(layout)["00000"]
    assert (record.rows_ok, record.rows_bad, record.seconds) == (0, 2, 0.0)
    assert record.frames == {"modulation": 0, "envelope": 0}
    assert record.formats == formats


def test_the_second_attempt_loses_and_leaves_nothing(layout: Layout) -> None:
    assert publish(layout, attempt="00000001", rows=ROWS)
    before = all_files(layout)
    assert publish(layout, attempt="00000002", rows=ROWS) is False
    assert all_files(layout) == before


@pytest.mark.parametrize("place", ["local", "memory"])
def test_one_of_many_attempts_wins_and_the_others_clean_up(place: str, tmp_path: Path) -> None:
    layout = Layout.open(tmp_path if place == "local" else f"memory://race-{tmp_path.name}")
    gate = threading.Barrier(6)

    def attempt(number: int) -> bool:
        gate.wait()
        return publish(layout, attempt=f"{number:08x}", rows=ROWS, bad=BAD)

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(attempt, range(6)))
    assert won.count(True) == 1
    record = commits(layout)["00000"]
    assert record.attempt == f"{won.index(True):08x}"
    assert set(all_files(layout)) == {f.path for f in record.files} | {"commits/00000.json"}


class LostAnswer(Layout):
    """A store whose first answer to the commit got lost: the client's repeat is refused."""

    def put_if_absent(self, rel: str, data: bytes) -> bool:
        super().put_if_absent(rel, data)
        return super().put_if_absent(rel, data)


def test_a_commit_refused_by_its_own_first_try_has_won(tmp_path: Path) -> None:
    plain = Layout.open(tmp_path)
    assert publish(LostAnswer(plain.backend, plain.root), rows=ROWS) is True
    record = commits(plain)["00000"]
    assert set(all_files(plain)) == {f.path for f in record.files} | {"commits/00000.json"}


def test_names_outside_the_grammar_are_refused(tmp_path: Path) -> None:
    for shard, attempt in (("1", "00000001"), ("00000", "zz")):
        with pytest.raises((CommitError, ValueError)):
            publish(Layout.open(tmp_path), shard, attempt, ROWS, formats=("zarr",))
    assert all_files(Layout.open(tmp_path)) == {}


def test_few_files_of_a_disk_are_read_by_two_threads_and_those_of_a_store_all_at_once(
    tmp_path: Path,
) -> None:
    def check(layout: Layout, files: int, expected: int) -> None:
        together = threading.Barrier(expected, timeout=DEADLINE_S)

        def who(_: int) -> int:
            together.wait()
            return threading.get_ident()

        with reading_pool(layout, files) as pool:
            assert len({*pool.map(who, range(64))}) == expected

    disk, store = Layout.open(tmp_path), Layout.open(f"memory://{tmp_path.name}")
    check(disk, 12, 2)
    check(store, 12, 16)
    check(disk, 100_000, 16)


def test_a_commit_of_a_run_that_was_overtaken_is_refused_or_taken_back(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before the record, in the middle of its creation, and in an output that is gone."""
    open_dataset(layout, dataset_file())
    lock = DriverLock(layout)
    # A store takes a request for each file of Zarr; the test above removes such files from it.
    formats = ("parquet",) if layout.url().startswith("s3") else ("parquet", "zarr")
    put = Layout.put_if_absent
    moments: list[str] = []

    def stopped(self: Layout, rel: str, data: bytes) -> bool:
        if rel.startswith("commits/"):
            layout.delete(DRIVER_FILE)
            for name in moments:
                layout.delete(name)
        return put(self, rel, data)

    monkeypatch.setattr(Layout, "put_if_absent", stopped)

    def attempt(shard: str) -> None:
        with pytest.raises(OvertakenError):
            publish(layout, shard, rows=[make_row("a")], formats=formats, fence=lock.fence)

    # Its files are whole: as good as another's, and it may count already.
    attempt("00000")
    assert layout.list("commits") == [commit_path("00000")]
    assert_attempt_is_whole(layout, "00000")
    # From now on the lock is gone before the first byte.
    attempt("00001")
    assert layout.list("commits") == [commit_path("00000")]
    assert not [name for name in layout.list("data") if name.startswith("data/00001")]
    # Its files were collected as garbage, or the output was removed.
    for gone in (["data"], ["dataset.json", "data", "rows"]):
        lock.release()
        lock, moments[:] = DriverLock(layout), gone
        attempt("00002")
        assert layout.list("commits") == [commit_path("00000")]
        assert not [name for name in layout.list("rows") if name.startswith("rows/00002")]
    lock.release()


def assert_attempt_is_whole(layout: Layout, shard: str) -> None:
    record = read_commit(layout, shard)
    assert record is not None
    assert all(layout.size(file.path) == file.bytes for file in record.files)
