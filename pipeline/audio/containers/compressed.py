"""Containers of compressed audio that FFmpeg reads: their stated length, and their true length.

FFmpeg decodes the rest of a cut or damaged file without an error. It decodes the first of several
joined files alone, or the others with their delay.

MP4, Matroska (WebM) and ASF (WMA) state how many bytes belong to them, in boxes, a segment or a
file size. `Probe.stop` is the byte at which another file of the kind begins. AAC in ADTS, AC-3 and
AMR are frames whose headers state their lengths. Not found: a cut exactly between two frames, or
between two fragments of an MP4 or a live Matroska.

Layouts: ISO/IEC 14496-12 4.2, RFC 8794, Microsoft's ASF specification 3.2; ISO/IEC 13818-7 6.2,
ETSI TS 102 366 4.3, 4.4 and E.1.2, RFC 4867 5.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import BinaryIO

from earmill.pipeline.audio.containers.base import Probe, audio_end, read_at, uint

# First boxes of MP4 and of the QuickTime files it comes from.
MP4_FIRST = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot", b"styp"})
MAX_BOXES = 1 << 20  # A fragmented file has two boxes a fragment.
EBML = b"\x1a\x45\xdf\xa3"
SEGMENT = b"\x18\x53\x80\x67"
ASF = bytes.fromhex("3026b2758e66cf11a6d900aa0062ce6c")
ASF_FILE = bytes.fromhex("a1dcab8c47a9cf118ee400c00c205365")
ASF_MAX_OBJECTS = 256


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
    unknown = (1 << (7 * width)) - 1
    value = uint(raw[:width], "big") & unknown
    return (None if value == unknown else value), width


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


# Bytes behind a break in which frames are searched: padding, pictures with a wrong size.
SEARCH_BYTES = 1 << 16
ADTS_HEADER_BYTES = 7
AC3_HEADER_BYTES = 6
MIN_CHAIN = 3  # Frames in a row that make a stream; fewer may be chance.
# kbit/s by code, two codes each; bytes of a frame are 4, 6 or about 4.4 times these.
AC3_KBITS = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 576, 640)
AC3_MOST_BSID = 10
EAC3_MOST_BSID = 16
AMR_MAGIC = {b"#!AMR\n": "narrow", b"#!AMR-WB\n": "wide"}
# Bytes of a frame by type, header included. The last type is a frame that was not sent.
AMR_BYTES = {
    "narrow": {**dict(enumerate((13, 14, 16, 18, 20, 21, 27, 32, 6))), 15: 1},
    "wide": {**dict(enumerate((18, 24, 33, 37, 41, 47, 51, 59, 61, 6))), 14: 1, 15: 1},
}


@dataclass(frozen=True)
class FrameFormat:
    """Frames of one format."""

    kind: str  # Kind of the container, see `Probe`.
    name: str  # Name in messages.
    header_bytes: int
    # Length of the frame with this header; None if the bytes are not a header.
    size: Callable[[bytes], int | None]
    sync: bytes | None  # First byte of every frame, if all have the same.

    def probe(self, stream: BinaryIO, nbytes: int, start: int = 0) -> Probe | None:
        """Walk over all frames; None if the bytes are not a chain of frames."""
        position, count, end, damage = start, 0, audio_end(stream, nbytes), None
        while position < end:
            size = self.size(read_at(stream, position, self.header_bytes))
            if size is None:
                break
            if position + size > end:
                got = end - position
                damage = f"last {self.name} frame: expected {size} bytes, got {got}"
                break
            position, count = position + size, count + 1
        if count < MIN_CHAIN and self.sync is not None:
            return None
        if damage is None and 0 < end - position < self.header_bytes:
            damage = f"an {self.name} frame header is cut at byte {position}"
        if damage is not None:
            return Probe(self.kind, damage=damage)
        if position == end or (self.sync is not None and not self._resumes(stream, position)):
            return Probe(self.kind, stop=None if position == nbytes else position)
        damage = f"{self.name} frames break at byte {position}"
        return Probe(self.kind, damage=damage, shifts_time=True)

    def _resumes(self, stream: BinaryIO, position: int) -> bool:
        """Return True if two frames in a row follow a break; tags do not look like that."""
        window = read_at(stream, position, SEARCH_BYTES)
        for sync in re.finditer(re.escape(self.sync or b""), window):
            size = self.size(window[sync.start() :][: self.header_bytes])
            if size is not None:
                follower = position + sync.start() + size
                if self.size(read_at(stream, follower, self.header_bytes)) is not None:
                    return True
        return False


def _adts_bytes(raw: bytes) -> int | None:
    if len(raw) < ADTS_HEADER_BYTES or raw[0] != 0xFF or raw[1] & 0xF6 != 0xF0:
        return None
    size = (raw[3] & 3) << 11 | raw[4] << 3 | raw[5] >> 5
    return size if size >= ADTS_HEADER_BYTES else None


def _ac3_bytes(raw: bytes) -> int | None:
    if len(raw) < AC3_HEADER_BYTES or raw[:2] != b"\x0b\x77":
        return None
    rate, code, bsid = raw[4] >> 6, raw[4] & 0x3F, raw[5] >> 3
    if AC3_MOST_BSID < bsid <= EAC3_MOST_BSID:  # E-AC-3
        return 2 * (((raw[2] & 7) << 8 | raw[3]) + 1)
    if bsid > EAC3_MOST_BSID or rate == 3 or code >= 2 * len(AC3_KBITS):
        return None
    kbits = AC3_KBITS[code >> 1]
    words = (2 * kbits, kbits * 96000 // 44100 + (code & 1), 3 * kbits)[rate]
    return 2 * words


ADTS = FrameFormat("adts", "AAC", ADTS_HEADER_BYTES, _adts_bytes, b"\xff")
AC3 = FrameFormat("ac3", "AC-3", AC3_HEADER_BYTES, _ac3_bytes, b"\x0b")


def probe_ac3(stream: BinaryIO, nbytes: int) -> Probe | None:
    """Probe AC-3 or, by the syntax number of its first frame, E-AC-3; None if it is neither."""
    found = AC3.probe(stream, nbytes)
    is_newer = read_at(stream, 5, 1) > bytes([AC3_MOST_BSID << 3 | 7])
    return found if found is None or not is_newer else replace(found, kind="eac3")


def probe_amr(stream: BinaryIO, nbytes: int) -> Probe:
    """Probe AMR of one channel, narrow or wide band: a line of text, then frames of 20 ms."""
    head = read_at(stream, 0, 9)
    magic = next(magic for magic in AMR_MAGIC if head.startswith(magic))
    sizes = AMR_BYTES[AMR_MAGIC[magic]]

    def size(raw: bytes) -> int | None:
        # The padding bits of a header are zero. The mark of a second file has other bits there.
        return sizes.get(raw[0] >> 3 & 15) if raw and not raw[0] & 0x83 else None

    form = FrameFormat("amr", "AMR", 1, size, None)
    return form.probe(stream, nbytes, start=len(magic)) or Probe("amr")
