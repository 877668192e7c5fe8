"""A bucket on loopback that waits before it answers: a folder behind the S3 calls of a reader.

GetObject with ranges, HeadObject and ListObjectsV2; every answer comes a fixed time after its
request. It is a process of its own with a thread for each connection, and the kernel copies files
into sockets (sendfile), so that it takes little of the cores that the reader is measured on; a full
stand-in such as moto takes more of them than the reader.
"""

from __future__ import annotations

import re
import socketserver
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import psutil

BUCKET = "features"
LIST = '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{}</ListBucketResult>'
STAMP, STAMP_HTTP = "2025-01-01T00:00:00.000Z", "Wed, 01 Jan 2025 00:00:00 GMT"


class _Answers(BaseHTTPRequestHandler):
    """The answers of one connection.

    Args:
        place: Folder of the bucket. latency_s: Time before an answer.
    """

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, place: Path, latency_s: float, *arguments: Any) -> None:
        self.place, self.latency_s = place, latency_s
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """An object, or a list of them."""
        time.sleep(self.latency_s)
        url = urlsplit(self.path)
        key = unquote(url.path).strip("/").partition("/")[2]
        if key:
            self._object(self.place / key)
        else:
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            self._list(query.get("prefix", ""), query.get("delimiter", ""))

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def _object(self, file: Path) -> None:
        if not file.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        size = file.stat().st_size
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        first, last = 0, size - 1
        if asked and asked[1]:
            first, last = int(asked[1]), min(int(asked[2] or last), last)
        elif asked:
            first = max(0, size - int(asked[2]))
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("Last-Modified", STAMP_HTTP)
        self.send_header("ETag", f'"{size:032x}"')
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.end_headers()
        if self.command == "GET" and first <= last:
            with file.open("rb") as content:
                self.connection.sendfile(content, first, last - first + 1)

    def _list(self, prefix: str, delimiter: str) -> None:
        folders, found = set(), []
        for file in sorted(path for path in self.place.rglob("*") if path.is_file()):
            key = file.relative_to(self.place).as_posix()
            if not key.startswith(prefix):
                continue
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if cut:
                folders.add(prefix + head + cut)
                continue
            found.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{STAMP}</LastModified>"
                f"<ETag>&quot;0&quot;</ETag><Size>{file.stat().st_size}</Size></Contents>"
            )
        found += [
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
            for name in sorted(folders)
        ]
        count = f"<KeyCount>{len(found)}</KeyCount><IsTruncated>false</IsTruncated>"
        self._answer(200, LIST.format(count + "".join(found)).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads = True, True
    request_queue_size = 128


@dataclass(frozen=True)
class SlowStore:
    """A bucket that is up.

    Args:
        uri: Its address. options: To open it. process: Its server.
    """

    uri: str
    options: dict[str, Any]
    process: psutil.Process

    def cpu_s(self) -> float:
        """CPU seconds of the server so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def slow_store(place: Path, latency_s: float) -> Iterator[SlowStore]:
    """A bucket that holds what a folder does."""
    command = [sys.executable, "-m", "benchmarks.slow_store", str(place), str(latency_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            options = {"key": "user", "secret": "secret", "endpoint_url": url}
            yield SlowStore(f"s3://{BUCKET}", options, psutil.Process(server.pid))
        finally:
            server.terminate()


if __name__ == "__main__":
    with _Server(
        ("127.0.0.1", 0), partial(_Answers, Path(sys.argv[1]), float(sys.argv[2]))
    ) as made:
        print(made.server_address[1], flush=True)
        made.serve_forever()
