"""What every source is: a list of items, and a way to open their bytes. Nothing else.

A source never decodes and never decides; it names rows, says what is known about them before
reading, and hands out seekable byte streams. A row whose bytes cannot be had is handed out as a
`RowError` in its place, so that one missing object costs one row. Whoever takes a stream closes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import EarmillError, RowError, SourceError

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Item:
    """One row of a corpus, before anything of it was read.

    Args:
        row_id: Unique and stable name of the row.
        uri: Where its bytes are.
        start_s: Start of the span in seconds; the beginning when None.
        end_s: End of the span in seconds; the end when None.
        etag: The store's own content tag, if it has one.
        size: Bytes, if known.
        mtime: Modification time as seconds since the epoch, if known.
        seconds: Estimated duration; for planning only.
        extra: Columns carried through to the output.
        position: Row number inside the source.
    """

    row_id: str
    uri: str
    start_s: float | None = None
    end_s: float | None = None
    etag: str | None = None
    size: int | None = None
    mtime: float | None = None
    seconds: float | None = None
    extra: Mapping[str, Scalar] = field(default_factory=dict)
    position: int = 0


Fetched = tuple[Item, BinaryIO | RowError]


class Source(Protocol):
    """A corpus."""

    def items(self) -> Iterator[Item]:
        """Every row, in a stable order; SourceError when there is none."""

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        """The items in their order, each with a seekable stream or its RowError."""

    def describe(self) -> dict[str, Any]:
        """Where the rows come from, for provenance; holds no credentials."""


def is_local(uri: str) -> bool:
    """Whether a uri is a plain path, with no protocol and no fsspec chain."""
    return "://" not in uri and "::" not in uri


def filesystem(uri: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """The filesystem of a uri and the path inside it; plain paths are taken literally."""
    if is_local(uri):
        fs = LocalFileSystem()
        return fs, fs._strip_protocol(uri)
    found: tuple[Any, str] = fsspec.core.url_to_fs(uri, **(storage_options or {}))
    return found


def public_uri(fs: Any, path: str) -> str:
    """The uri other processes can open: absolute, and a plain path for local files."""
    return path if isinstance(fs, LocalFileSystem) else str(fs.unstrip_protocol(path))


@contextmanager
def source_errors(uri: str) -> Iterator[None]:
    """Turn whatever a filesystem raises into one SourceError line.

    fsspec backends raise their own classes (botocore, aiohttp, asyncio), so all of them are caught.
    """
    try:
        yield
    except EarmillError:
        raise
    except FileNotFoundError as error:
        raise SourceError(f"source {uri}: not found; check source.uri") from error
    except Exception as error:
        raise SourceError(f"source {uri}: cannot be read: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """Class and text of an exception on one line, with no more than 300 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def stat_fields(info: Mapping[str, Any]) -> dict[str, Any]:
    """etag, size and mtime out of an fsspec info mapping, whichever backend wrote it."""
    etag = info.get("ETag") or info.get("etag")
    modified = info.get("mtime") or info.get("LastModified") or info.get("updated")
    size = info.get("size")
    return {
        "etag": str(etag).strip('"') if etag else None,
        "size": int(size) if size is not None else None,
        "mtime": _timestamp(modified),
    }


def _timestamp(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    as_seconds = getattr(value, "timestamp", None)
    return float(as_seconds()) if as_seconds is not None else None
