"""A web server on loopback that answers with whole files and with ranges of them."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any


class _Ranges(BaseHTTPRequestHandler):
    """Files of a folder, whole or in ranges."""

    folder: Path

    def do_HEAD(self) -> None:
        self._answer(b"", self._content())

    def do_GET(self) -> None:
        content = self._content()
        if content is None:
            return self._answer(b"", None)
        wanted = self.headers.get("Range")
        if wanted is None:
            return self._answer(content, content)
        first, last = (int(n) for n in wanted.removeprefix("bytes=").split("-"))
        piece = content[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(piece)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.end_headers()
        self.wfile.write(piece)

    def _content(self) -> bytes | None:
        path = self.folder / self.path.lstrip("/")
        return path.read_bytes() if path.is_file() else None

    def _answer(self, body: bytes, content: bytes | None) -> None:
        self.send_response(404 if content is None else 200)
        self.send_header("Content-Length", str(len(content or b"")))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


class web_server:
    """A folder on loopback, with ranges."""

    def __init__(self, folder: Path) -> None:
        handler = type("Handler", (_Ranges,), {"folder": folder})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)

    def __enter__(self) -> str:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *args: object) -> None:
        self._server.shutdown()
        self._server.server_close()
