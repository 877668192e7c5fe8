"""A bucket on loopback that delays its answers: a folder behind the S3 calls of a reader.

It answers GetObject with ranges, HeadObject and ListObjectsV2 over HTTP/1.1, a fixed time after the
request. The server is a process with a thread for each kept connection. It parses requests in a few
lines and sends files by sendfile, so that it uses little of the reader's CPU time. (moto uses more
than the reader itself, and http.server as much for a small object as for 2 MB.) The server avoids
the congestion control BBR, which some machines use by default: on loopback its timers take half of
the CPU time of server and client.
"""

from __future__ import annotations

import os
import re
import socket
import socketserver
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import psutil

BUCKET = "features"
LIST = '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{}</ListBucketResult>'
END, HEAD_BYTES = b"\r\n\r\n", 2**16
# TCP congestion control that every kernel has.
UNPACED = b"reno"
RANGE = re.compile(r"^Range: *bytes=(\d*)-(\d*)", re.IGNORECASE | re.MULTILINE)
STAMP, STAMP_HTTP = "2025-01-01T00:00:00.000Z", "Wed, 01 Jan 2025 00:00:00 GMT"


class _Answers(socketserver.BaseRequestHandler):
    """The answers of one connection.

    Args:
        place: Folder of the bucket.
        latency_s: Time before an answer.
    """

    request: socket.socket

    def __init__(self, place: Path, latency_s: float, *arguments: Any) -> None:
        self.place, self.latency_s = place, latency_s
        super().__init__(*arguments)

    def handle(self) -> None:
        """Answer requests until the client closes the connection."""
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        asked = b""
        with suppress(ConnectionError):
            while True:
                while END not in asked:
                    found = self.request.recv(HEAD_BYTES)
                    if not found:
                        return
                    asked += found
                head, _, asked = asked.partition(END)
                time.sleep(self.latency_s)
                self._answer(head.decode("latin-1"))

    def _answer(self, head: str) -> None:
        method, target, _ = head.split(" ", 2)
        url = urlsplit(target)
        key = unquote(url.path).strip("/").partition("/")[2]
        if key:
            self._object(method, self.place / key, RANGE.search(head))
        else:
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            found = self._list(query.get("prefix", ""), query.get("delimiter", ""))
            self._send(method, "200 OK", found)

    def _object(self, method: str, path: Path, asked: re.Match[str] | None) -> None:
        try:
            file = os.open(path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            self._send(method, "404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>")
            return
        try:
            known = os.fstat(file)
            if stat.S_ISDIR(known.st_mode):
                self._send(method, "404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>")
                return
            self._part(method, file, known.st_size, asked)
        finally:
            os.close(file)

    def _part(self, method: str, file: int, size: int, asked: re.Match[str] | None) -> None:
        first, last, status, where = 0, size - 1, "200 OK", ""
        if asked:
            if asked[1]:
                first, last = int(asked[1]), min(int(asked[2] or last), last)
            else:
                first = max(0, size - int(asked[2]))
            status, where = "206 Partial Content", f"Content-Range: bytes {first}-{last}/{size}\r\n"
        left = last - first + 1
        head = (
            f"HTTP/1.1 {status}\r\nContent-Length: {left}\r\nLast-Modified: {STAMP_HTTP}\r\n"
            f'ETag: "{size:032x}"\r\n{where}\r\n'
        )
        if method == "HEAD":
            left = 0
        # The kernel sends the header together with the body.
        self.request.sendall(head.encode(), socket.MSG_MORE if left else 0)
        while left:
            left -= os.sendfile(self.request.fileno(), file, last - left + 1, left)

    def _list(self, prefix: str, delimiter: str) -> bytes:
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
        return LIST.format(count + "".join(found)).encode()

    def _send(self, method: str, status: str, body: bytes) -> None:
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        self.request.sendall(head.encode() + (b"" if method == "HEAD" else body))


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads = True, True
    request_queue_size = 128

    def server_bind(self) -> None:
        """Set the congestion control before connections inherit it from this socket."""
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, UNPACED)
        super().server_bind()


@dataclass(frozen=True)
class SlowStore:
    """A running bucket.

    Args:
        uri: Address of the bucket.
        options: Storage options that open it.
        process: The server's process.
    """

    uri: str
    options: dict[str, Any]
    process: psutil.Process

    def cpu_s(self) -> float:
        """Return the CPU seconds of the server so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


@contextmanager
def slow_store(place: Path, latency_s: float) -> Iterator[SlowStore]:
    """Serve a folder as a bucket."""
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
