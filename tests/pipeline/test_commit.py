"""A shard is committed exactly once and whole, or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset import publish as commit
from earmill.pipeline.dataset.publish import (
    CommitRecord,
    commits,
    committed_shards,
    publish_shard,
    read_commit,
)
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.outputs import (
    ATTRS,
    INFO,
    STREAMS,
    contents,
    grow_disk,
    make_bad,
    make_row,
    publish,
    s3_server,
    small_disk,
)

ROWS = [make_row("a.wav"), make_row("b.wav", 7), make_row("c.wav", 0)]
BAD = [make_bad("x.wav"), make_bad("y.wav", "truncated")]


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


@pytest.fixture(params=["local", "memory", "s3"])
def layout(request: pytest.FixtureRequest, tmp_path: Path) -> Layout:
    if request.param == "s3":
        return Layout.open(f"s3://out/{tmp_path.name}", request.getfixturevalue("s3"))
    return Layout.open(tmp_path if request.param == "local" else f"memory://{tmp_path.name}")


def all_files(layout: Layout) -> dict[str, bytes]:
    folders = ("data", "rows", "quarantine", "commits")
    return {name: data for folder in folders for name, data in contents(layout, folder).items()}


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
            lambda data: json.dumps({**data, "layout_version": 3}),
            "expected layout version 1 or 2, got 3",
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
    assert publish(LostAnswer(plain.fs, plain.root), rows=ROWS) is True
    record = commits(plain)["00000"]
    assert set(all_files(plain)) == {f.path for f in record.files} | {"commits/00000.json"}


# What the child processes publish; a plain description of the stream spares them importing torch.
CHILD = """
import os, signal, sys
from types import SimpleNamespace
import numpy as np
from earmill.pipeline.dataset.publish import publish_shard
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow

about = {"name": "m", "model": "m", "unit": "1", "width": 8, "layout": "frames"}
about |= {"scale_factor": 1.0, "frame_rate_hz": 100.0}
about |= {"channel_offsets": (0,), "fc_hz": (), "mfc_hz": ()}
stream = SimpleNamespace(**about, to_dict=lambda: {"name": "m"})

def publish(formats, n_frames):
    values = np.random.default_rng(0).normal(0, 50, (n_frames, 8)).astype("float16")
    publish_shard(
        Layout.open(sys.argv[1]),
        shard_id="00000",
        attempt="00000001",
        plan_id="plan0",
        rows=[FeatureRow("a.wav", "a.wav", -1, 1.0, {"uri": "a"}, {}, {"m": values})],
        bad=[QuarantineRow("x.wav", "x", "decode", "not_audio", "no", 1)],
        streams=[stream],
        formats=formats,
        attrs={"spec_sha256": "0" * 64},
        info={},
    )
"""

DYING = """
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

setattr(Layout, sys.argv[2], die)
publish(["zarr", "parquet"], 100)
"""


@pytest.mark.chaos
@pytest.mark.parametrize("moment", ["upload_dir", "upload_file", "put_if_absent"])
def test_a_process_killed_while_publishing_commits_nothing(moment: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD + DYING, str(tmp_path), moment], check=False)
    assert done.returncode == -signal.SIGKILL
    layout = Layout.open(tmp_path)
    assert commits(layout) == {}
    assert publish(layout, attempt="00000002", rows=[make_row("a.wav")], bad=[make_bad("x.wav")])
    assert commits(layout)["00000"].attempt == "00000002"
    layout.clear_scratch()
    assert not (tmp_path / ".scratch").exists()


class Halting(Layout):
    """Comes to the upload and waits there until it is told to go on."""

    arrived = threading.Event()
    go_on = threading.Event()

    def upload_dir(self, local: str | Path, rel: str) -> None:
        self.arrived.set()
        self.go_on.wait()
        super().upload_dir(local, rel)


def test_clearing_scratch_never_guts_a_shard_that_is_being_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another driver clears up; while its first file goes, the old worker publishes the rest."""
    plain = Layout.open(tmp_path)
    slow = Halting(plain.fs, plain.root)
    slow.arrived.clear(), slow.go_on.clear()
    clearing = threading.get_ident()
    unlink, scandir = os.unlink, os.scandir

    @contextmanager
    def in_order(*args: Any) -> Iterator[Iterator[os.DirEntry[str]]]:
        """The store's files come first: the rest would be missed at once."""
        with scandir(*args) as entries:
            yield iter(sorted(entries, key=lambda entry: entry.name))

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(publish, slow, rows=ROWS, formats=("zarr",))

        def slow_unlink(*args: Any, **kwargs: Any) -> None:
            if threading.get_ident() == clearing and not slow.go_on.is_set():
                slow.go_on.set()
                working.exception()  # wait for its end, good or bad
            unlink(*args, **kwargs)

        slow.arrived.wait()
        monkeypatch.setattr(os, "unlink", slow_unlink)
        monkeypatch.setattr(os, "scandir", in_order)
        plain.clear_scratch()
        slow.go_on.set()
        assert working.exception() is None or isinstance(working.exception(), CommitError)
    committed = commits(plain)
    for record in committed.values():
        for file in record.files:
            assert plain.size(file.path) == file.bytes
    assert publish(plain, attempt="00000002", rows=ROWS) is not bool(committed)
    plain.clear_scratch()
    assert not list(tmp_path.glob(".*"))


def test_what_a_killed_clearing_left_goes_with_the_next(tmp_path: Path) -> None:
    (tmp_path / ".scratch-0a1b2c3d" / "x").mkdir(parents=True)
    Layout.open(tmp_path).clear_scratch()
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


def test_an_upload_that_fails_commits_nothing_and_leaves_nothing(s3: dict[str, Any]) -> None:
    layout = Layout.open("s3://missing-bucket/out", s3)
    with pytest.raises(CommitError, match="00000 was not committed: FileNotFoundError"):
        publish(layout, rows=ROWS)


class Truncating(Layout):
    """A store that publishes a file cut short, as closed streams can."""

    def upload_file(self, local: str | Path, rel: str) -> None:
        os.truncate(local, os.path.getsize(local) - 1)
        super().upload_file(local, rel)


def test_a_file_that_arrives_short_is_not_committed(tmp_path: Path) -> None:
    plain = Layout.open(tmp_path)
    with pytest.raises(CommitError, match=r"expected \d+ bytes at the output"):
        publish(Truncating(plain.fs, plain.root), rows=ROWS)
    assert all_files(plain) == {}


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
    real = commit.encode
    monkeypatch.setattr(
        commit, "encode", lambda fmt, rows, *args, **kw: real(fmt, fault(rows), *args, **kw)
    )
    layout = Layout.open(tmp_path)
    with pytest.raises(CommitError, match=message):
        publish(layout, rows=ROWS, formats=(fmt,))
    assert all_files(layout) == {}


def test_names_outside_the_grammar_are_refused(tmp_path: Path) -> None:
    for shard, attempt in (("1", "00000001"), ("00000", "zz")):
        with pytest.raises((CommitError, ValueError)):
            publish_shard(
                Layout.open(tmp_path),
                shard_id=shard,
                attempt=attempt,
                plan_id="p",
                rows=ROWS,
                bad=[],
                streams=STREAMS,
                formats=("zarr",),
                attrs=ATTRS,
                info=INFO,
            )
    assert all_files(Layout.open(tmp_path)) == {}
