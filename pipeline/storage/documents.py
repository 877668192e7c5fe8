"""JSON of the output as the dataclass that wrote it: every field of its type, or one error.

What lies in an output may have been damaged or made by others. A value of the wrong type or an
unknown format must be found where the file is read, not where the value is used.

Small Parquet tables out of bytes in memory, read by the calling thread alone.

Arrow's own threads may let go of a Python buffer late, even while the interpreter shuts down, and
that ends the process with SIGABRT ("terminate called without an active exception"). Both
`pyarrow.parquet.read_table` and a pre-buffered `ParquetFile` hand the buffer to such threads; a
linter rule keeps the former out of the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ConfigDict, TypeAdapter, ValidationError

from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.storage import paths

T = TypeVar("T")


class UnreadableVersionError(Exception):
    """A file of another layout version than those that this release reads."""


class Strict:
    """Base of the dataclasses that are read: no conversions between types, no unknown fields."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")


def typed_json(kind: type[T], text: str | bytes) -> T:
    """The object of a dataclass that the JSON text describes.

    Raises:
        ValueError: In one line, which value is wrong: not JSON, a field missing, unknown or of
            another type.
    """
    try:
        return _adapter(kind).validate_json(text)  # type: ignore[arg-type]
    except ValidationError as err:
        first = err.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ValueError(f"{where}: {first['msg']}") from None


def versioned_json(kind: type[T], text: str | bytes) -> T:
    """The same of a dataclass with a `layout_version`, which must be one that is read here.

    Raises:
        ValueError: As above. UnreadableVersionError: It is of another version.
    """
    try:
        found = typed_json(kind, text)
        version = found.layout_version  # type: ignore[attr-defined]
    except ValueError:
        version = _version(text)
        if version is None or paths.is_readable(version):
            raise
    if not paths.is_readable(version):
        raise UnreadableVersionError(
            f"expected layout version {paths.readable_versions()}, got {version}"
        )
    return found


def _version(text: str | bytes) -> object:
    """What a text that is no such object says of its version; None where it says nothing."""
    try:
        data = loads_json(text, max_chars=None)
    except ValueError:
        return None
    return data.get("layout_version") if isinstance(data, dict) else None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class Readable(Protocol):
    """Where tables lie; `earmill.pipeline.storage.layout.Layout` is one."""

    def read_bytes(self, rel: str) -> bytes: ...


def read_table(layout: Readable, rel: str, columns: Sequence[str] | None = None) -> pa.Table:
    """A small table of a dataset (rows, quarantine, index, plan), or some of its columns."""
    return table_of(layout.read_bytes(rel), columns)


def table_of(content: bytes, columns: Sequence[str] | None = None) -> pa.Table:
    """A whole Parquet file that is in memory, or some of its columns.

    Invariants:
        No other thread ever holds `content`.
    Raises:
        MemoryError: There is too little for the table.
    """
    try:
        with pq.ParquetFile(
            pa.BufferReader(content), pre_buffer=False, page_checksum_verification=True
        ) as file:
            return file.read(columns=None if columns is None else list(columns), use_threads=False)
    # Arrow's class is one of its errors about files as well; too little memory is no damage.
    except pa.ArrowMemoryError as error:
        raise MemoryError(str(error)) from error
