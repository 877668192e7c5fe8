"""The cache of an interrupted listing, from which the next one goes on.

A source whose listing takes long, a request a row, keeps what it learnt of each file by the file's
own name and tag. A listing that is cut off is so repeated for the rest alone.

`KeptListing` keeps it in the output that the listing was for. It lies in a folder that begins with
a dot, as all unfinished work, until the plan is stored.
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
    """A place for small files under given names."""

    def get(self, name: str) -> bytes | None:
        """The content; None where nothing is kept."""

    def put(self, name: str, data: bytes) -> None:
        """Keep it, if that can be done."""


class NothingKept:
    """Every listing begins at the beginning."""

    def get(self, name: str) -> bytes | None:
        return None

    def put(self, name: str, data: bytes) -> None:
        """Forgotten at once."""


def name_of(file: str, stat: Mapping[str, Any], *how: object) -> str | None:
    """The name that what is known of a file is kept under; None where changes would not show.

    Args:
        stat: As `stat_fields` gives it.
        how: All else that the listing of the file depends on.
    """
    if stat["etag"] is None and stat["mtime"] is None:
        return None
    said = json.dumps([file, stat["etag"], stat["size"], stat["mtime"], *how], default=str)
    return hashlib.sha256(said.encode()).hexdigest()


def packed(value: Any) -> bytes:
    """Plain values as bytes."""
    return zlib.compress(json.dumps(value).encode())


def unpacked(data: bytes) -> Any:
    """What `packed` packed; None for what is damaged."""
    try:
        unzip = zlib.decompressobj()
        text = unzip.decompress(data, MOST_BYTES)
        return loads_json(text.decode(), max_chars=None) if unzip.eof else None
    except (zlib.error, ValueError):
        return None


FOLDER = ".listing"


@dataclass(frozen=True)
class KeptListing:
    """Small files of a listing, in an output.

    Args:
        layout: The output. One that cannot be written to keeps nothing; what it lacks is told when
            the job writes to it.
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
        """The plan is stored: nothing of it is needed any more."""
        with suppress(OSError, OutputError):
            self.layout.delete(FOLDER)
