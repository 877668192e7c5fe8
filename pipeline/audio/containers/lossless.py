"""FLAC, WavPack and True Audio: how many samples their headers promise, and what follows them.

Layouts: RFC 9639; wavpack.com, WavPack 4 and 5 binary file format; tta.sourceforge.net, TTA1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

from earmill.pipeline.audio.containers.base import Probe, no_samples, read_at, uint
from earmill.pipeline.audio.containers.sizes import no_audio
from earmill.pipeline.audio.containers.tags import audio_end

FLAC = b"fLaC"
FLAC_HEAD_BYTES = 26
# A stream's mark and the head of its first block, which is 34 bytes long and may be the last.
FLAC_BEGINS = (b"fLaC\x00\x00\x00\x22", b"fLaC\x80\x00\x00\x22")
# Bytes that a decoder may have read behind the last frame that it needs.
READ_AHEAD = 1 << 16
PIECE_BYTES = 1 << 20

WAVPACK = b"wvpk"
WAVPACK_HEADER_BYTES = 32
WAVPACK_FIRST_OF_BLOCK = 1 << 11
WAVPACK_UNKNOWN = 0xFFFFFFFF

TTA = b"TTA1"
TTA_HEADER_BYTES = 22
TTA_MOST_FRAMES = 1 << 22


@dataclass(frozen=True)
class StreamInfo:
    """What the header of a FLAC says (RFC 9639, section 8.2); 0 frames where it does not know."""

    rate_hz: int
    channels: int
    bits: int
    frames: int

    @classmethod
    def of(cls, head: bytes) -> StreamInfo | None:
        """Of a file that begins so; None if that is no FLAC."""
        if len(head) < FLAC_HEAD_BYTES or head[:4] != FLAC or head[4] & 0x7F:
            return None
        packed = uint(head[18:FLAC_HEAD_BYTES], "big")
        channels, bits = (packed >> 41 & 0x7) + 1, (packed >> 36 & 0x1F) + 1
        return cls(packed >> 44, channels, bits, packed & (1 << 36) - 1)


def probe_flac(stream: BinaryIO, nbytes: int) -> Probe:
    """A FLAC ends where its header says, else in front of the tags at its end."""
    info = StreamInfo.of(read_at(stream, 0, FLAC_HEAD_BYTES))
    if info is None or info.frames:
        return Probe("flac")
    end = audio_end(stream, nbytes)
    return Probe("flac", stop=end if end < nbytes else None)


def flac_goes_on(stream: BinaryIO, position: int, nbytes: int) -> str | None:
    """Return what follows the samples that a FLAC's header counts, in words; None for nothing.

    Args:
        position: How far a decoder has read that came to the last of them.
    """
    start = max(0, position - READ_AHEAD)
    overlap = b""
    for at in range(start, nbytes, PIECE_BYTES):
        piece = overlap + read_at(stream, at, PIECE_BYTES)
        for mark in FLAC_BEGINS:
            found = piece.find(mark)
            where = at - len(overlap) + found
            if found >= 0 and where > 0:
                return f"another FLAC starts at byte {where}"
        overlap = piece[-7:]
    if position < nbytes and not no_audio(stream, position, nbytes):
        return f"{nbytes - position} bytes follow the samples that its header counts"
    return None


def probe_wavpack(stream: BinaryIO, nbytes: int) -> Probe:
    """Blocks with sizes; the first of a row of blocks counts the samples of all channels."""
    position, count, end = 0, 0, audio_end(stream, nbytes)
    declared: int | None = None
    while position < end:
        head = read_at(stream, position, WAVPACK_HEADER_BYTES)
        if len(head) < WAVPACK_HEADER_BYTES or head[:4] != WAVPACK:
            break
        size = 8 + uint(head[4:8], "little")
        total, index, samples, flags = struct.unpack("<IIII", head[12:28])
        if position + size > end:
            text = f"block at byte {position}: expected {size} bytes, got {end - position}"
            return Probe("wavpack", damage=text)
        if flags & WAVPACK_FIRST_OF_BLOCK and samples:
            if declared is None:
                # Bits from 32 on are a byte of their own; no total is the mark for unknown.
                is_known = total != WAVPACK_UNKNOWN
                declared = total + head[11] * WAVPACK_UNKNOWN if is_known else -1
            elif not index and not head[10]:
                return Probe("wavpack", damage=f"another WavPack starts at byte {position}")
            count += samples
        position += size
    if position < end and not no_audio(stream, position, nbytes):
        return Probe("wavpack", damage=f"no WavPack block at byte {position}", shifts_time=True)
    if declared not in (None, -1, count):
        return Probe("wavpack", damage=f"expected {declared} samples, got blocks of {count}")
    return Probe("wavpack", declared_frames=count)


def probe_tta(stream: BinaryIO, nbytes: int) -> Probe:
    """A header, the sizes of all frames, the frames."""
    head = read_at(stream, 0, TTA_HEADER_BYTES)
    rate_hz, frames = struct.unpack("<II", head[10:18].ljust(8, b"\0"))
    # A frame is 256/245 s.
    length = rate_hz * 256 // 245
    count = -(-frames // length) if length else 0
    table = read_at(stream, TTA_HEADER_BYTES, 4 * min(count, TTA_MOST_FRAMES) + 4)
    if len(table) != 4 * count + 4:
        return no_samples("tta", "whole table of frames", nbytes)
    start = TTA_HEADER_BYTES + len(table)
    size = sum(struct.unpack(f"<{count}I", table[:-4]))
    if start + size > nbytes:
        text = f"expected {size} bytes of frames, got {max(0, nbytes - start)}"
        return Probe("tta", damage=text, declared_frames=frames)
    if start + size < nbytes and not no_audio(stream, start + size, nbytes):
        text = f"{nbytes - start - size} bytes follow the frames that its header counts"
        return Probe("tta", damage=text, declared_frames=frames)
    return Probe("tta", declared_frames=frames)
