"""What the footer of a Parquet file may claim."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow.parquet as pq

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.parquet.forms import Form, form_of
from earmill.pipeline.formats.parquet.long_rows import LongRows
from earmill.pipeline.formats.trust import Promise, refused

MB = 2**20


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
        got = schema.field(stream) if stream in schema.names else None
        form = form_of(got.type if got is not None else None)
        wanted = form.field(stream, width, dtype)
        if got is None or got.type != wanted.type or form.stored(got) != (width, dtype):
            claim = "nothing" if got is None else f"{got.type} {got.metadata or ''}".strip()
            raise refused(
                rel,
                f"expected {wanted.type} for {stream}, {width} columns of {dtype}, its footer "
                f"claims {claim}",
            )


def leaf_columns(file: pq.ParquetFile, streams: Iterable[str]) -> dict[str, tuple[Form, int]]:
    """The form of each stream, and the number of its column in the footer.

    Raises:
        CommitError: There is none.
    """
    paths = {file.schema.column(number).path: number for number in range(len(file.schema))}
    schema, found = file.schema_arrow, {}
    for stream in streams:
        form = form_of(schema.field(stream).type)
        if form.leaf(stream) not in paths:
            raise CommitError(f"the file has no column {form.leaf(stream)}: run `earmill verify`")
        found[stream] = form, paths[form.leaf(stream)]
    return found


def check_column(
    rel: str,
    footer: pq.FileMetaData,
    group: int,
    stream: str,
    column_of: tuple[Form, int],
    promise: Promise,
) -> None:
    """Size of one stream in one row group, as the footer claims it, before it is read.

    Raises:
        CommitError: The shard has less.
    """
    form, number = column_of
    meta = footer.row_group(group)
    column = meta.column(number)
    width, dtype = promise.columns[stream]
    limit, nbytes = form.limits(meta.num_rows, promise.frames[stream], width, dtype)
    if column.num_values > limit or not 0 <= column.total_uncompressed_size <= nbytes + MB:
        raise refused(
            rel,
            f"row group {group} claims {column.num_values} values of {stream} in "
            f"{column.total_uncompressed_size} bytes, the shard has {limit} at most",
        )
