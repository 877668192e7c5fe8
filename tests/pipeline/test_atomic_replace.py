"""Who was frozen and wakes puts nothing back: small files are replaced only as they were seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from earmill.pipeline.common.errors import LockedError, OutputError
from earmill.pipeline.dataset import finalise as closing
from earmill.pipeline.dataset import garbage
from earmill.pipeline.dataset.driver_lock import DriverLock, read_holder
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.garbage import collect_garbage
from earmill.pipeline.dataset.snapshot import Current, EarlierSnapshot
from earmill.pipeline.storage import atomic_replace
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import CURRENT_FILE, DRIVER_FILE
from tests.pipeline.outputs import s3_server, small_dataset
from tests.waiting import threads_end

NAME, OLD, NEW, ANOTHERS = "current.json", b"as it was", b"ours", b"another driver's"


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


@pytest.fixture(params=["local", "memory", "s3"])
def layout(request: pytest.FixtureRequest, tmp_path: Path, s3: dict[str, Any]) -> Layout:
    if request.param == "s3":
        return Layout.open(f"s3://out/{tmp_path.name}", s3)
    place = tmp_path if request.param == "local" else f"memory://{tmp_path.name}"
    return Layout.open(place)


def test_what_was_seen_is_replaced_and_nothing_else(layout: Layout) -> None:
    assert layout.replace_own(NAME, OLD, None)
    assert not layout.replace_own(NAME, NEW, None)
    assert not layout.replace_own(NAME, NEW, ANOTHERS)
    assert layout.read_bytes(NAME) == OLD
    assert layout.replace_own(NAME, NEW, OLD)
    assert layout.read_bytes(NAME) == NEW
    # A repeated call whose first answer was lost.
    assert layout.replace_own(NAME, NEW, OLD)


def test_a_file_that_is_gone_is_not_put_back(layout: Layout) -> None:
    layout.write_bytes(NAME, OLD)
    layout.delete(NAME)
    assert not layout.replace_own(NAME, NEW, OLD)
    assert not layout.exists(NAME)


def test_a_bucket_refuses_who_was_frozen_within_the_call(
    tmp_path: Path, s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout.open(f"s3://out/{tmp_path.name}", s3)
    layout.write_bytes(NAME, OLD)
    put = layout.fs.pipe_file

    def wakes_too_late(path: str, data: bytes, **condition: Any) -> None:
        put(path, ANOTHERS)
        put(path, data, **condition)

    monkeypatch.setattr(layout.fs, "pipe_file", wakes_too_late)
    assert not layout.replace_own(NAME, NEW, OLD)
    assert layout.read_bytes(NAME) == ANOTHERS


def test_a_bucket_without_the_condition_is_written_all_the_same(
    tmp_path: Path, s3: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout.open(f"s3://out/{tmp_path.name}", s3)
    layout.write_bytes(NAME, OLD)
    put = layout.fs.pipe_file

    def knows_no_condition(path: str, data: bytes, **condition: Any) -> None:
        if condition:
            said = {
                "Error": {"Code": "NotImplemented"},
                "ResponseMetadata": {"HTTPStatusCode": 501},
            }
            raise ClientError(said, "PutObject")
        put(path, data)

    monkeypatch.setattr(layout.fs, "pipe_file", knows_no_condition)
    assert layout.replace_own(NAME, NEW, OLD)
    assert layout.read_bytes(NAME) == NEW


RACER = """
import sys
from earmill.pipeline.storage.layout import Layout
layout = Layout.open(sys.argv[1])
done = 0
sys.stdin.readline()
while done < 100:
    seen = layout.read_bytes("n")
    data = b"%d by %s" % (int(seen.split()[0]) + 1, sys.argv[2].encode())
    done += layout.replace_own("n", data, seen)
"""


def test_of_racing_processes_none_undoes_another(tmp_path: Path) -> None:
    (tmp_path / "n").write_bytes(b"0")
    racers = [
        subprocess.Popen([sys.executable, "-c", RACER, str(tmp_path), name], stdin=subprocess.PIPE)
        for name in ("one", "two")
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write(b"go\n")
        racer.stdin.flush()
    for racer in racers:
        racer.communicate(timeout=60)
        assert racer.returncode == 0
    assert (tmp_path / "n").read_bytes().startswith(b"200 by ")


def test_a_folder_that_stays_locked_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout.open(tmp_path)
    layout.write_bytes(NAME, OLD)
    monkeypatch.setattr(atomic_replace, "LOCK_WAIT_S", 0.0)
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        atomic_replace.fcntl.flock(handle, atomic_replace.fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="end the driver that hangs there"):
            layout.replace_own(NAME, NEW, OLD)
    finally:
        os.close(handle)
    assert layout.read_bytes(NAME) == OLD


@pytest.mark.parametrize("frozen_after", ["replace_cards", "_store_snapshot"])
def test_a_dataset_that_another_closed_meanwhile_stays_as_he_closed_it(
    frozen_after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = small_dataset(tmp_path)
    step = getattr(closing, frozen_after)

    def frozen(*args: Any) -> Any:
        done = step(*args)
        layout.write_bytes(CURRENT_FILE, ANOTHERS)
        return done

    monkeypatch.setattr(closing, frozen_after, frozen)
    with pytest.raises(LockedError, match="another driver closed"):
        finalise(layout)
    assert layout.read_bytes(CURRENT_FILE) == ANOTHERS
    assert layout.exists("README.md") == (frozen_after == "replace_cards")


def test_collecting_garbage_undoes_no_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = small_dataset(tmp_path)
    finalise(layout)

    def frozen(current: Current, *args: Any) -> list[EarlierSnapshot]:
        layout.write_bytes(CURRENT_FILE, ANOTHERS)
        return [EarlierSnapshot(current.snapshot, current.entry)]

    monkeypatch.setattr(garbage, "_expired", frozen)
    with pytest.raises(LockedError, match="nothing was replaced"):
        collect_garbage(layout, keep=1)
    assert layout.read_bytes(CURRENT_FILE) == ANOTHERS


def test_a_heartbeat_never_overwrites_who_has_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout.open(tmp_path)
    with DriverLock(layout, heartbeat_s=0.01) as lock:
        mine = layout.read_bytes(DRIVER_FILE)
        theirs = mine.replace(lock.holder.run_id.encode(), b"another-run")
        replace = Layout.replace_own

        def frozen_before_replacing(self: Layout, name: str, *values: bytes) -> bool:
            layout.write_bytes(name, theirs)
            return replace(self, name, *values)

        monkeypatch.setattr(Layout, "replace_own", frozen_before_replacing)
        threads_end([lock._thread])
        holder = read_holder(layout)
        assert holder is not None and holder.run_id == "another-run"
        with pytest.raises(LockedError, match="took"):
            lock.check()
