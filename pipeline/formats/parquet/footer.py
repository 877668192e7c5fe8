"""The footer of a Parquet file: its checksum, which Parquet has not, and what it may claim.

    PAR1 pages indexes  seal  footer length PAR1        seal: EMFC, CRC-32C of the rest

Pages have checksums; a footer has none, and one with a flipped bit can end the process inside of
Arrow. So writers put a seal between indexes and footer, where no reader looks: the footer is found
from the end of the file, the rest from its start. Files of layout versions 1 and 2 have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.format import Promise, refused
from earmill.pipeline.formats.parquet.cells import CellEncoding, LongRows, cell_encoding
from earmill.pipeline.storage.stored_file import StoredFile

MB = 2**20


def check_parquet(rel: str, file: pq.ParquetFile, long_rows: LongRows, promise: Promise) -> None:
    """Check rows and columns of a Parquet file.

    Raises:
        CommitError: They are not what was committed.
    """
    rows = promise.rows + sum(long_rows.parts(row) - 1 for row in long_rows.frames)
    if file.metadata.num_rows != rows:
        raise refused(rel, f"expected {rows} rows, its footer claims {file.metadata.num_rows}")
    schema = file.schema_arrow
    for stream, (width, dtype) in promise.columns.items():
        got = schema.field(stream) if stream in schema.names else None
        form = cell_encoding(got.type if got is not None else None)
        wanted = form.field(stream, width, dtype)
        if got is None or got.type != wanted.type or form.stored(got) != (width, dtype):
            claim = "nothing" if got is None else f"{got.type} {got.metadata or ''}".strip()
            raise refused(
                rel,
                f"expected {wanted.type} for {stream}, {width} columns of {dtype}, its footer "
                f"claims {claim}",
            )


def column_encodings(
    file: pq.ParquetFile, streams: Iterable[str]
) -> dict[str, tuple[CellEncoding, int]]:
    """Return the encoding of each stream, and the number of its column in the footer.

    Raises:
        CommitError: A stream has no column.
    """
    paths = {file.schema.column(number).path: number for number in range(len(file.schema))}
    schema, found = file.schema_arrow, {}
    for stream in streams:
        form = cell_encoding(schema.field(stream).type)
        if form.leaf(stream) not in paths:
            raise CommitError(f"the file has no column {form.leaf(stream)}: run `earmill verify`")
        found[stream] = form, paths[form.leaf(stream)]
    return found


def check_column(
    rel: str,
    footer: pq.FileMetaData,
    group: int,
    stream: str,
    column_of: tuple[CellEncoding, int],
    promise: Promise,
) -> None:
    """Check the size that the footer claims for a stream in a row group, before it is read.

    Raises:
        CommitError: The claimed size is larger than the shard.
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


MARK = b"EMFC"
SEAL_BYTES = len(MARK) + 4
MAGIC, LENGTH_BYTES = b"PAR1", 4
END_BYTES = LENGTH_BYTES + len(MAGIC)
# First request; the footer of a shard of ten minutes and four streams has about 100 kB.
TAIL_BYTES = 2**18


def seal(path: Path) -> None:
    """Put a seal before the footer of a file that was just written."""
    with path.open("r+b") as file:
        file.seek(-END_BYTES, 2)
        start = -END_BYTES - int.from_bytes(file.read(LENGTH_BYTES), "little")
        file.seek(start, 2)
        footer = file.read()
        file.seek(start, 2)
        file.write(_seal_of(footer) + footer)


def read_footer(file: StoredFile) -> pq.FileMetaData:
    """Read and check the footer.

    Raises:
        CommitError: It is not the one that was written.
    """
    tail = file.read(max(0, file.nbytes - TAIL_BYTES), min(TAIL_BYTES, file.nbytes)).tobytes()
    size = int.from_bytes(tail[-END_BYTES:-LENGTH_BYTES], "little") + END_BYTES
    if not tail.endswith(MAGIC) or size > file.nbytes:
        raise CommitError(
            f"{file.layout.url(file.rel)}: the end is not that of a Parquet file, it is damaged: "
            "run `earmill verify`"
        )
    if size + SEAL_BYTES > len(tail) < file.nbytes:
        wanted = min(size + SEAL_BYTES, file.nbytes)
        tail = file.read(file.nbytes - wanted, wanted).tobytes()
    found, footer = tail[-size - SEAL_BYTES : -size], tail[-size:]
    if found.startswith(MARK) and found != _seal_of(footer):
        raise CommitError(
            f"{file.layout.url(file.rel)}: the CRC-32C of the footer is not that of its bytes: "
            "run `earmill verify`"
        )
    return pq.read_metadata(pa.BufferReader(MAGIC + footer))


def _seal_of(footer: bytes) -> bytes:
    return MARK + google_crc32c.value(footer).to_bytes(4, "little")
