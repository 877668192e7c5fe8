"""One contract for outputs on S3, Google and Azure: created once, whole or not, no secrets."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest

import earmill
from earmill.pipeline.common.errors import (
    EarmillError,
    ErrorKind,
    OutputError,
    StorageError,
    classify,
)
from earmill.pipeline.common.retries import RetryPolicy
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.sources.base import filesystem, source_errors
from earmill.pipeline.storage import fsspec_store, object_store, retrying
from earmill.pipeline.storage.fsspec_store import GCSFS_KINDS_OF_BUCKET
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.azure_stand_in import refused
from tests.pipeline.commit_data import all_files
from tests.pipeline.object_stores import KINDS, Place, serving, store_of
from tests.pipeline.outputs import small_dataset
from tests.short import some
from tests.waiting import DEADLINE_S

RACERS = 8
# aiohttp would have large bodies as files; the clients give it bytes.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with store_of(request.param) as found:
        yield found


@pytest.fixture
def layout(place: Place) -> Layout:
    return place.layout(uuid.uuid4().hex)


def ours(place: Place) -> Place:
    if place.server is None and not place.uri.startswith("s3"):
        pytest.skip("faults are ordered from our stand-ins only")
    return place


def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upload in parts of 5 MiB; S3 takes no smaller ones."""
    for module in (fsspec_store, object_store):
        monkeypatch.setattr(module, "PART_BYTES", 5 << 20)


def test_one_of_many_creates_each_file(layout: Layout) -> None:
    gate = threading.Barrier(RACERS)

    def race(racer: int) -> list[bool]:
        gate.wait()
        return [layout.put_if_absent(f"commits/{n}.json", bytes([racer]) * 99) for n in range(5)]

    with ThreadPoolExecutor(RACERS) as pool:
        won = list(pool.map(race, range(RACERS)))
    for n in range(5):
        winners = [racer for racer in range(RACERS) if won[racer][n]]
        assert len(winners) == 1
        assert layout.read_bytes(f"commits/{n}.json") == bytes(winners) * 99


def test_the_store_is_told_to_create_only(place: Place) -> None:
    """What makes it exactly once is the store's own condition, not a look beforehand."""
    if place.server is None:
        pytest.skip("what was asked is seen in our stand-ins only")
    place.server.seen.clear()
    assert place.layout("told").put_if_absent("x", b"1")
    assert not place.layout("told").put_if_absent("x", b"2")
    assert [line.split()[0] for line in place.server.seen] in (["POST"] * 2, ["PUT"] * 2)


def test_files_are_written_listed_read_and_removed(layout: Layout, tmp_path: Path) -> None:
    layout.check_writable()
    assert layout.list("data") == [] and not layout.exists("data/a/b")
    layout.write_bytes("data/a/b", b"first")
    layout.write_bytes("data/a/b", b"second")
    layout.write_bytes("data/z", b"")
    layout.write_bytes("database/other", b"x")
    (tmp_path / "store").mkdir()
    (tmp_path / "store/one").write_bytes(b"1" * 10)
    layout.upload_dir(tmp_path / "store", "data/store")
    assert layout.sizes("data") == {"data/a/b": 6, "data/store/one": 10, "data/z": 0}
    assert layout.read_bytes("data/a/b") == b"second"
    assert layout.read_range("data/a/b", 2, 3) == b"con"
    assert layout.read_range("data/a/b", 4, 9) == b"nd"
    assert layout.size("data/a/b") == 6
    with pytest.raises(FileNotFoundError):
        layout.read_bytes("data/none")
    layout.delete("data/a")
    layout.delete("data/a")
    assert layout.list("data") == ["data/store/one", "data/z"]


@pytest.mark.parametrize("place", some(2, KINDS), indirect=True)
def test_a_dataset_there_is_whole_and_names_no_secret(place: Place) -> None:
    if place.uri.startswith("s3"):
        pytest.skip("test_finalise.py and test_verify.py do it there")
    folder = uuid.uuid4().hex
    layout = small_dataset(f"{place.uri}/{folder}", place.options)
    finalise(layout)
    assert verify(layout).ok
    found = earmill.open_features(f"{place.uri}/{folder}", storage_options=place.options)
    assert len(found) == 3
    for name, content in all_files(layout).items():
        assert not [word for word in place.secrets if word.encode() in content], name
    assert not [word for word in place.secrets if word in f"{layout!r} {layout.url('a')}"]


def test_large_files_go_in_parts(
    place: Place, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_parts(monkeypatch)
    content = os.urandom(11 << 20)
    (tmp_path / "large").write_bytes(content)
    if place.faults is not None:
        place.faults.asked.clear()
    layout.upload_file(tmp_path / "large", "data/large")
    assert layout.read_bytes("data/large") == content
    if place.uri.startswith(("s3", "gs")) and place.faults is not None:
        assert len(place.faults.asked) >= 1 + 3  # begun, parts


def test_of_a_failed_upload_nothing_is_left(
    place: Place, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = ours(place).faults
    assert faults is not None
    small_parts(monkeypatch)
    (tmp_path / "large").write_bytes(bytes(11 << 20))
    requests, kept = itertools.count(1), faults.fault

    def third(path: str) -> tuple[str, bytes] | None:
        ours = "large" in path or "upload" in path
        return ("403 Forbidden", b"") if ours and next(requests) == 3 else None

    faults.fault = third
    try:
        if place.uri.startswith("abfs"):  # below 64 MiB its client sends a file whole
            faults.fault = lambda path: ("403 Forbidden", b"") if "large" in path else None
        with pytest.raises((StorageError, PermissionError)):
            layout.upload_file(tmp_path / "large", "data/large")
    finally:
        faults.fault = kept
    assert layout.list("data") == []
    if place.uri.startswith("s3"):
        s3 = fsspec.filesystem("s3", **place.options)
        assert not s3.call_s3("list_multipart_uploads", Bucket="corpus").get("Uploads")
    elif place.server is not None:
        assert not getattr(place.server, "uploads", {}) and not getattr(place.server, "parts", {})


def test_a_container_on_its_way_out_is_no_commit_of_another(
    place: Place, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not place.uri.startswith("abfs") or place.server is None:
        pytest.skip("an answer of Azure's")
    monkeypatch.setattr(retrying, "BRIEF", RetryPolicy(0.0))
    monkeypatch.setattr(place.server, "_put", lambda *_: refused(409, "ContainerBeingDeleted"))
    with pytest.raises(StorageError, match=r"409 Conflict .*ContainerBeingDeleted"):
        layout.put_if_absent("commits/1.json", b"{}")


@pytest.mark.parametrize(("scheme", "extra"), [("gs", "gcs"), ("gcs", "gcs"), ("az", "azure")])
def test_a_missing_package_is_one_line(
    scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, package, None)
    known: dict[str, type] = sys.modules["fsspec.registry"]._registry  # type: ignore[attr-defined]
    for name in (scheme, "gs", "gcs", "abfs"):
        monkeypatch.delitem(known, name, raising=False)
    advice = rf"{scheme}://b/x: {scheme}:// needs .*; run: pip install 'earmill\[{extra}\]'"
    with pytest.raises(OutputError, match=advice):
        Layout.open(f"{scheme}://b/x")
    with pytest.raises(EarmillError, match=advice) as found, source_errors(f"{scheme}://b/x"):
        filesystem(f"{scheme}://b/x")
    assert found.value.exit_code == 2


def test_a_kind_of_store_that_nobody_reads_names_its_package() -> None:
    with pytest.raises(OutputError, match=r"oss://b/x: oss:// needs a package .*ossfs"):
        Layout.open("oss://b/x")


def test_google_is_not_asked_for_the_kind_of_bucket() -> None:
    """A second service per call, which may not be reachable; who needs it says so."""
    code = "import os, earmill.pipeline.storage.fsspec_store as f\nf.filesystem_of('file:///tmp')\n"
    code += f"print(os.environ[{GCSFS_KINDS_OF_BUCKET!r}])"
    env = {k: v for k, v in os.environ.items() if k != GCSFS_KINDS_OF_BUCKET}
    for given in ({}, {GCSFS_KINDS_OF_BUCKET: "true"}):
        done = subprocess.run(
            [sys.executable, "-c", code], env=env | given, capture_output=True, text=True
        )
        assert done.stdout.strip() == given.get(GCSFS_KINDS_OF_BUCKET, "false")


# Far above the time for which a busy machine keeps a thread waiting.
STALL_S = 2.0


def test_an_answer_of_the_web_may_take_long_but_not_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_store, "HTTP_STALL_S", STALL_S)
    asked = threading.Event()

    def drip(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Length", "40")])
        for _ in range(10):  # twice the stall in all
            time.sleep(STALL_S / 5)
            yield b"1234"

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] == "/stalls":
            start_response("200 OK", [("Content-Length", "50")])
            return iter(lambda: b"1234" if not asked.wait(DEADLINE_S) else b"", b"")
        return drip(environ, start_response)

    with serving(app) as address:
        fs, path = filesystem(f"{address}/slow.wav")
        assert fs.cat_file(path) == b"1234" * 10
        with pytest.raises(Exception) as found:
            fs.cat_file(f"{address}/stalls")
        asked.set()
    assert classify(found.value) is ErrorKind.OUTAGE
