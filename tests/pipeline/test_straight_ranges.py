"""Ranges past s3fs: the same bytes, and s3fs as ever where anything is out of the ordinary."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import accumulate
from threading import Thread
from typing import Any

import fsspec
import numpy as np
import pytest

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.storage import straight_ranges
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.stored_file import StoredFile
from earmill.pipeline.storage.straight_ranges import _Way, can_go_straight, parts_straight
from tests.pipeline.outages import s3_error, s3_store

CONTENT = np.random.default_rng(0).integers(0, 256, 3_000_000, np.uint8)


class Server(ThreadingHTTPServer):
    """Answers with ranges of `CONTENT`; `behaviour` says what is wrong with them."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.behaviour, self.connections, self.requests = "", 0, 0
        self.scheme = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}/bucket/key?signature=s"


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_GET(self) -> None:
        self.server.requests += 1
        how = self.server.behaviour
        if how.startswith("raw "):
            self.wfile.write(how.removeprefix("raw ").encode())
            self.close_connection = True
            return
        if how == "missing":
            self.send_error(404)
            return
        whole = "Range" not in self.headers
        asked = self.headers.get("Range", f"bytes=0-{len(CONTENT) - 1}")
        first, last = map(int, asked.removeprefix("bytes=").split("-"))
        body = CONTENT[first : last + 1].tobytes()
        shift = how == "another range"
        self.send_response({"all of it": 200, "busy": 503}.get(how, 200 if whole else 206))
        if not whole:
            place = f"{first + shift}-{last + shift}"
            self.send_header("Content-Range", f"bytes {place}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(body) - (how == "too few")))
        self.end_headers()
        cut = len(body) // 2 if how in ("stalls", "breaks off") else len(body) - (how == "too few")
        for begin in range(0, cut, step := 1000 if how == "in pieces" else len(body)):
            self.wfile.write(body[begin : min(begin + step, cut)])
        self.wfile.flush()
        if how == "stalls":
            time.sleep(1.0)
        self.close_connection = how in ("breaks off", "stalls", "hangs up")

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def serving() -> Iterator[Server]:
    with Server() as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Urls:
    """One URL for all objects."""

    def __init__(self, server: Server) -> None:
        self._server, self.forgotten = server, 0

    def url(self, path: str) -> str:
        return self._server.url

    def forget(self) -> None:
        self.forgotten += 1


def parts_read(way: _Way, sizes: Sequence[int], start: int = 5) -> int:
    """How many parts come; that they are the right ones is checked."""
    memory, count = np.zeros(max(sizes), np.uint8), 0
    for part in way.parts("bucket/key", start, sizes, memory):
        np.testing.assert_array_equal(part, CONTENT[start : start + sizes[count]])
        start, count = start + sizes[count], count + 1
    return count


def _read(way: _Way, start: int = 5, nbytes: int = 2_000_000) -> bool:
    return parts_read(way, [nbytes], start) == 1


def test_reads_what_is_there_over_one_connection() -> None:
    with serving() as server:
        way = _Way(Urls(server))
        assert all(_read(way, *place) for place in ((0, 1), (5, 2_000_000), (2_999_999, 1)))
        assert (server.connections, server.requests) == (1, 3)


@pytest.mark.parametrize("behaviour", ["", "in pieces", "stalls", "breaks off"])
def test_parts_come_as_they_arrive_until_something_goes_wrong(behaviour: str) -> None:
    sizes = [1, 3000, 900_000, 100, 800_000, 700_000]
    with serving() as server:
        way = _Way(Urls(server), stall_s=0.2)
        server.behaviour = behaviour
        whole = behaviour in ("", "in pieces")
        # Of what breaks off half comes: three parts, the fourth, and not all of the fifth.
        assert parts_read(way, sizes) == (len(sizes) if whole else 4)
        assert (way._rests_until > 0) == (not whole)
        server.behaviour = ""
        way._rests_until = 0.0
        assert parts_read(way, sizes) == len(sizes)
        assert server.connections == (1 if whole else 2)


def test_who_stops_in_the_middle_leaves_a_closed_connection_and_an_open_way() -> None:
    with serving() as server:
        way = _Way(Urls(server))
        parts = iter(way.parts("bucket/key", 0, [1000, 2_000_000], np.zeros(2_000_000, np.uint8)))
        np.testing.assert_array_equal(next(parts), CONTENT[:1000])
        parts.close()  # type: ignore[attr-defined]
        assert _read(way)
        assert server.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        "SSH-2.0-OpenSSH_9.2\r\n\r\n",
        "HTTP/1.1 many things\r\n\r\n",
        "HTTP/1.1 206 OK\r\nContent-Length: a few\r\nContent-Range: bytes 5-2000004/9\r\n\r\n",
        "HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 206 OK\r\n" + 70_000 * "a",
        "",
    ],
    ids=lambda answer: answer[:30] or "nothing",
)
def test_what_is_no_answer_is_left_to_the_filesystem(answer: str) -> None:
    with serving() as server:
        way = _Way(Urls(server), stall_s=0.5)
        server.behaviour = f"raw {answer}"
        assert not _read(way)
        assert way.whole("bucket/key", len(CONTENT)) is None
        way._rests_until, server.behaviour = 0.0, ""
        assert _read(way)


@pytest.mark.parametrize(
    "behaviour", ["all of it", "busy", "another range", "too few", "breaks off", "stalls"]
)
def test_leaves_what_is_not_as_asked_and_rests(behaviour: str) -> None:
    with serving() as server:
        way = _Way(Urls(server), stall_s=0.2)
        server.behaviour = behaviour
        assert not _read(way)
        server.behaviour, asked = "", server.requests
        assert not _read(way)
        assert server.requests == asked
        way._rests_until = 0.0
        assert _read(way)


def test_a_connection_that_the_store_closed_is_made_anew() -> None:
    with serving() as server:
        way = _Way(Urls(server))
        server.behaviour = "hangs up"
        assert _read(way)
        assert _read(way)
        assert server.connections == 2


def test_a_forked_process_leaves_its_parents_connections_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as server:
        way = _Way(Urls(server))
        assert _read(way)
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert _read(way)
        assert server.connections == 2


@pytest.mark.parametrize("behaviour", ["busy", "too few", "breaks off", "stalls"])
def test_a_whole_object_comes_or_is_left_and_rests(behaviour: str) -> None:
    with serving() as server:
        urls = Urls(server)
        way = _Way(urls, stall_s=0.2)
        assert way.whole("bucket/key", len(CONTENT)) == CONTENT.tobytes()
        assert (server.connections, urls.forgotten) == (1, 0)
        server.behaviour = behaviour
        found = way.whole("bucket/key", len(CONTENT))
        if behaviour == "too few":
            # Of a length that nobody promised.
            assert found == CONTENT[:-1].tobytes()
            return
        assert found is None
        assert urls.forgotten == 1
        server.behaviour, asked = "", server.requests
        assert way.whole("bucket/key", len(CONTENT)) is None
        assert server.requests == asked


@pytest.mark.parametrize("behaviour", ["missing", "more than that"])
def test_an_answer_that_the_filesystem_gives_leaves_the_way_open(behaviour: str) -> None:
    with serving() as server:
        urls = Urls(server)
        way = _Way(urls)
        server.behaviour = behaviour
        most = len(CONTENT) - (behaviour == "more than that")
        assert way.whole("bucket/key", most) is None
        if behaviour == "missing":
            assert not _read(way)
        server.behaviour = ""
        assert _read(way)
        assert way.whole("bucket/key", len(CONTENT)) == CONTENT.tobytes()
        assert urls.forgotten == 0


def test_small_files_of_a_bucket_come_past_s3fs_and_are_missing_clearly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with s3_store() as (store, options):
        layout = Layout.open("s3://corpus", options)
        layout.write_bytes("commits/a", b"first")
        through: list[str] = []
        real = layout.fs.cat_file

        def counting(path: str, **how: Any) -> bytes:
            through.append(path)
            return bytes(real(path, **how))

        monkeypatch.setattr(layout.fs, "cat_file", counting)
        assert layout.read_bytes("commits/a") == b"first"
        layout.write_bytes("commits/a", b"second, and longer")
        assert layout.read_bytes("commits/a") == b"second, and longer"
        assert through == []
        with pytest.raises(FileNotFoundError):
            layout.read_bytes("commits/b")
        assert through == ["corpus/commits/b"]
        assert layout.read_bytes("commits/a", 5) == b"second, and longer"
        assert len(through) == 1
        answers = iter([s3_error("503 Slow Down", "SlowDown")])
        store.fault = lambda path: next(answers, None)
        assert layout.read_bytes("commits/a") == b"second, and longer"
        assert len(through) == 2


def starts(asked: list[tuple[str, int]]) -> list[int]:
    """Where the ranges begin that s3fs is asked for."""
    return [int(name.split(" ")[1]) for name, _ in asked]


def test_files_of_a_bucket_come_past_s3fs_and_through_it_in_an_outage(
    asked: list[tuple[str, int]],
) -> None:
    with s3_store() as (store, options):
        layout = Layout.open("s3://corpus", options)
        layout.write_bytes("data/a", CONTENT.tobytes())
        file = StoredFile(layout, "data/a", len(CONTENT), "")
        np.testing.assert_array_equal(file.read(1, 1000), CONTENT[1:1001])
        np.testing.assert_array_equal(file.read(7, 1000, passing=True), CONTENT[7:1007])
        assert starts(asked) == []
        answers = iter([s3_error("503 Slow Down", "SlowDown")])
        store.fault = lambda path: next(answers, None)
        np.testing.assert_array_equal(file.read(2, 1000), CONTENT[2:1002])
        assert starts(asked) == [2]
        np.testing.assert_array_equal(file.read(3, 1000), CONTENT[3:1003])
        assert starts(asked) == [2, 3]


def test_parts_that_do_not_come_straight_come_through_s3fs(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [1000, 1_000_000, 500, 900_000]
    with s3_store() as (_, options), serving() as server:
        layout = Layout.open("s3://corpus", options)
        layout.write_bytes("data/a", CONTENT.tobytes())
        file = StoredFile(layout, "data/a", len(CONTENT), "")
        way = _Way(Urls(server))
        monkeypatch.setattr(straight_ranges, "_way", lambda fs: way)
        for behaviour, first in (("", None), ("breaks off", 1007), ("busy", 7)):
            server.behaviour, way._rests_until = behaviour, 0.0
            found = [part.copy() for part in file.parts([*accumulate(sizes, initial=7)])]
            assert [len(part) for part in found] == sizes
            np.testing.assert_array_equal(np.concatenate(found), CONTENT[7 : 7 + sum(sizes)])
            assert starts(asked) == ([] if first is None else [first])
            asked.clear()
        with pytest.raises(CommitError, match="was committed with 3000000 bytes"):
            next(file.parts([*accumulate(sizes, initial=1_500_000)]))


@pytest.mark.parametrize(
    "odd",
    [
        {"requester_pays": True},
        {"version_aware": True},
        {"s3_additional_kwargs": {"SSECustomerAlgorithm": "AES256"}},
        {"client_kwargs": {"verify": False}},
        {"config_kwargs": {"proxies": {"http": "http://127.0.0.1:1"}}},
        {"unheard_of": 1},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_what_a_url_does_not_say_goes_through_s3fs(odd: dict[str, Any]) -> None:
    fs = fsspec.filesystem("s3", key="key", secret="hush", skip_instance_cache=True, **odd)
    fs.session = object()  # as after a request
    assert not can_go_straight(fs)
    assert not [*parts_straight(fs, "bucket/key", 0, [1], np.empty(1, np.uint8))]


def test_only_a_plain_s3fs_without_proxies_goes_straight(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = fsspec.filesystem("s3", key="key", secret="hush", skip_instance_cache=True)
    assert not can_go_straight(fs)  # no request has shown where it leads
    fs.session = object()
    monkeypatch.setattr(straight_ranges, "getproxies", dict)
    assert can_go_straight(fs)
    monkeypatch.setattr(straight_ranges, "getproxies", lambda: {"https": "http://proxy"})
    assert not can_go_straight(fs)
    assert not can_go_straight(fsspec.filesystem("memory"))
