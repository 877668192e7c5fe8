"""The footer of a Parquet file, with a checksum that Parquet itself has not.

    PAR1 pages indexes  seal  footer length PAR1        seal: EMFC, CRC-32C of what follows it

Pages have checksums; a footer has none, and one with a flipped bit can end the process inside of
Arrow. So writers put a seal between indexes and footer, where no reader looks: the footer is found
from the end of the file, the rest from its start. Files of layout versions 1 and 2 have none.
"""

from __future__ import annotations

from pathlib import Path

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.storage.stored_file import StoredFile

MARK = b"EMFC"
SEAL_BYTES = len(MARK) + 4
MAGIC, LENGTH_BYTES = b"PAR1", 4
END_BYTES = LENGTH_BYTES + len(MAGIC)
# Of a first request; the footer of a shard of ten minutes and four streams has about 100 kB.
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
    """What the footer says.

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
