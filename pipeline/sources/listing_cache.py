"""A cache of listings, so that an interrupted listing continues.

A source whose listing takes a request for each file caches what it learnt of a file, by the name
and the tag of the file. A listing that was interrupted is repeated for the other files only.

`KeptListing` caches in the output of the job, in a folder that begins with a dot, until the plan is
stored.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.storage.layout import Layout

MOST_BYTES = 1 << 28


class Kept(Protocol):
    """The interface of a place for small files, by name."""

    def get(self, name: str) -> bytes | None:
        """Return the content; None if nothing is cached."""

    def put(self, name: str, data: bytes) -> None:
        """Cache the content, if possible."""


class NothingKept:
    """A cache that keeps nothing."""

    def get(self, name: str) -> bytes | None:
        return None

    def put(self, name: str, data: bytes) -> None:
        """Keep nothing."""


def name_of(file: str, stat: Mapping[str, Any], *how: object) -> str | None:
    """Return the name of the cache entry of a file; None if a change of the file cannot be seen.

    Args:
        file: The file.
        stat: Result of `stat_fields`.
        how: Everything else that the listing of the file depends on.
    """
    if stat["etag"] is None and stat["mtime"] is None:
        return None
    said = json.dumps([file, stat["etag"], stat["size"], stat["mtime"], *how], default=str)
    return hashlib.sha256(said.encode()).hexdigest()


def packed(value: Any) -> bytes:
    """Compress plain values to bytes."""
    return zlib.compress(json.dumps(value).encode())


def unpacked(data: bytes) -> Any:
    """Return the values of `packed`; None if the bytes are damaged."""
    try:
        unzip = zlib.decompressobj()
        text = unzip.decompress(data, MOST_BYTES)
        return loads_json(text.decode(), max_chars=None) if unzip.eof else None
    except (zlib.error, ValueError):
        return None


FOLDER = ".listing"


@dataclass(frozen=True)
class KeptListing:
    """Small files of a listing, cached in an output.

    Args:
        layout: The output. If it cannot be written, nothing is cached; the error is raised when the
            job writes to it.
    """

    layout: Layout

    def get(self, name: str) -> bytes | None:
        with suppress(OSError, OutputError):
            return self.layout.read_bytes(f"{FOLDER}/{name}")
        return None

    def put(self, name: str, data: bytes) -> None:
        with suppress(OSError, OutputError):
            self.layout.write_bytes(f"{FOLDER}/{name}", data)

    def forget(self) -> None:
        """Delete the cache, after the plan is stored."""
        with suppress(OSError, OutputError):
            self.layout.delete(FOLDER)
