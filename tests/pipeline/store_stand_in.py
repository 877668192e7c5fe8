"""What stand-ins of object stores have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import count
from threading import Lock
from typing import Any

from werkzeug.wrappers import Request, Response


class StandIn(ABC):
    """A store behind a WSGI application.

    Attributes:
        objects: Name -> content and version.
        seen: Method and full path of each request.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.seen: list[str] = []
        self._versions, self._lock = count(1), Lock()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        request = Request(environ)
        self.seen.append(f"{request.method} {request.full_path}")
        return self._answer(request)(environ, start_response)

    @abstractmethod
    def _answer(self, request: Request) -> Response:
        """What the store says."""


def ranged(content: bytes, wanted: str | None, headers: dict[str, str]) -> Response:
    """The content, or the piece of it that a Range header asks for."""
    if wanted is None:
        return Response(content, headers=headers, mimetype="application/octet-stream")
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    start = int(first)
    if start >= len(content):
        return Response(status=416, headers={"Content-Range": f"bytes */{len(content)}"})
    piece = content[start : int(last) + 1 if last else None]
    headers["Content-Range"] = f"bytes {start}-{start + len(piece) - 1}/{len(content)}"
    return Response(piece, 206, headers=headers, mimetype="application/octet-stream")
