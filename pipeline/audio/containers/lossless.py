"""FLAC, WavPack and True Audio: the samples that their headers declare, and what follows them.
Layouts: RFC 9639; wavpack.com, WavPack 4 and 5 binary file format; tta.sourceforge.net, TTA1."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import BinaryIO

from earmill.pipeline.audio.containers.base import (
    Probe,
    audio_end,
    no_audio,
    no_samples,
    read_at,
    uint,
)

FLAC = b"fLaC"
FLAC_HEAD_BYTES = 26
# Bytes of the header whose lowest 36 bits are the number of frames.
FLAC_COUNT = slice(18, 26)
# Start of a stream: its mark, and the head of its first block of 34 bytes, which may be the last.
FLAC_BEGINS = (b"fLaC\x00\x00\x00\x22", b"fLaC\x80\x00\x00\x22")
# Bytes to search in front of a decoder's position: the longest frame, and the decoder's read-ahead.
BEFORE_END = 1 << 18
PIECE_BYTES = 1 << 20
# Frame headers: mark, bytes at most, bits of a sample by code.
FRAME_SYNC = re.compile(b"\xff[\xf8\xf9]")
FRAME_HEADER_BYTES = 16
FRAME_BITS = {1: 8, 2: 12, 4: 16, 5: 20, 6: 24, 7: 32}

WAVPACK = b"wvpk"
WAVPACK_HEADER_BYTES = 32
WAVPACK_FIRST_OF_BLOCK = 1 << 11
WAVPACK_UNKNOWN = 0xFFFFFFFF

TTA = b"TTA1"
TTA_HEADER_BYTES = 22
TTA_MOST_FRAMES = 1 << 22


@dataclass(frozen=True)
class StreamInfo:
    """The header of a FLAC (RFC 9639, section 8.2); 0 frames if it does not know."""

    rate_hz: int
    channels: int
    bits: int
    frames: int
    block: int

    @classmethod
    def of(cls, head: bytes) -> StreamInfo | None:
        """Parse the first bytes of a file; None if it is not a FLAC."""
        if len(head) < FLAC_HEAD_BYTES or head[:4] != FLAC or head[4] & 0x7F:
            return None
        packed = uint(head[FLAC_COUNT], "big")
        channels, bits = (packed >> 41 & 0x7) + 1, (packed >> 36 & 0x1F) + 1
        block = uint(head[10:12], "big")
        return cls(packed >> 44, channels, bits, packed & (1 << 36) - 1, block)


def probe_flac(stream: BinaryIO, nbytes: int) -> Probe:
    """Probe a FLAC. It ends where its header says, else in front of the tags at its end."""
    info = StreamInfo.of(read_at(stream, 0, FLAC_HEAD_BYTES))
    if info is None or info.frames:
        return Probe("flac")
    end = audio_end(stream, nbytes)
    return Probe("flac", stop=end if end < nbytes else None)


def flac_goes_on(stream: BinaryIO, start: int, nbytes: int) -> str | None:
    """Return what follows the samples that a FLAC's header counts, in words; None for nothing. The
    search begins at byte `start`, in front of the end of the last counted frame.
    """
    info = StreamInfo.of(read_at(stream, 0, FLAC_HEAD_BYTES))
    if info is None or not info.frames:
        return None
    kept = b""
    for at in range(max(FLAC_HEAD_BYTES, start), nbytes, PIECE_BYTES):
        piece, first = kept + read_at(stream, at, PIECE_BYTES), at - len(kept)
        for mark in FLAC_BEGINS:
            if (found := piece.find(mark)) >= 0:
                return f"another FLAC starts at byte {first + found}"
        for sync in FRAME_SYNC.finditer(piece):
            header = piece[sync.start() : sync.start() + FRAME_HEADER_BYTES]
            if info.frames in _frame_samples(header, info):
                return f"a frame at byte {first + sync.start()} holds sample {info.frames}"
        kept = piece[-FRAME_HEADER_BYTES:]
    return None


def _frame_samples(header: bytes, info: StreamInfo) -> range:
    """Return the numbers of a frame's samples by its header (RFC 9639, 9.1); empty for no frame."""
    header = header.ljust(5, b"\0")
    code, rate, depth = header[2] >> 4, header[2] & 15, header[3] >> 1 & 7
    channels = header[3] >> 4
    alike = (channels + 1 if channels < 8 else 2) == info.channels
    alike = alike and (not depth or FRAME_BITS.get(depth) == info.bits) and not header[3] & 1
    width = max(1, 8 - (header[4] ^ 0xFF).bit_length())  # bytes of a number as UTF-8 writes it
    behind = 4 + width + {6: 1, 7: 2}.get(code, 0) + {12: 1, 13: 2, 14: 2}.get(rate, 0)
    if not alike or not code or rate == 15 or len(header) <= behind:
        return range(0)
    register = 0  # Checksum: polynomial 0x07, highest bit first.
    for byte in header[:behind]:
        register ^= byte
        for _ in range(8):
            register = (register << 1 ^ (0x07 if register & 0x80 else 0)) & 0xFF
    if register != header[behind]:
        return range(0)
    number = header[4] & (0x7F >> width if width > 1 else 0x7F)
    for byte in header[5 : 4 + width]:
        number = number << 6 | byte & 0x3F
    at = 4 + width
    size = {1: 192, 6: header[at] + 1, 7: uint(header[at : at + 2], "big") + 1}.get(code, 0)
    size = size or (576 << code - 2 if code < 6 else 256 << code - 8)
    first = number if header[1] & 1 else number * info.block
    return range(first, first + size)


def probe_wavpack(stream: BinaryIO, nbytes: int) -> Probe:
    """Probe WavPack: blocks with sizes. The first block of a group counts all its samples."""
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
                # Bits from 32 on are in a byte of their own. No total is equal to the mark.
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
    """Probe True Audio: a header, the sizes of all frames, the frames."""
    head = read_at(stream, 0, TTA_HEADER_BYTES)
    rate_hz, frames = struct.unpack("<II", head[10:18].ljust(8, b"\0"))
    # A frame is 256/245 s.
    length = rate_hz * 256 // 245
    count = -(-frames // length) if length else 0
    table = read_at(stream, TTA_HEADER_BYTES, 4 * min(count, TTA_MOST_FRAMES) + 4)
    if len(table) != 4 * count + 4:
        return no_samples("tta", "whole table of frames", nbytes)
    start, damage = TTA_HEADER_BYTES + len(table), None
    size = sum(struct.unpack(f"<{count}I", table[:-4]))
    if start + size > nbytes:
        damage = f"expected {size} bytes of frames, got {max(0, nbytes - start)}"
    elif start + size < nbytes and not no_audio(stream, start + size, nbytes):
        damage = f"{nbytes - start - size} bytes follow the frames that its header counts"
    return Probe("tta", damage=damage, declared_frames=frames)
