"""Create-if-absent in the hard cases: racing processes, and what real S3 stores may answer."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from earmill.pipeline.common.errors import LockedError, OutputError, StorageError
from earmill.pipeline.common.retries import RetryPolicy
from earmill.pipeline.dataset.driver_lock import DriverLock
from earmill.pipeline.storage import local_store, retrying
from earmill.pipeline.storage.layout import Layout

RACERS = 16


def test_exclusive_create_without_links_has_one_winner_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Barrier(RACERS)

    def link(*args: object) -> None:
        gate.wait()
        raise OSError(errno.EPERM, "Operation not permitted")

    def race(racer: int) -> bool:
        return local_store.LocalBackend().create(str(tmp_path / "x"), bytes([racer]) * 1000)

    monkeypatch.setattr(os, "link", link)

    with ThreadPoolExecutor(RACERS) as pool:
        won = list(pool.map(race, range(RACERS)))
    assert won.count(True) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"x"}
    assert (tmp_path / "x").read_bytes() == bytes([won.index(True)]) * 1000


def test_a_bare_name_is_one_in_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    local_store.write_local("report.html", b"page")
    assert local_store.LocalBackend().create("lock", b"mine")
    assert not local_store.LocalBackend().create("lock", b"yours")
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert found == {"report.html": b"page", "lock": b"mine"}


def test_one_of_many_processes_wins_each_name(tmp_path: Path) -> None:
    code = (
        "import sys; from earmill.pipeline.storage.local_store import LocalBackend\n"
        "sys.stdin.readline()\n"
        "for n in range(200):\n"
        "    print(int(LocalBackend().create(f'{sys.argv[1]}/{n}', sys.argv[2].encode() * 999)))\n"
    )
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / "commits"), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for racer in racers:  # all are waiting for this line, so they begin together
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [racer.communicate(timeout=60)[0].split() for racer in racers]
    for name in range(200):
        assert [wins[name] for wins in won].count("1") == 1
        winner = [wins[name] for wins in won].index("1")
        assert (tmp_path / "commits" / str(name)).read_text() == str(winner) * 999
    assert len(list((tmp_path / "commits").iterdir())) == 200


@contextmanager
def scripted_s3(answers: list[tuple[int, str]]) -> Iterator[tuple[Layout, list[str | None]]]:
    """An S3 endpoint that answers each PUT with the next (status, error code); the last repeats."""
    asked: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, code = answers[min(len(asked), len(answers) - 1)]
            asked.append(self.headers.get("If-None-Match"))
            self._answer(status, f"<Error><Code>{code}</Code></Error>" if code else "")

        def do_DELETE(self) -> None:
            self._answer(204, "")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(200, "<DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>")

        def do_GET(self) -> None:
            self._answer(200, "<ListBucketResult></ListBucketResult>")

        def do_HEAD(self) -> None:
            self._answer(200, "")

        def _answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"tag"')
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with serving(Handler) as options:
        yield Layout.open("s3://bucket/out", options), asked


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[dict[str, Any]]:
    """A server on loopback; yields the storage options that lead there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield {
            "key": "k",
            "secret": "s",
            "endpoint_url": f"http://127.0.0.1:{server.server_port}",
            "skip_instance_cache": True,
        }
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _LossyStore(BaseHTTPRequestHandler):
    """Keeps objects, honours If-None-Match, and loses the answer to each name's first PUT."""

    protocol_version = "HTTP/1.1"
    objects: ClassVar[dict[str, bytes]]
    lost: ClassVar[list[str]]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        name = self.path.split("?")[0]
        if "If-None-Match" in self.headers and name in self.objects:
            self._answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self.objects[name] = body
        if name in self.lost:
            self._answer(200)
            return
        self.lost.append(name)
        self.close_connection = True

    def do_GET(self) -> None:
        name, _, query = self.path.partition("?")
        if "list-type=2" in query:  # of folders that stay empty here
            self._answer(200, b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>")
            return
        body = self.objects.get(name)
        missing = b"<Error><Code>NoSuchKey</Code></Error>"
        self._answer(404 if body is None else 200, missing if body is None else body)

    def do_HEAD(self) -> None:
        self._answer(200 if self.path.split("?")[0] in self.objects else 404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"<DeleteResult><Deleted><Key>x</Key></Deleted></DeleteResult>")

    def do_DELETE(self) -> None:
        self.objects.pop(self.path.split("?")[0], None)
        self._answer(204)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"tag"')
        self.send_header("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def lossy_s3() -> Iterator[tuple[Layout, type[_LossyStore]]]:
    """A store that does what it is told but loses the first answer to every PUT."""
    store = type("Store", (_LossyStore,), {"objects": {}, "lost": []})
    with serving(store) as options:
        yield Layout.open("s3://bucket/out", options), store


def test_a_lost_answer_to_the_probe_or_the_lock_is_no_lost_race() -> None:
    with lossy_s3() as (layout, store):
        layout.check_writable()
        with DriverLock(layout, run_id="mine") as lock:
            lock.check()
            with pytest.raises(LockedError, match="run mine"):
                DriverLock(layout, run_id="other")
        assert store.lost[0].startswith("/bucket/out/.probe-")
        assert "/bucket/out/driver.json" in store.lost


def test_only_ones_own_content_counts_as_ones_own(tmp_path: Path) -> None:
    with lossy_s3() as (remote, _):
        for layout in (remote, Layout.open(tmp_path)):
            assert layout.create_own("a", b"mine") is True
            assert layout.create_own("a", b"mine") is True
            assert layout.create_own("a", b"other") is False
            assert layout.read_bytes("a") == b"mine"
    with scripted_s3([(403, "AccessDenied")]) as (layout, _), pytest.raises(StorageError):
        layout.create_own("commits/00000.json", b"x")


def test_a_conflict_is_asked_again_and_can_be_won() -> None:
    with scripted_s3([(409, "ConditionalRequestConflict"), (200, "")]) as (layout, asked):
        assert layout.put_if_absent("commits/00000.json", b"x") is True
    assert asked == ["*", "*"]


def test_a_refusal_without_details_is_a_lost_race() -> None:
    with scripted_s3([(409, "OperationAborted"), (412, "PreconditionFailed")]) as (layout, asked):
        assert layout.put_if_absent("commits/00000.json", b"x") is False
    assert asked == ["*", "*"]


def test_endless_conflicts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = partial(sum, slept)
    brief = RetryPolicy(1.0, clock=clock, sleep=slept.append, jitter=lambda: 1.0)
    monkeypatch.setattr(retrying, "BRIEF", brief)
    with scripted_s3([(409, "ConditionalRequestConflict")]) as (layout, asked):
        with pytest.raises(StorageError, match=r"another process writes it, .* 409 Conflict"):
            layout.put_if_absent("commits/00000.json", b"x")
    assert len(asked) == 3 and slept == [0.2, 0.4]


def test_other_failures_are_raised() -> None:
    with scripted_s3([(403, "AccessDenied")]) as (layout, _), pytest.raises(StorageError):
        layout.put_if_absent("commits/00000.json", b"x")


def test_a_store_that_ignores_the_condition_is_found_out_before_work() -> None:
    with scripted_s3([(200, "")]) as (layout, _):
        with pytest.raises(OutputError, match="honours If-None-Match"):
            layout.check_writable()
