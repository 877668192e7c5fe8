"""Streams of frames whose headers state their lengths: AAC in ADTS, AC-3, AMR.

FFmpeg decodes the rest of a cut or damaged stream without an error. Not found: a cut exactly
between two frames. Layouts: ISO/IEC 13818-7 6.2, ETSI TS 102 366 4.3, 4.4 and E.1.2, RFC 4867 5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import BinaryIO

from earmill.pipeline.audio.containers.base import Probe, audio_end, read_at

# Bytes behind a break in which frames are searched: padding, pictures with a wrong size.
SEARCH_BYTES = 1 << 16
ADTS_HEADER_BYTES = 7
AC3_HEADER_BYTES = 6
# Frames in a row that make a stream; fewer may be chance.
MIN_CHAIN = 3
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
    """Frames of one format.

    Args:
        kind: Kind of the container, see `Probe`.
        name: Name in messages.
        header_bytes: Bytes that state the length of a frame.
        size: Returns the length of the frame with this header, None if it is not a header.
        sync: First byte of every frame; None if there is none.
    """

    kind: str
    name: str
    header_bytes: int
    size: Callable[[bytes], int | None]
    sync: bytes | None

    def probe(self, stream: BinaryIO, nbytes: int, start: int = 0) -> Probe | None:
        """Walk over all frames; None if the bytes are not a chain of frames."""
        position, count, end = start, 0, audio_end(stream, nbytes)
        while position < end:
            size = self.size(read_at(stream, position, self.header_bytes))
            if size is None:
                break
            if position + size > end:
                if count < MIN_CHAIN and self.sync is not None:
                    return None
                got = end - position
                text = f"last {self.name} frame: expected {size} bytes, got {got}"
                return Probe(self.kind, damage=text)
            position, count = position + size, count + 1
        if count < MIN_CHAIN and self.sync is not None:
            return None
        if 0 < end - position < self.header_bytes:
            text = f"{self._article} {self.name} frame header is cut at byte {position}"
            return Probe(self.kind, damage=text)
        if position == end or (self.sync is not None and not self._resumes(stream, position)):
            return Probe(self.kind, stop=None if position == nbytes else position)
        text = f"{self.name} frames break at byte {position}"
        return Probe(self.kind, damage=text, shifts_time=True)

    @property
    def _article(self) -> str:
        return "an" if self.name[0] in "AE" else "a"

    def _resumes(self, stream: BinaryIO, position: int) -> bool:
        """Return True if two frames in a row follow a break; tags do not look like that."""
        window = read_at(stream, position, SEARCH_BYTES)
        index = window.find(self.sync or b"")
        while index >= 0:
            size = self.size(window[index : index + self.header_bytes])
            if size is not None:
                follower = read_at(stream, position + index + size, self.header_bytes)
                if self.size(follower) is not None:
                    return True
            index = window.find(self.sync or b"", index + 1)
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


def is_amr(head: bytes) -> bool:
    return any(head.startswith(magic) for magic in AMR_MAGIC)


def probe_amr(stream: BinaryIO, nbytes: int) -> Probe:
    """Probe AMR of one channel, narrow or wide band: a line of text, then frames of 20 ms."""
    head = read_at(stream, 0, 9)
    magic = next(magic for magic in AMR_MAGIC if head.startswith(magic))
    sizes = AMR_BYTES[AMR_MAGIC[magic]]

    def size(raw: bytes) -> int | None:
        # The padding bits of a header are zero. The mark of a second file has other bits there.
        return sizes.get(raw[0] >> 3 & 15) if raw and not raw[0] & 0x83 else None

    form = FrameFormat("amr", "AMR", 1, size, None)
    found = form.probe(stream, nbytes, start=len(magic))
    return found or Probe("amr")
