"""Server of one page for the browsers of this machine, protected from scripts of other sites. A
request must name this server by an address or by its own name, and must not come from another page:
another site can make a browser send requests here."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

from earmill.pipeline.common.errors import OutputError

LOOPBACK = "127.0.0.1"
SILENT_S = 10  # Seconds after which a silent connection is closed.
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def parse_place(text: str) -> tuple[str, int]:
    """Return host and port of `PORT` or `HOST:PORT`; without a host 127.0.0.1.

    >>> parse_place("8640"), parse_place("[::1]:0")
    (('127.0.0.1', 8640), ('::1', 0))
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 2**16) or host.count(":") == 1:
        raise ValueError(f"expected PORT or HOST:PORT, got {text!r}; 8640 is 127.0.0.1:8640")
    return host.strip("[]") or LOOPBACK, int(port)


def refusal(headers: Mapping[str, str], bound: str) -> str:
    """Return why a request is refused by a server that listens at `bound`; empty for an answer."""
    try:
        # Without the port, which a tunnel may change.
        host = (urlsplit(f"//{headers.get('Host', '')}").hostname or "").lower()
    except ValueError:
        host = ""
    if not _is_ours(host, bound):
        return f"this page is not served as {host or 'nothing'!r}: ask for it by its address"
    origin = headers.get("Origin")
    is_foreign = origin is not None and urlsplit(origin).netloc != headers.get("Host")
    from_page = headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
    if is_foreign or (from_page and headers.get("Sec-Fetch-Dest", "") != "document"):
        return "this page answers no other page"
    return ""


def _is_ours(host: str, bound: str) -> bool:
    """Return True for addresses and this machine's names; other names may resolve anywhere."""
    if host in ("localhost", bound.lower()):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return not _is_loopback(bound) and host in (socket.gethostname().lower(), socket.getfqdn())
    return address.is_loopback or not _is_loopback(bound)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class PageServer(ThreadingHTTPServer):
    """Serves the page that `show` got last, until it is closed; port 0 takes a free port."""

    def __init__(self, place: tuple[str, int], page: str) -> None:
        host, port = place
        self.host = host
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.show(page)
        try:
            super().__init__(place, _Handler)
        except OSError as error:
            raise OutputError(
                f"--page: cannot listen at {host}:{port}: {error.strerror or error}; give another "
                "port, or port 0 for a free one"
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self.server_port}/"
        self.is_private = _is_loopback(host)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True)

    def show(self, page: str) -> None:
        self.page = page.encode()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = SILENT_S
    server_version, sys_version = "earmill", ""
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        # Values of a repeated header are joined, so that the request is refused. Names are in title
        # case, as browsers write them.
        headers = {name.title(): ", ".join(self.headers.get_all(name, [])) for name in self.headers}
        if refused := refusal(headers, self.server.host):
            self._send(HTTPStatus.FORBIDDEN, f"{refused}\n".encode(), "text/plain")
        elif urlsplit(self.path).path != "/":
            self._send(HTTPStatus.NOT_FOUND, b"there is only /\n", "text/plain")
        else:
            self._send(HTTPStatus.OK, self.server.page, "text/html; charset=utf-8")

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **HEADERS}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because the terminal shows the job."""
