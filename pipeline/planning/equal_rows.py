"""Files of one listing whose bytes are the same: the first is computed, the others copy it.

Only files that may be equal are read, in three steps, each of them over what the one before left:
equal size, and on stores equal content tag; equal pieces, for files of this machine; equal sha256.
Eight bytes a row are held, and the names of the rows that are equal. Whole files only: of spans,
rows of tables and members of archives nothing is known before they are read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.common.byte_streams import sha256_of
from earmill.pipeline.common.errors import RowError
from earmill.pipeline.sources.base import EqualRow, Item, Source, is_local
from earmill.pipeline.storage.regular import open_regular

if TYPE_CHECKING:
    from earmill.pipeline.spec.job import JobSpec

# Kinds of sources whose rows are files.
OF_FILES = ("files", "manifest")
PIECE_BYTES = 4096
# Files that are asked for at a time.
FETCHED_ROWS = 256
# Row id to the one that it is equal to, and the sha256 of both.
Equal = dict[str, tuple[str, str]]
Places = dict[str, str]
Mask = NDArray[np.bool_]


def computes_equal_once(spec: JobSpec) -> bool:
    """Whether a job is to find equal files, and its rows are files."""
    return bool(spec.output.equal_files_once) and spec.source.kind in OF_FILES


def equal_rows(source: Source, items: Callable[[], Iterable[Item]]) -> Equal:
    """The rows that have the bytes of one before them.

    Args:
        source: Fetches them. items: All rows, each time that it is called.
    """
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
                continue  # told when it is extracted
            with stream:
                sha256 = sha256_of(stream)
            one = first.setdefault((item.size, sha256), item.row_id)
            if one != item.row_id:
                found[item.row_id] = one, sha256
    return found


def copying(items: Iterable[Item], equal: Equal, places: Places) -> Iterator[Item]:
    """The rows that are equal to others, each with where that one is.

    Args:
        places: Row ids of the others to their shards.
    """
    for item in items:
        if item.row_id in equal:
            row_id, sha256 = equal[item.row_id]
            yield replace(item, equal_to=EqualRow(places[row_id], row_id, sha256))


def _repeated(keys: Iterable[int | None]) -> Mask:
    """Which keys come more than once."""
    known, values = array("b"), array("q")
    for key in keys:
        known.append(key is not None)
        values.append(key or 0)
    is_key, found = np.frombuffer(known, np.bool_), np.frombuffer(values, np.int64)
    ordered = np.sort(found[is_key])
    again = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    return is_key & np.isin(found, again)


def _key(item: Item) -> int | None:
    """What equal files have in common, as listed; None where too little is known of one."""
    if not item.size or (item.start_s, item.end_s, item.part_of) != (None, None, None):
        return None
    if is_local(item.uri):
        return hash((item.size,))
    return None if item.etag is None else hash((item.size, item.etag))


def _piece(item: Item) -> int | None:
    """The same with a look at the middle and the end of a file of this machine."""
    if not is_local(item.uri):
        return _key(item)
    try:
        with open_regular(item.uri) as file:
            pieces = []
            for start in (item.size or 0) // 2, max(0, (item.size or 0) - PIECE_BYTES):
                file.seek(start)
                pieces.append(file.read(PIECE_BYTES))
    except OSError:
        return None  # told when it is extracted
    return hash((item.size, *pieces))
