"""Who was frozen and wakes puts nothing back: small files are replaced only as they were seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from earmill.pipeline.common.errors import LockedError, OutputError
from earmill.pipeline.dataset import finalise as closing
from earmill.pipeline.dataset import garbage
from earmill.pipeline.dataset.driver_lock import DriverLock, read_holder
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.garbage import collect_garbage
from earmill.pipeline.dataset.snapshot import Current, EarlierSnapshot
from earmill.pipeline.storage import local_store
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.object_store import ObjectBackend
from earmill.pipeline.storage.paths import CURRENT_FILE, DRIVER_FILE
from tests.pipeline.outputs import s3_server, small_dataset
from tests.s3_stand_in import App, s3_stand_in
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


@contextmanager
def bucket(around: Callable[[App], App], kind: str) -> Iterator[Layout]:
    """A bucket behind another application, through obstore or through s3fs."""
    with s3_stand_in(around) as address:
        options: dict[str, Any] = {"key": "k", "secret": "s", "endpoint_url": address}
        if kind == "s3fs":
            options["s3_additional_kwargs"] = {}  # known to s3fs alone
        fs = fsspec.filesystem("s3", **options)
        fs.mkdir("guarded")
        layout = Layout.open("s3://guarded/out", options)
        assert isinstance(layout.backend, ObjectBackend) == (kind == "obstore")
        layout.write_bytes(NAME, OLD)
        try:
            yield layout
        finally:
            fs.rm("guarded", recursive=True)


@pytest.mark.parametrize("kind", ["obstore", "s3fs"])
def test_a_bucket_refuses_who_was_frozen_within_the_call(kind: str) -> None:
    others: list[Layout] = []

    def slow(app: App) -> App:
        def call(environ: dict[str, Any], start_response: Any) -> Any:
            if environ.get("HTTP_IF_MATCH"):
                others[0].write_bytes(NAME, ANOTHERS)
            return app(environ, start_response)

        return call

    with bucket(slow, kind) as layout:
        others.append(layout)
        assert not layout.replace_own(NAME, NEW, OLD)
        assert layout.read_bytes(NAME) == ANOTHERS


@pytest.mark.parametrize("kind", ["obstore", "s3fs"])
def test_a_bucket_without_the_condition_is_written_all_the_same(kind: str) -> None:
    refused = []

    def knows_no_condition(app: App) -> App:
        def call(environ: dict[str, Any], start_response: Any) -> Any:
            if not environ.get("HTTP_IF_MATCH"):
                return app(environ, start_response)
            environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            refused.append(environ["PATH_INFO"])
            start_response("501 Not Implemented", [("Content-Type", "application/xml")])
            return [b"<Error><Code>NotImplemented</Code></Error>"]

        return call

    with bucket(knows_no_condition, kind) as layout:
        assert layout.replace_own(NAME, NEW, OLD)
        assert layout.read_bytes(NAME) == NEW and refused
        assert not layout.replace_own(NAME, ANOTHERS, OLD)


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
    monkeypatch.setattr(local_store, "LOCK_WAIT_S", 0.0)
    handle = os.open(tmp_path, os.O_RDONLY)
    try:
        local_store.fcntl.flock(handle, local_store.fcntl.LOCK_EX)
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
