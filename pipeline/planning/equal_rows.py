"""Files of one listing with the same bytes: the first file is computed, the others are copies.

Candidates are found by equal size (on stores also equal content tag), then by equal pieces (local
files), then by equal sha256. Only whole files are compared: the bytes of spans, table rows and
archive members are not known before they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.common.byte_streams import open_regular, sha256_of
from earmill.pipeline.common.errors import RowError
from earmill.pipeline.sources.base import EqualRow, Item, Source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.backend import is_local

OF_FILES = ("files", "manifest")  # Kinds of sources in which a row is a file.
PIECE_BYTES = 4096
FETCHED_ROWS = 256  # Files that are fetched at a time.
# Row id to the id of the row that it equals, and the sha256 of both.
Equal = dict[str, tuple[str, str]]


def computes_equal_once(spec: JobSpec) -> bool:
    return bool(spec.output.equal_files_once) and spec.source.kind in OF_FILES


def equal_rows(source: Source, items: Callable[[], Iterable[Item]]) -> Equal:
    """Find the rows that have the bytes of an earlier row. Each call of `items` lists all rows."""
    maybe = _repeated(_key(item) for item in items())
    if not maybe.any():
        return {}
    pairs = zip(items(), maybe, strict=True)
    maybe = _repeated(_piece(item) if is_so else None for item, is_so in pairs)
    found: Equal = {}
    first: dict[tuple[int | None, str], str] = {}
    suspects = (item for item, is_so in zip(items(), maybe, strict=True) if is_so)
    while some := list(islice(suspects, FETCHED_ROWS)):
        for item, stream in source.fetch(some):
            if isinstance(stream, RowError):
                continue  # extraction will report it
            with stream:
                sha256 = sha256_of(stream)
            original = first.setdefault((item.size, sha256), item.row_id)
            if original != item.row_id:
                found[item.row_id] = original, sha256
    return found


def copying(items: Iterable[Item], equal: Equal, places: dict[str, str]) -> Iterator[Item]:
    """Yield the copies, each with its original's place; `places` are row ids to shards."""
    for item in items:
        if item.row_id in equal:
            row_id, sha256 = equal[item.row_id]
            yield replace(item, equal_to=EqualRow(places[row_id], row_id, sha256))


def _repeated(keys: Iterable[int | None]) -> NDArray[np.bool_]:
    cells = ((key is not None, key or 0) for key in keys)
    found = np.fromiter(cells, np.dtype([("is_key", np.bool_), ("key", np.int64)]))
    ordered = np.sort(found["key"][found["is_key"]])
    again = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    return found["is_key"] & np.isin(found["key"], again)


def _key(item: Item) -> int | None:
    """Return a hash of the facts that equal files share in a listing; None if too few are known."""
    parts = (item.start_s, item.end_s, item.part_of, item.variant)
    if not item.size or any(part is not None for part in parts):
        return None
    if is_local(item.uri):
        return hash((item.size,))
    return None if item.etag is None else hash((item.size, item.etag))


def _piece(item: Item) -> int | None:
    """Return a hash like `_key`, for a local file with bytes from its middle and its end."""
    if not is_local(item.uri):
        return _key(item)
    try:
        with open_regular(item.uri) as file:
            pieces = []
            for start in (item.size or 0) // 2, max(0, (item.size or 0) - PIECE_BYTES):
                file.seek(start)
                pieces.append(file.read(PIECE_BYTES))
    except OSError:
        return None  # extraction will report it
    return hash((item.size, *pieces))
