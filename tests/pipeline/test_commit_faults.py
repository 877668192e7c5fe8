"""A shard that is killed, refused or damaged on its way is not committed at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from earmill.pipeline.common.errors import CommitError, StorageError
from earmill.pipeline.dataset import publish as publishing
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.formats.format import Encoding, Format, format_of
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.scratch import clear_scratch, shared_scratch
from tests.pipeline.commit_data import (
    ROWS,
    all_files,
)
from tests.pipeline.outputs import (
    grow_disk,
    make_bad,
    make_row,
    publish,
    s3_server,
    small_disk,
)
from tests.short import only
from tests.waiting import DEADLINE_S, threads_end

# The start of the programs of child processes that publish.
CHILD = """
import os, signal, sys
import numpy as np
from earmill.pipeline.dataset.description import DatasetFile
from earmill.pipeline.dataset.publish import publish_shard
from earmill.pipeline.common.errors import CommitError, StorageError
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow

stream = {"name": "m", "model": "m", "unit": "1", "width": 8, "frame_rate_hz": 100.0}
stream |= {"pool": "mean", "axes": ["time", "channel"], "channel_offsets": [0]}
stream |= {"fc_hz": [], "mfc_hz": []}

def publish(formats, n_frames):
    values = np.random.default_rng(0).normal(0, 50, (n_frames, 8)).astype("float16")
    output = {"formats": formats, "dtype": "float16", "row_group_profile": "random"}
    spec = {"audio": {"calibration": None}, "extract": [{"model": "m"}], "output": output}
    publish_shard(
        Layout.open(sys.argv[1]),
        DatasetFile("m", spec, "0" * 64, "plan0", (stream,), {}, {}, "", parquet_form="binary"),
        shard_id="00000",
        attempt="00000001",
        rows=[FeatureRow("a.wav", "a.wav", -1, 1.0, {"uri": "a"}, {}, {"m": values})],
        bad=[QuarantineRow("x.wav", "x", "decode", "not_audio", "no", 1)],
        info={},
        plan_rows=["a.wav", "x.wav"],
    )
"""


DYING = """
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(Layout, sys.argv[2], die)
publish(["zarr", "parquet"], 100)
"""


@pytest.mark.chaos
@pytest.mark.parametrize(
    "moment", only(["put_if_absent"], ["upload_dir", "upload_file", "put_if_absent"])
)
def test_a_process_killed_while_publishing_commits_nothing(moment: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD + DYING, str(tmp_path), moment], check=False)
    assert done.returncode == -signal.SIGKILL
    layout = Layout.open(tmp_path)
    assert commits(layout) == {}
    assert publish(layout, attempt="00000002", rows=[make_row("a.wav")], bad=[make_bad("x.wav")])
    assert commits(layout)["00000"].attempt == "00000002"
    clear_scratch(layout)
    assert not (tmp_path / ".scratch").exists()


class Halting(Layout):
    """Comes to the upload and waits there until it is told to go on."""

    arrived = threading.Event()
    go_on = threading.Event()

    def upload_dir(self, local: str | Path, rel: str) -> None:
        self.arrived.set()
        self.go_on.wait()
        super().upload_dir(local, rel)


@pytest.mark.parametrize("shared", ["", "run-1"])
def test_clearing_scratch_never_guts_a_shard_that_is_being_committed(
    shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver clears up; while its first file goes, the old worker publishes the rest."""
    plain = Layout.open(tmp_path)
    slow = Halting(plain.backend, plain.root)
    slow.arrived.clear(), slow.go_on.clear()
    clearing = threading.get_ident()
    unlink, scandir = os.unlink, os.scandir

    class InOrder(AbstractContextManager["InOrder"]):
        """The store's files come first: the rest would be missed at once."""

        def __init__(self, *args: Any) -> None:
            with scandir(*args) as entries:
                self._entries = iter(sorted(entries, key=lambda entry: entry.name))

        def __iter__(self) -> Iterator[os.DirEntry[str]]:
            return self._entries

        def __next__(self) -> os.DirEntry[str]:
            return next(self._entries)

        def __exit__(self, *args: object) -> None: ...

    with ThreadPoolExecutor(1) as pool:
        folder = shared_scratch(plain, shared) if shared else None
        working = pool.submit(publish, slow, rows=ROWS, formats=("zarr",), folder=folder)

        def slow_unlink(*args: Any, **kwargs: Any) -> None:
            if threading.get_ident() == clearing and not slow.go_on.is_set():
                slow.go_on.set()
                working.exception()  # wait for its end, good or bad
            unlink(*args, **kwargs)

        slow.arrived.wait()
        monkeypatch.setattr(os, "unlink", slow_unlink)
        monkeypatch.setattr(os, "scandir", InOrder)
        clear_scratch(plain, shared)
        slow.go_on.set()
        assert working.exception() is None or isinstance(working.exception(), CommitError)
    committed = commits(plain)
    for record in committed.values():
        for file in record.files:
            assert plain.size(file.path) == file.bytes
    assert publish(plain, attempt="00000002", rows=ROWS) is not bool(committed)
    clear_scratch(plain)
    assert not list(tmp_path.glob(".*"))


def test_attempts_that_share_a_folder_leave_nothing_in_it_nor_miss_it(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    folder = shared_scratch(layout, "run-1")
    assert folder is not None
    with pytest.raises(CommitError, match="bytes at the output"):
        publish(Truncating(layout.backend, layout.root), rows=ROWS, folder=folder)
    assert not [*folder.iterdir()]
    assert publish(layout, rows=ROWS, bad=[make_bad("x.wav")], folder=folder) and not [
        *folder.iterdir()
    ]
    clear_scratch(layout, "run-2")
    assert folder.is_dir()
    clear_scratch(layout, "run-1")
    assert not (tmp_path / ".scratch").exists()
    assert publish(layout, "00001", rows=ROWS, folder=shared_scratch(layout, "run-1"))


def test_what_a_killed_clearing_left_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / ".scratch-0a1b2c3d" / "x").mkdir(parents=True)
    clear_scratch(Layout.open(tmp_path))
    assert list(tmp_path.iterdir()) == []


def _chain(err: BaseException | None) -> Iterator[BaseException]:
    while err is not None:
        yield err
        err = err.__cause__


@pytest.mark.parametrize("formats", [("zarr",), ("parquet",)])
def test_a_full_disk_commits_nothing_and_says_so(formats: tuple[str, ...], tmp_path: Path) -> None:
    # 2 MB of noise on a disk of 1 MB.
    big = [make_row("long.wav", 100_000)]
    with small_disk(tmp_path / "disk", "1m") as disk:
        layout = Layout.open(disk)
        with pytest.raises(CommitError, match="00000 was not committed: no space left") as caught:
            publish(layout, rows=big, formats=formats)
        assert any(getattr(err, "errno", 0) == errno.ENOSPC for err in _chain(caught.value))
        assert all_files(layout) == {}
        assert list(disk.iterdir()) == []
        grow_disk(disk, "16m")
        assert publish(layout, attempt="00000002", rows=big, formats=formats)
        assert commits(layout)["00000"].frames["modulation"] == 100_000


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for fmt in ("zarr", "parquet"):
    try:
        publish([fmt], 100_000)
    except CommitError as err:
        print(err)
"""


def test_a_file_beyond_the_limit_commits_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD + LIMITED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if "the file would be larger" in line]
    assert len(said) == 2, done.stdout + done.stderr
    assert all(line.startswith("shard 00000 was not committed: ") for line in said)
    assert all_files(Layout.open(tmp_path)) == {}
    assert list(tmp_path.iterdir()) == []


def test_an_upload_that_fails_commits_nothing_and_leaves_nothing() -> None:
    with s3_server() as options:
        layout = Layout.open("s3://missing-bucket/out", options)
        with pytest.raises(CommitError, match="00000 was not committed: FileNotFoundError"):
            publish(layout, rows=ROWS)


class Truncating(Layout):
    """A store that publishes a file cut short, as closed streams can."""

    def upload_file(self, local: str | Path, rel: str) -> None:
        if os.path.isfile(local):
            os.truncate(local, os.path.getsize(local) - 1)
        super().upload_file(local, rel)


def test_a_file_that_arrives_short_is_not_committed(tmp_path: Path) -> None:
    plain = Layout.open(tmp_path)
    with pytest.raises(CommitError, match=r"expected \d+ bytes at the output"):
        publish(Truncating(plain.backend, plain.root), rows=ROWS)
    assert all_files(plain) == {}


@pytest.mark.parametrize("step", ["digest_rows", "shard_moments", "sha256_of"])
def test_what_fails_beside_the_encoding_commits_nothing_and_leaves_nothing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the rows cannot be read")

    monkeypatch.setattr(publishing, step, fail)
    layout = Layout.open(tmp_path)
    with pytest.raises(CommitError, match="OSError: the rows cannot be read"):
        publish(layout, rows=ROWS)
    assert all_files(layout) == {}
    threads_end([thread for thread in threading.enumerate() if "publish" in thread.name])


def test_a_part_is_not_removed_while_it_is_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoding fails meanwhile: what is read beside it stays until that ends."""
    hashing, seen = threading.Event(), list[bool]()

    def slow(file: Any) -> str:
        hashing.set()
        time.sleep(0.2)
        seen.append(os.path.exists(file.name))
        return "0" * 64

    def full(*_: Any) -> None:
        assert hashing.wait(DEADLINE_S)
        raise OSError(errno.ENOSPC, "no space left on the device")

    monkeypatch.setattr(publishing, "sha256_of", slow)
    monkeypatch.setattr(publishing, "write_table", full)
    layout = Layout.open(tmp_path)
    with pytest.raises(CommitError, match="no space left on the device"):
        publish(layout, rows=ROWS, formats=("parquet",))
    assert seen == [True]
    assert all_files(layout) == {}
    assert list(tmp_path.iterdir()) == []


def _swapped(rows: Any) -> Any:
    return [rows[1], rows[0], *rows[2:]]


def _changed(rows: Any) -> Any:
    streams = dict(rows[0].streams)
    streams["envelope"] = streams["envelope"].copy()
    streams["envelope"][-1, -1] += 1
    return [replace(rows[0], streams=streams), *rows[1:]]


@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda rows: rows[:-1], "expected 3 row ids, read back 2"),
        (_swapped, "'b.wav' for 'a.wav' at row 0"),
        (_changed, "stream envelope: the values read back differ"),
    ],
)
def test_an_encoder_that_errs_is_caught_before_the_upload(
    fault: Callable[[Any], Any],
    message: str,
    fmt: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = type(format_of(fmt))
    real = kind.write

    def write(self: Format, path: Path, rows: Any, streams: Any, encoding: Encoding) -> None:
        real(self, path, fault(rows), streams, encoding)

    monkeypatch.setattr(kind, "write", write)
    layout = Layout.open(tmp_path)
    with pytest.raises(CommitError, match=message):
        publish(layout, rows=ROWS, formats=(fmt,))
    assert all_files(layout) == {}


def test_a_power_cut_finds_whatever_a_commit_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contents, then names, then the record's content, then its name: no flush is missing, none is
    made twice."""
    layout = Layout.open(tmp_path)
    assert publish(layout, rows=ROWS, bad=[make_bad("x.wav")])
    log: list[str] = []
    fsync, rename, link = os.fsync, os.rename, os.link

    def where(path: Any) -> str:
        kind, *rest = Path(path).relative_to(tmp_path).parts
        if kind == ".scratch":  # of an attempt, where the parts lie side by side
            return "/".join(rest[1:]).replace("-", "/", 1)
        return "/".join((kind, *rest))

    def logged_fsync(handle: int) -> None:
        log.append("sync " + where(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def named(target: Any) -> None:
        if ".scratch" not in Path(target).parts:  # where zarr-python names its own files
            log.append("name " + where(target))

    def logged_rename(source: Any, target: Any) -> None:
        named(target)
        rename(source, target)

    def logged_link(source: Any, target: Any) -> None:
        named(target)
        link(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged_rename)
    monkeypatch.setattr(os, "link", logged_link)
    assert publish(layout, "00001", rows=ROWS, bad=[make_bad("x.wav")], formats=("zarr", "parquet"))
    record = commits(layout)["00001"]
    names = [line.removeprefix("name ") for line in log if line.startswith("name ")]
    *parts, commit_name = names
    assert commit_name == "commits/00001.json"
    assert log[-2:] == [f"name {commit_name}", "sync commits"]
    assert log[-3].startswith("sync commits/.00001.json.")
    assert log[-6:-3] == ["sync data", "sync rows", "sync quarantine"]
    for file in record.files:
        (part,) = (part for part in parts if file.path == part or file.path.startswith(part + "/"))
        assert log.index(f"sync {file.path}") < log.index(f"name {part}")
    assert len(log) == len(set(log))


class Away(Layout):
    """A store that has gone away between two files of a shard."""

    asked: ClassVar[list[str]] = []

    def upload_file(self, local: str | Path, rel: str) -> None:
        raise StorageError("the store is away", transient=True)

    def delete(self, rel: str) -> None:
        self.asked.append(rel)
        raise StorageError("the store is away", transient=True)


def test_a_store_that_is_away_is_asked_once_to_remove_and_not_once_a_part(tmp_path: Path) -> None:
    """Each call would be tried for more than a minute, one after the other."""
    plain = Layout.open(tmp_path)
    Away.asked.clear()
    with pytest.raises(CommitError, match="the store is away"):
        publish(Away(plain.backend, plain.root), rows=ROWS, bad=[make_bad("x.wav")])
    assert len(Away.asked) == 1
