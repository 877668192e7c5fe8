"""MP4, Matroska (WebM), ASF (WMA) and ADTS (AAC): whether the file is as long as it says.

FFmpeg decodes what is left of a cut file and calls it an end. The first three say in front how many
bytes belong to them, in boxes, a segment and a file size; ADTS is a chain of frames with lengths.
Not found: a fragmented MP4 or a live Matroska cut exactly between two fragments, ADTS between two
frames. Layouts: ISO/IEC 14496-12 4.2, RFC 8794, Microsoft's ASF specification 3.2, ISO/IEC 13818-7.
"""

from __future__ import annotations

from typing import BinaryIO

from earmill.pipeline.audio.containers.base import Probe, read_at, uint
from earmill.pipeline.audio.containers.mpeg import SEARCH_BYTES, audio_end, skip_id3

# First boxes of MP4 and of the QuickTime files it comes from.
MP4_FIRST = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot", b"styp"})
# A fragmented file has two boxes a fragment.
MAX_BOXES = 1 << 20
EBML = b"\x1a\x45\xdf\xa3"
SEGMENT = b"\x18\x53\x80\x67"
ASF = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
ASF_FILE = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
ASF_MAX_OBJECTS = 256
ADTS_HEADER_BYTES = 7
ADTS_MIN_CHAIN = 3


def is_mp4(head: bytes) -> bool:
    return head[4:8] in MP4_FIRST


def probe_mp4(stream: BinaryIO, nbytes: int) -> Probe:
    """A list of boxes (size, name, payload); the samples are useless without `moov`."""
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
            got = nbytes - position
            return Probe("mp4", damage=f"box {name!a}: expected {size} bytes, got {got}")
        names.add(name)
        position += size
    return Probe("mp4", damage=None if b"moov" in names else f"no moov box in {nbytes} bytes")


def probe_matroska(stream: BinaryIO, nbytes: int) -> Probe:
    """An EBML header, then one segment that holds everything."""
    position = 4
    size, width = _vint(read_at(stream, position, 8))
    position += width + (size or 0)
    if read_at(stream, position, 4) != SEGMENT:
        return Probe("matroska", damage="no segment behind the header")
    size, width = _vint(read_at(stream, position + 4, 8))
    position += 4 + width
    if size is None or position + size <= nbytes:
        return Probe("matroska")
    return Probe("matroska", damage=f"expected {size} bytes of segment, got {nbytes - position}")


def _vint(raw: bytes) -> tuple[int | None, int]:
    """An EBML size and its width; None is a size that was not known when it was written."""
    if not raw or raw[0] == 0:
        return 0, 1
    width = 9 - raw[0].bit_length()
    value = uint(raw[:width], "big") & ((1 << (7 * width)) - 1)
    return (None if value == (1 << (7 * width)) - 1 else value), width


def probe_asf(stream: BinaryIO, nbytes: int) -> Probe:
    """The header object holds objects (GUID, size, payload); one of them knows the file's size."""
    position = 30
    for _ in range(ASF_MAX_OBJECTS):
        head = read_at(stream, position, 24 + 80)
        if len(head) < 24:
            break
        if head[:16] == ASF_FILE and len(head) >= 92:
            declared, is_live = uint(head[40:48], "little"), head[88] & 1
            if is_live or declared <= nbytes:
                return Probe("asf")
            return Probe("asf", damage=f"expected a file of {declared} bytes, got {nbytes}")
        position += max(24, uint(head[16:24], "little"))
    return Probe("asf", damage=f"no file properties in {nbytes} bytes")


def probe_adts(stream: BinaryIO, nbytes: int) -> Probe | None:
    """None where the bytes are no chain of ADTS frames."""
    start, end = skip_id3(stream, nbytes), audio_end(stream, nbytes)
    position, count = start, 0
    while position < end:
        size = _adts_bytes(read_at(stream, position, ADTS_HEADER_BYTES))
        if size is None:
            break
        if position + size > end:
            if count < ADTS_MIN_CHAIN:
                return None
            got = end - position
            return Probe("adts", damage=f"last AAC frame: expected {size} bytes, got {got}")
        position, count = position + size, count + 1
    if count < ADTS_MIN_CHAIN:
        return None
    if 0 < end - position < ADTS_HEADER_BYTES:
        return Probe("adts", damage=f"an AAC frame header is cut at byte {position}")
    resumed = _adts_resumes(stream, position)
    damage = None if resumed is None else f"AAC frames break at byte {position}"
    return Probe("adts", damage=damage, shifts_time=damage is not None)


def _adts_bytes(raw: bytes) -> int | None:
    """Bytes of the frame that starts here, None where none does."""
    if len(raw) < ADTS_HEADER_BYTES or raw[0] != 0xFF or raw[1] & 0xF6 != 0xF0:
        return None
    size = (raw[3] & 3) << 11 | raw[4] << 3 | raw[5] >> 5
    return size if size >= ADTS_HEADER_BYTES else None


def _adts_resumes(stream: BinaryIO, position: int) -> int | None:
    """Where frames go on behind a break: two in a row, which tags do not look like."""
    window = read_at(stream, position, SEARCH_BYTES)
    index = window.find(b"\xff")
    while index >= 0:
        size = _adts_bytes(window[index : index + ADTS_HEADER_BYTES])
        follower = None if size is None else read_at(stream, position + index + size, 7)
        if follower and _adts_bytes(follower) is not None:
            return position + index
        index = window.find(b"\xff", index + 1)
    return None
