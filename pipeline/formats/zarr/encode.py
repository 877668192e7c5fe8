"""Numbers into the chunks and objects that `formats.zarr.arrays` describes, byte for byte as zarr.

zarr's general path costs four times what its compressor does. Here an array of frames goes to the
compressor and what that gives to the file. Every byte is the one that zarr-python would write: a
test has both write the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import zstd
from numpy.typing import NDArray

from earmill.pipeline.formats.zarr import blosc_frames
from earmill.pipeline.formats.zarr.chunk_codecs import CRC
from earmill.pipeline.storage.stored_file import Bytes

ZSTD: dict[str, Any] = {"level": 3, "checksum": False}
# Both numbers of an index entry where no chunk is.
NO_CHUNK = np.iinfo(np.uint64).max


def write_frames(path: Path, chunks: Iterable[NDArray[Any]], places: int) -> None:
    """An object: chunks of frames of equal size, and where they lie; the last one of a stream may
    have fewer than there are places."""
    spans = np.full((places, 2), NO_CHUNK, "<u8")
    with path.open("wb") as file:
        for place, chunk in enumerate(chunks):
            at = file.tell()
            frame = blosc_frames.compress(chunk)
            file.write(frame.data)
            file.write(_checksum(frame))
            spans[place] = at, file.tell() - at
        file.write(_checked(spans.tobytes()))


def write_vector(path: Path, content: bytes) -> None:
    """The one chunk of a short array."""
    path.write_bytes(vector_chunk(content))


def vector_chunk(content: bytes) -> bytes:
    """The one chunk of a short array as it is written."""
    return _checked(bytes(zstd.compress(content, ZSTD["level"], ZSTD["checksum"])))


def vlen_utf8(texts: Sequence[str]) -> bytes:
    """How many, then each with its length before it; `chunk_codecs.strings` reads it."""
    parts = [len(texts).to_bytes(4, "little")]
    for text in texts:
        data = text.encode()
        parts += [len(data).to_bytes(4, "little"), data]
    return b"".join(parts)


def _checked(body: bytes) -> bytes:
    return body + _checksum(body)


def _checksum(body: bytes | Bytes) -> bytes:
    """Behind what is written: the last step of writing, hence the first of reading."""
    return google_crc32c.value(body).to_bytes(CRC.nbytes, "little")
