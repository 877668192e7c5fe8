"""Small Parquet tables out of bytes in memory, read by the calling thread alone.

Arrow's own threads may let go of a Python buffer late, even while the interpreter shuts down, and
that ends the process with SIGABRT ("terminate called without an active exception"). Both
`pyarrow.parquet.read_table` and a pre-buffered `ParquetFile` hand the buffer to such threads; a
linter rule keeps the former out of the code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq


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
