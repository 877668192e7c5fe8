"""The members of a tar that may be damaged or made to harm.

`tarfile` ends at the first block it cannot read as if the archive ended there, and takes a header
of any claimed size into memory. Both are errors here.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from typing import IO, Any

MB = 2**20
# Of one header, or of what is read of a member at once.
MAX_HELD_BYTES = MB
# WebDataset: the sample of a member is its name up to the first dot behind the last slash.
MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)


def tar_members(stream: IO[bytes]) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Every member with the tar to extract it from, as long as the iteration lasts.

    Raises:
        tarfile.TarError: This is no uncompressed tar, or it is damaged.
    """
    bounded: Any = BoundedReads(stream)
    with tarfile.open(fileobj=bounded, mode="r:", errors="surrogateescape") as tar:
        remembered: list[tarfile.TarInfo] = vars(tar)["members"]
        while (member := tar.next()) is not None:
            remembered.clear()
            if member.size < 0:  # the next header would be one that was read before
                raise tarfile.ReadError(f"a member claims to have {member.size:,} bytes")
            yield tar, member
        stream.seek(tar.offset)
        block = stream.read(tarfile.BLOCKSIZE)
        if block != bytes(tarfile.BLOCKSIZE):
            what = "is cut off" if len(block) < tarfile.BLOCKSIZE else "has a damaged header"
            raise tarfile.ReadError(f"it {what} at byte {tar.offset:,}")


class BoundedReads:
    """A tar's file for `tarfile`, which reads as many bytes at once as a header claims.

    Args:
        stream: The file; its position is where the tar begins.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable

    def read(self, size: int) -> bytes:
        """So many bytes, never more than `MAX_HELD_BYTES` at once."""
        if not 0 <= size <= MAX_HELD_BYTES:
            raise tarfile.ReadError(f"a header claims to have {size:,} bytes")
        return self._stream.read(size)
