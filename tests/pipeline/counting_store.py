"""A web server on loopback that counts which bytes of its files it gave, and how often."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np


class Store(ThreadingHTTPServer):
    """Files in memory with ranges, etags and a listing; counts every byte that it gives."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.files: dict[str, bytes] = {}
        self.given: dict[str, np.ndarray] = {}
        self.requests: Counter[str] = Counter()
        self.fail = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave as they like."""

    def put(self, name: str, content: bytes) -> None:
        self.files[name] = content
        self.given[name] = np.zeros(len(content), np.int32)

    def forget(self) -> None:
        """Count from zero."""
        self.requests.clear()
        for counts in self.given.values():
            counts[:] = 0

    @property
    def bytes_given(self) -> int:
        return sum(int(counts.sum()) for counts in self.given.values())


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Store

    def do_GET(self) -> None:
        name = self.path.strip("/").removeprefix("set/")
        if self.path.strip("/") == "set":
            links = "".join(f'<a href="/set/{name}">x</a>' for name in self.server.files)
            return self._answer(200, links.encode(), {"Content-Type": "text/html"})
        content = self.server.files.get(name)
        if content is None:
            return self._answer(404, b"", {})
        self.server.requests[self.command] += 1
        headers = {"ETag": f'"{hash(content):x}"', "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            return self._answer(200, content, headers)
        if self.server.fail:
            self.server.fail -= 1
            return self._answer(503, b"", {})
        wanted = self.headers.get("Range")
        first, last = 0, len(content) - 1
        if wanted is not None:
            first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
            last = min(last, len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.server.given[name][first : last + 1] += 1
        return self._answer(200 if wanted is None else 206, content[first : last + 1], headers)

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Silent."""


@contextmanager
def served() -> Iterator[tuple[Store, str]]:
    store = Store()
    store.daemon_threads = True
    thread = threading.Thread(target=store.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield store, f"http://127.0.0.1:{store.server_port}/set"
    finally:
        store.shutdown()
        thread.join()
        store.server_close()
