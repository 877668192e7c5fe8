"""Paths, atomic writes and create-if-absent, on local disk, in memory, and against S3 servers."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from earmill.pipeline.common.errors import OutputError, StorageError
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.snapshot import require_current
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.scratch import clear_scratch, private_scratch, shared_scratch
from tests.pipeline.outputs import s3_server, small_dataset, small_disk

RACERS = 16


def zarr_files(store: str, streams: Sequence[str], rows: bool) -> list[str]:
    """What a store holds, spelled out."""
    chunks = ["row_id/c/0", "row_size/c/0", "row_start/c/0", "values/c/0/0"] if rows else []
    chunks += ["fc_hz/c/0", "mfc_hz/c/0"]
    names = ("row_id", "row_size", "row_start", "values", "fc_hz", "mfc_hz")
    arrays = [f"{name}/zarr.json" for name in names]
    groups = [f"{store}/{s}/{part}" for s in streams for part in [*arrays, *chunks, "zarr.json"]]
    return [f"{store}/zarr.json", *groups]


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


def test_the_tree_of_a_dataset_is_exactly_this(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    done = finalise(layout)
    current = require_current(layout)
    found = sorted(
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    )
    streams = ["modulation", "envelope"]
    assert found == sorted(
        [
            "README.md",
            "croissant.json",
            "dataset.json",
            "provenance.jsonld",
            "plan/plan0.parquet",
            done.index.path,
            current.snapshot.path,
            "current.json",
            "commits/00000.json",
            "commits/00001.json",
            "commits/00002.json",
            "data/00000-00000000.parquet",
            "data/00001-00000001.parquet",
            "data/00002-00000002.parquet",
            *zarr_files("data/00000-00000000.zarr", streams, rows=True),
            *zarr_files("data/00001-00000001.zarr", streams, rows=True),
            *zarr_files("data/00002-00000002.zarr", streams, rows=False),
            "rows/00000-00000000.parquet",
            "rows/00001-00000001.parquet",
            "rows/00002-00000002.parquet",
            "quarantine/00000-00000000.parquet",
            "quarantine/00002-00000002.parquet",
        ]
    )


def test_names_follow_the_grammar() -> None:
    assert paths.data_path("00012", "0a1b2c3d", ".zarr") == "data/00012-0a1b2c3d.zarr"
    assert paths.data_path("100000", "0a1b2c3d", ".parquet") == "data/100000-0a1b2c3d.parquet"
    assert paths.rows_path("00012", "0a1b2c3d") == "rows/00012-0a1b2c3d.parquet"
    assert paths.quarantine_path("00012", "0a1b2c3d") == "quarantine/00012-0a1b2c3d.parquet"
    assert paths.commit_path("00012") == "commits/00012.json"
    assert paths.plan_path("p-1") == "plan/p-1.parquet"
    assert paths.index_path("ff") == "index/ff.parquet"
    assert paths.snapshot_path("ff") == "snapshots/ff.json"
    assert paths.commit_path("00012", 3) == "commits/00012.r3.json"
    for shard, generation in (("00012", 0), ("100000", 1), ("00000", 12)):
        name = paths.commit_path(shard, generation)
        assert paths.parse_commit_path(name) == (shard, generation)
    strange = ("1.json", "00000.r0.json", "00000.r01.json", "00000.rx.json", "00000.json.r1")
    assert [paths.parse_commit_path(f"commits/{name}") for name in strange] == [None] * 5
    attempts = {paths.new_attempt() for _ in range(100)}
    assert len(attempts) == 100
    assert all(paths.data_path("00000", attempt, ".zarr") for attempt in attempts)


@pytest.mark.parametrize(
    "make",
    [
        lambda: paths.commit_path("12"),
        lambda: paths.commit_path("00012", -1),
        lambda: paths.commit_path("../12345"),
        lambda: paths.data_path("00000", "0A1B2C3D", ".zarr"),
        lambda: paths.data_path("00000", "00000000", "csv"),
        lambda: paths.plan_path("a/b"),
        lambda: Layout.open("/tmp/x").path("../up"),
        lambda: Layout.open("/tmp/x").path("/etc/passwd"),
        lambda: Layout.open("/tmp/x").path(""),
    ],
)
def test_names_outside_the_grammar_are_refused(make: Callable[[], str]) -> None:
    with pytest.raises(ValueError):
        make()


@pytest.mark.parametrize("uri", ["no-such-scheme://x/y", "webhdfs2://h/x"])
def test_an_unknown_scheme_is_an_output_error(uri: str) -> None:
    with pytest.raises(OutputError, match="expected a local path or an fsspec URI"):
        Layout.open(uri)


def places(tmp_path: Path, s3: dict[str, Any]) -> dict[str, Layout]:
    return {
        "local": Layout.open(tmp_path / "out"),
        "memory": Layout.open(f"memory://out-{tmp_path.name}"),
        "s3": Layout.open(f"s3://out/{tmp_path.name}", s3),
    }


@pytest.mark.parametrize("place", ["local", "memory", "s3"])
def test_files_can_be_written_listed_read_and_removed(
    place: str, tmp_path: Path, s3: dict[str, Any]
) -> None:
    layout = places(tmp_path, s3)[place]
    assert layout.list("data") == []
    assert not layout.exists("data/a/b.bin")
    layout.write_bytes("data/a/b.bin", b"first")
    layout.write_bytes("data/a/b.bin", b"second")
    layout.write_bytes("data/z", b"")
    layout.write_bytes("database/other", b"x")
    layout.write_bytes("data/.hidden", b"x")
    assert layout.list("data") == ["data/a/b.bin", "data/z"]
    assert layout.sizes("data") == {"data/a/b.bin": 6, "data/z": 0}
    assert layout.size("data/a/b.bin") == 6
    assert layout.read_bytes("data/a/b.bin") == b"second"
    with layout.open_file("data/a/b.bin") as file:
        file.seek(3)
        assert file.read() == b"ond"
    layout.delete("data/a")
    layout.delete("data/a")
    assert layout.list("data") == ["data/z"]
    with pytest.raises(FileNotFoundError):
        layout.read_bytes("data/a/b.bin")


@pytest.mark.parametrize("place", ["local", "memory", "s3"])
def test_only_the_first_create_wins(place: str, tmp_path: Path, s3: dict[str, Any]) -> None:
    layout = places(tmp_path, s3)[place]
    layout.check_writable()
    assert layout.put_if_absent("commits/00000.json", b"first") is True
    assert layout.put_if_absent("commits/00000.json", b"second") is False
    assert layout.read_bytes("commits/00000.json") == b"first"
    assert layout.list("commits") == ["commits/00000.json"]


@pytest.mark.parametrize("place", ["local", "memory"])
def test_one_of_many_threads_wins_and_its_content_is_whole(place: str, tmp_path: Path) -> None:
    layout = places(tmp_path, {})[place]
    gate = threading.Barrier(RACERS)

    def race(racer: int, name: str) -> bool:
        gate.wait()
        return layout.put_if_absent(name, bytes([racer]) * 100_000)

    with ThreadPoolExecutor(RACERS) as pool:
        for turn in range(10):
            name = f"commits/{turn:05d}.json"
            won = list(pool.map(race, range(RACERS), [name] * RACERS))
            assert won.count(True) == 1
            assert layout.read_bytes(name) == bytes([won.index(True)]) * 100_000


def test_a_reader_never_sees_half_a_write(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    whole = {bytes([number]) * 300_000 for number in range(40)}
    layout.write_bytes("driver.json", bytes([0]) * 300_000)
    done = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not done.is_set():
            seen.add(layout.read_bytes("driver.json"))

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for content in sorted(whole):
            layout.write_bytes("driver.json", content)
        done.set()
        reading.result()
    assert seen <= whole
    assert layout.read_bytes("driver.json") == max(whole)


def test_a_write_that_does_not_fit_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        layout = Layout.open(disk)
        layout.write_bytes("a", b"old")
        with pytest.raises(StorageError, match="no space left"):
            layout.write_bytes("a", b"x" * 1_000_000)
        with pytest.raises(StorageError, match="no space left"):
            layout.put_if_absent("b", b"x" * 1_000_000)
        assert layout.read_bytes("a") == b"old"
        assert [path.name for path in disk.iterdir()] == ["a"]


def test_publishing_works_across_disks(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        for number, root in enumerate((disk / "out", tmp_path / "out")):
            source = (tmp_path, disk)[number] / "made"
            (source / "sub").mkdir(parents=True)
            (source / "sub" / "x").write_bytes(b"content")
            (source.parent / "y").write_bytes(b"file")
            layout = Layout.open(root)
            layout.upload_dir(source, "data/store.zarr")
            layout.upload_file(source.parent / "y", "data/y")
            assert layout.sizes("data") == {"data/store.zarr/sub/x": 7, "data/y": 4}
            assert sorted(p.name for p in (root / "data").iterdir()) == ["store.zarr", "y"]


@pytest.mark.parametrize("place", ["local", "s3"])
def test_scratch_is_private_and_gone_afterwards(
    place: str, tmp_path: Path, s3: dict[str, Any]
) -> None:
    layout = places(tmp_path, s3)[place]
    with (
        pytest.raises(KeyError),
        private_scratch(layout, "00000") as folder,
        private_scratch(layout, "00000") as two,
    ):
        assert folder != two
        (folder / "sub").mkdir()
        (folder / "sub" / "x").write_bytes(b"1")
        assert layout.list("data") == []
        raise KeyError
    assert not folder.exists() and not two.exists()
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_workers_that_share_a_scratch_place_do_not_disturb_each_other(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)

    def work(worker: int) -> None:
        for turn in range(200):
            with private_scratch(layout, "00000") as folder:
                (folder / "x").write_bytes(bytes([worker]))
                assert (folder / "x").read_bytes() == bytes([worker]), turn

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert list(tmp_path.iterdir()) == []


def test_runs_that_come_and_go_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The last to leave takes the folder above along, in which another is about to make its own."""
    layout = Layout.open(tmp_path)

    def work(run: int) -> None:
        for turn in range(300):
            folder = shared_scratch(layout, f"run-{run}")
            assert folder is not None
            (folder / "x").write_bytes(bytes([run]))
            assert (folder / "x").read_bytes() == bytes([run]), turn
            clear_scratch(layout, f"run-{run}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert list(tmp_path.iterdir()) == []


def test_a_pickled_layout_reaches_the_same_files(tmp_path: Path, s3: dict[str, Any]) -> None:
    for layout in places(tmp_path, s3).values():
        layout.write_bytes("a", b"here")
        assert pickle.loads(pickle.dumps(layout)).read_bytes("a") == b"here"


def test_credentials_are_in_no_text_form(s3: dict[str, Any]) -> None:
    layout = Layout.open("s3://out/x", s3)
    assert repr(layout) == "Layout('s3://out/x')"
    assert layout.url("commits/00000.json") == "s3://out/x/commits/00000.json"


@pytest.mark.parametrize("uri", ["/dev/null/out", "s3://no-such-bucket/out"])
def test_an_unwritable_output_is_one_clear_line(uri: str, s3: dict[str, Any]) -> None:
    layout = Layout.open(uri, s3 if uri.startswith("s3") else None)
    with pytest.raises(OutputError, match="cannot write to") as caught:
        layout.check_writable()
    assert "\n" not in str(caught.value)


def test_a_store_without_atomic_create_is_refused() -> None:
    layout = Layout.open("http://127.0.0.1:1/x")
    with pytest.raises(OutputError, match="no atomic create"):
        layout.put_if_absent("commits/00000.json", b"x")


def test_local_paths_may_use_the_home_folder_and_file_uris(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Layout.open("~/out").root == str(tmp_path / "out")
    assert Layout.open(f"file://{tmp_path}/out/").root == str(tmp_path / "out")
    assert Layout.open("out").root == os.path.join(os.getcwd(), "out")
