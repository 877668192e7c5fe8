"""Create-if-absent in the hard cases: racing processes, and what real S3 stores may answer."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pipeline import putonce
from pipeline.errors import OutputError
from pipeline.layout import Layout

RACERS = 16


def test_exclusive_create_without_links_has_one_winner_too(tmp_path: Path) -> None:
    gate = threading.Barrier(RACERS)

    def race(racer: int) -> bool:
        gate.wait()
        return putonce._create_exclusive(str(tmp_path / "x"), bytes([racer]) * 1000)

    with ThreadPoolExecutor(RACERS) as pool:
        won = list(pool.map(race, range(RACERS)))
    assert won.count(True) == 1
    assert (tmp_path / "x").read_bytes() == bytes([won.index(True)]) * 1000


def test_one_of_many_processes_wins_each_name(tmp_path: Path) -> None:
    code = (
        "import sys; from pipeline.putonce import create_local\n"
        "sys.stdin.readline()\n"
        "for n in range(200):\n"
        "    print(int(create_local(f'{sys.argv[1]}/{n}', sys.argv[2].encode() * 999)))\n"
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
            self._answer(200, "<DeleteResult></DeleteResult>")

        def do_GET(self) -> None:
            self._answer(200, "<ListBucketResult></ListBucketResult>")

        def do_HEAD(self) -> None:
            self._answer(200, "")

        def _answer(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    options = {
        "key": "k",
        "secret": "s",
        "endpoint_url": f"http://127.0.0.1:{server.server_port}",
        "skip_instance_cache": True,
    }
    try:
        yield Layout.open("s3://bucket/out", options), asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_conflict_is_asked_again_and_can_be_won() -> None:
    with scripted_s3([(409, "ConditionalRequestConflict"), (200, "")]) as (layout, asked):
        assert layout.put_if_absent("commits/00000.json", b"x") is True
    assert asked == ["*", "*"]


def test_a_refusal_without_details_is_a_lost_race() -> None:
    with scripted_s3([(409, "OperationAborted"), (412, "PreconditionFailed")]) as (layout, asked):
        assert layout.put_if_absent("commits/00000.json", b"x") is False
    assert asked == ["*", "*"]


def test_endless_conflicts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(putonce, "CONFLICT_WAITS_S", (0.0, 0.0))
    with scripted_s3([(409, "ConditionalRequestConflict")]) as (layout, asked):
        with pytest.raises(OutputError, match="409 Conflict after 3 tries"):
            layout.put_if_absent("commits/00000.json", b"x")
    assert len(asked) == 3


def test_other_failures_are_raised() -> None:
    with scripted_s3([(403, "AccessDenied")]) as (layout, _), pytest.raises(PermissionError):
        layout.put_if_absent("commits/00000.json", b"x")


def test_a_store_that_ignores_the_condition_is_found_out_before_work() -> None:
    with scripted_s3([(200, "")]) as (layout, _):
        with pytest.raises(OutputError, match="honours If-None-Match"):
            layout.check_writable()
