"""Small documents of a dataset: JSON as a dataclass, checked when it is read; Parquet as a table.

Tables are read by the calling thread alone. Arrow's own threads, to which
`pyarrow.parquet.read_table` and a pre-buffered `ParquetFile` hand a Python buffer, may release it
while the interpreter shuts down, and that ends the process with SIGABRT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ConfigDict, TypeAdapter, ValidationError

from earmill.pipeline.common.byte_streams import Range
from earmill.pipeline.common.text import alternatives
from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.storage import paths

if TYPE_CHECKING:
    from earmill.pipeline.storage.layout import Layout

T = TypeVar("T")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


class UnreadableVersionError(Exception):
    """A file has a layout version that this release does not read."""


class Strict:
    """Base of the dataclasses that are read: no conversions between types, no unknown fields."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")


def typed_json(kind: type[T], text: str | bytes) -> T:
    """Return the dataclass object of a JSON text; ValueError of one line if it does not fit."""
    try:
        return _adapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ValueError(f"{where}: {first['msg']}") from None


def versioned_json(kind: type[T], text: str | bytes) -> T:
    """Return `typed_json` of a dataclass with a `layout_version`; UnreadableVersionError if this
    release does not read the version."""
    version: Any = None
    try:
        found = typed_json(kind, text)
        version = found.layout_version  # type: ignore[attr-defined]
    except ValueError:
        # Perhaps a newer release wrote the text, which has other fields there.
        with suppress(ValueError):
            data = loads_json(text, max_chars=None)
            version = data.get("layout_version") if isinstance(data, dict) else None
        if version is None or paths.is_readable(version):
            raise
    if not paths.is_readable(version):
        readable = alternatives([*map(str, paths.READABLE_VERSIONS)])
        raise UnreadableVersionError(f"expected layout version {readable}, got {version}")
    return found


def read_table(layout: Layout, rel: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Return a small table of a dataset (rows, quarantine, index, plan), or some of its columns."""
    return table_of(layout.read_bytes(rel), columns)


def chunk_range(chunk: pq.ColumnChunkMetaData) -> Range:
    """Return the range of a column chunk with its dictionary."""
    starts = (chunk.data_page_offset, chunk.dictionary_page_offset)
    start = min(each for each in starts if each is not None)
    return start, start + chunk.total_compressed_size


def table_of(content: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the table of a Parquet file in memory, or some of its columns."""
    try:
        with pq.ParquetFile(
            pa.BufferReader(content), pre_buffer=False, page_checksum_verification=True
        ) as file:
            return file.read(columns=None if columns is None else list(columns), use_threads=False)
    # Arrow's class is also one of its errors about files; too little memory is no damage.
    except pa.ArrowMemoryError as error:
        raise MemoryError(str(error)) from error
