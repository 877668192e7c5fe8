"""Tags around the audio of a file: ID3 (versions 1 and 2) and APE (version 2).

Taggers put them around files of any format. Tags in front are skipped for every format. Tags behind
the audio matter only where nothing else says where it ends.
Layouts: id3.org, ID3 tag version 2.4.0, 3.1 and 3.4; wiki.hydrogenaud.io, APEv2 specification.
"""

from __future__ import annotations

from typing import BinaryIO

from earmill.pipeline.audio.containers.base import MAX_PARTS, read_at, uint

ID3V1_BYTES = 128
APE_BYTES = 32
APE = b"APETAGEX"
APE_HAS_HEADER = 1 << 31
ID3V2_BYTES = 10
ID3V2_HAS_FOOTER = 0x10


def skip_tags(stream: BinaryIO, position: int = 0) -> int:
    """Return the byte behind all tags that start at `position`; `position` itself without any."""
    for _ in range(MAX_PARTS):
        size = _tag_bytes(read_at(stream, position, APE_BYTES))
        if not size:
            break
        position += size
    return position


def audio_end(stream: BinaryIO, nbytes: int) -> int:
    """Return the byte at which the tags at the end of a file start; `nbytes` without any."""
    for _ in range(MAX_PARTS):
        tail = read_at(stream, max(0, nbytes - ID3V1_BYTES), min(ID3V1_BYTES, nbytes))
        if len(tail) == ID3V1_BYTES and tail[:3] == b"TAG":
            size = ID3V1_BYTES
        elif tail[-APE_BYTES:-24] == APE:
            footer = tail[-APE_BYTES:]
            size = uint(footer[12:16], "little")
            size += APE_BYTES if uint(footer[20:24], "little") & APE_HAS_HEADER else 0
        elif tail[-ID3V2_BYTES:-7] == b"3DI":
            size = 2 * ID3V2_BYTES + _seven_bits(tail[-4:])
        else:
            return nbytes
        if not 0 < size <= nbytes:
            return nbytes
        nbytes -= size
    return nbytes


def _tag_bytes(head: bytes) -> int:
    """Bytes of the tag that starts with these; 0 where none does."""
    if head[:3] == b"ID3" and len(head) >= ID3V2_BYTES:
        footer = ID3V2_BYTES if head[5] & ID3V2_HAS_FOOTER else 0
        return ID3V2_BYTES + _seven_bits(head[6:10]) + footer
    if head[:8] == APE and len(head) == APE_BYTES:
        return APE_BYTES + uint(head[12:16], "little")
    return ID3V1_BYTES if head[:3] == b"TAG" else 0


def _seven_bits(raw: bytes) -> int:
    """A size of ID3v2: four groups of seven bits."""
    return raw[0] << 21 | raw[1] << 14 | raw[2] << 7 | raw[3]
