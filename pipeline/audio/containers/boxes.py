"""MP4, Matroska (WebM) and ASF (WMA): the length that the file states, and its true length.

FFmpeg decodes the rest of a cut file without an error. Of joined files it decodes the first alone,
or the others with their delay. All three containers state how many bytes belong to them, in boxes,
a segment or a file size; `Probe.stop` is the byte at which another file of the kind begins. Not
found: a fragmented MP4 or a live Matroska cut exactly between two fragments.
Layouts: ISO/IEC 14496-12 4.2, RFC 8794, Microsoft's ASF specification 3.2.
"""

from __future__ import annotations

from typing import BinaryIO

from earmill.pipeline.audio.containers.base import Probe, audio_end, read_at, uint

# First boxes of MP4 and of the QuickTime files it comes from.
MP4_FIRST = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot", b"styp"})
# A fragmented file has two boxes a fragment.
MAX_BOXES = 1 << 20
EBML = b"\x1a\x45\xdf\xa3"
SEGMENT = b"\x18\x53\x80\x67"
ASF = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
ASF_FILE = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
ASF_MAX_OBJECTS = 256


def is_mp4(head: bytes) -> bool:
    return head[4:8] in MP4_FIRST


def probe_mp4(stream: BinaryIO, nbytes: int) -> Probe:
    """Probe a list of boxes (size, name, payload); samples cannot be decoded without `moov`."""
    position, names = 0, set()
    for _ in range(MAX_BOXES):
        head = read_at(stream, position, 16)
        if len(head) < 8:
            break
        size, name = uint(head[:4], "big"), head[4:8]
        size = uint(head[8:], "big") if size == 1 else size
        if size == 0:  # to the end
            names.add(name)
            break
        if size < 8 or position + size > nbytes:
            if position == audio_end(stream, nbytes):
                break
            got = nbytes - position
            return Probe("mp4", damage=f"box {name!a}: expected {size} bytes, got {got}")
        if name == b"ftyp" and {b"ftyp", b"moov"} <= names:
            return Probe("mp4", stop=position)
        names.add(name)
        position += size
    return Probe("mp4", damage=None if b"moov" in names else f"no moov box in {nbytes} bytes")


def probe_matroska(stream: BinaryIO, nbytes: int) -> Probe:
    """Probe an EBML header and the one segment behind it, which holds everything."""
    position = 4
    size, width = _vint(read_at(stream, position, 8))
    position += width + (size or 0)
    if read_at(stream, position, 4) != SEGMENT:
        return Probe("matroska", damage="no segment behind the header")
    size, width = _vint(read_at(stream, position + 4, 8))
    position += 4 + width
    if size is None:
        return Probe("matroska")
    if position + size <= nbytes:
        joined = read_at(stream, position + size, 4) == EBML
        return Probe("matroska", stop=position + size if joined else None)
    return Probe("matroska", damage=f"expected {size} bytes of segment, got {nbytes - position}")


def _vint(raw: bytes) -> tuple[int | None, int]:
    """Return an EBML size and its width; None for a size that the writer did not know."""
    if not raw or raw[0] == 0:
        return 0, 1
    width = 9 - raw[0].bit_length()
    value = uint(raw[:width], "big") & ((1 << (7 * width)) - 1)
    return (None if value == (1 << (7 * width)) - 1 else value), width


def probe_asf(stream: BinaryIO, nbytes: int) -> Probe:
    """Probe the objects (GUID, size, payload) of the header; one of them has the file's size."""
    position = 30
    for _ in range(ASF_MAX_OBJECTS):
        head = read_at(stream, position, 24 + 80)
        if len(head) < 24:
            break
        if head[:16] == ASF_FILE and len(head) >= 92:
            declared, is_live = uint(head[40:48], "little"), head[88] & 1
            if is_live or declared <= nbytes:
                joined = 0 < declared and not is_live and read_at(stream, declared, 16) == ASF
                return Probe("asf", stop=declared if joined else None)
            return Probe("asf", damage=f"expected a file of {declared} bytes, got {nbytes}")
        position += max(24, uint(head[16:24], "little"))
    return Probe("asf", damage=f"no file properties in {nbytes} bytes")
