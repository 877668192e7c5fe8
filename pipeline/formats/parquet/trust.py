"""What the footer of a Parquet file may claim."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from earmill.pipeline.formats.parquet.long_rows import LongRows
from earmill.pipeline.formats.trust import Promise, refused

MB = 2**20
# Levels cost up to 4 bytes a value, and a page more than it holds where that cannot be compressed.
PARQUET_OVERHEAD = 4


def check_parquet(rel: str, file: pq.ParquetFile, long_rows: LongRows, promise: Promise) -> None:
    """Rows and columns of a Parquet file.

    Raises:
        CommitError: They are not what was promised.
    """
    rows = promise.rows + sum(long_rows.parts(row) - 1 for row in long_rows.frames)
    if file.metadata.num_rows != rows:
        raise refused(rel, f"expected {rows} rows, its footer claims {file.metadata.num_rows}")
    schema = file.schema_arrow
    for stream, (width, dtype) in promise.columns.items():
        wanted = pa.list_(pa.list_(pa.from_numpy_dtype(dtype), width))
        got = schema.field(stream).type if stream in schema.names else None
        if got != wanted:
            raise refused(rel, f"expected {wanted} for {stream}, its footer claims {got}")


def check_column(rel: str, file: pq.ParquetFile, group: int, stream: str, promise: Promise) -> None:
    """Size of one stream in one row group, as the footer claims it, before it is read.

    Raises:
        CommitError: The shard has less.
    """
    meta = file.metadata.row_group(group)
    path = f"{stream}.list.element.list.element"
    column = next(
        (c for c in map(meta.column, range(meta.num_columns)) if c.path_in_schema == path), None
    )
    if column is None:
        raise refused(rel, f"row group {group} has no column {path}")
    width, dtype = promise.columns[stream]
    limit = promise.frames[stream] * width + meta.num_rows
    nbytes = limit * (np.dtype(dtype).itemsize + PARQUET_OVERHEAD) + MB
    if column.num_values > limit or not 0 <= column.total_uncompressed_size <= nbytes:
        raise refused(
            rel,
            f"row group {group} claims {column.num_values} values of {stream} in "
            f"{column.total_uncompressed_size} bytes, the shard has {limit} at most",
        )
