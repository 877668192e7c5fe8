"""A cache of listings in the output of a job, so that an interrupted listing continues.

A source whose listing takes a request for each file caches what it learnt of a file, by the name
and the tag of the file. A listing that was interrupted is repeated for the other files only. The
cache is a folder that begins with a dot, until the plan is stored.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.storage.layout import Layout

MOST_BYTES = 1 << 28
FOLDER = ".listing"


class ListingCache:
    """JSON values by name, cached in an output.

    If the output cannot be written, nothing is cached; the error is raised when the job writes.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def get(self, name: str) -> Any:
        """Return a cached value; None if there is none or it is damaged."""
        with suppress(OSError, OutputError, zlib.error, ValueError):
            unzip = zlib.decompressobj()
            text = unzip.decompress(self._layout.read_bytes(f"{FOLDER}/{name}"), MOST_BYTES)
            return loads_json(text.decode(), max_chars=None) if unzip.eof else None
        return None

    def put(self, name: str, value: Any) -> None:
        with suppress(OSError, OutputError):
            data = zlib.compress(json.dumps(value).encode())
            self._layout.write_bytes(f"{FOLDER}/{name}", data)

    def forget(self) -> None:
        """Delete the cache, after the plan is stored."""
        with suppress(OSError, OutputError):
            self._layout.delete(FOLDER)


def cache_name(file: str, stat: Mapping[str, Any], *how: object) -> str | None:
    """Return the name of the cached value of a file; None if a change of the file cannot be seen.

    `how` is everything else that the listing of the file depends on.
    """
    if stat["etag"] is None and stat["mtime"] is None:
        return None
    facts = json.dumps([file, stat["etag"], stat["size"], stat["mtime"], *how], default=str)
    return hashlib.sha256(facts.encode()).hexdigest()
