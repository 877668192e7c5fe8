"""WAV in its three sizes: RIFF (32 bit), RF64 (a chunk `ds64` holds the sizes) and Sony's W64.

Lists of (name, size, payload); sizes are written last, by seeking back, so that a copy that stopped
half-way promises more than it holds. libsndfile shortens such a file without a word.
"""

from __future__ import annotations

from dataclasses import replace
from typing import BinaryIO

from earmill.pipeline.audio.containers.base import (
    MAX_PARTS,
    ByteOrder,
    Probe,
    no_samples,
    read_at,
    samples_found,
    uint,
)

# Data sizes that mean "not known when the header was written": ffmpeg and sox writing to a pipe.
UNKNOWN_SIZES = frozenset({0x7FFFF000, 0x7FFFFFFF, 0xFFFFFFFF})
UNKNOWN_FROM = 0xFFFFFF00
LONG_SIZE = 0xFFFFFFFF

# Of these codecs a block is one sample of every channel: PCM, float, A-law, mu-law, extensible.
PLAIN_CODECS = frozenset({1, 3, 6, 7, 0xFFFE})

# W64 names are GUIDs that begin with the RIFF name in lower case; all but the first end alike.
W64_RIFF = bytes.fromhex("726966662e91cf11a5d628db04c10000")
W64_TAIL = bytes.fromhex("f3acd3118cd100c04f8edb8a")
W64_HEADER_BYTES = 24


def is_riff(head: bytes) -> bool:
    return head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:12] == b"WAVE"


def probe_riff(stream: BinaryIO, nbytes: int) -> Probe:
    """RIFF, big-endian RIFX, and RF64: payloads padded to even."""
    order: ByteOrder = "big" if read_at(stream, 0, 4) == b"RIFX" else "little"
    frame_bytes, rate_hz, long_size, position = None, None, None, 12
    for _ in range(MAX_PARTS):
        if position + 8 > nbytes:
            break
        head = read_at(stream, position, 8)
        name, size = head[:4], uint(head[4:], order)
        if name == b"fmt ":
            rate_hz, frame_bytes = _format(stream.read(16), order)
        elif name == b"ds64":
            long_size = uint(stream.read(16)[8:16], order)
        elif name == b"data":
            # EBU Tech 3306: the long size counts only where the short one is -1.
            declared = long_size if long_size is not None and size == LONG_SIZE else size
            found = _riff_data(declared, nbytes - position - 8, frame_bytes)
            return replace(found, rate_hz=rate_hz)
        position += 8 + size + size % 2
    return no_samples("riff", "data chunk", nbytes)


def _format(fields: bytes, order: ByteOrder) -> tuple[int, int | None]:
    """Sample rate of a format chunk, and the bytes of one sample of every channel if fixed."""
    plain = uint(fields[0:2], order) in PLAIN_CODECS
    return uint(fields[4:8], order), uint(fields[12:14], order) or None if plain else None


def _riff_data(declared: int, present: int, frame_bytes: int | None) -> Probe:
    unknown = declared in UNKNOWN_SIZES or UNKNOWN_FROM <= declared <= 0xFFFFFFFF
    return Probe("riff") if unknown else samples_found("riff", declared, present, frame_bytes)


def probe_w64(stream: BinaryIO, nbytes: int) -> Probe:
    """W64: sizes of 64 bits that count their own header, payloads padded to 8 bytes.

    libsndfile takes all that is behind the samples for samples, padding and further chunks: only
    the header says how many there are.
    """
    frame_bytes, position = None, 40
    for _ in range(MAX_PARTS):
        head = read_at(stream, position, W64_HEADER_BYTES)
        if len(head) < W64_HEADER_BYTES:
            break
        name, size = head[:4] if head[4:16] == W64_TAIL else b"", uint(head[16:24], "little")
        if name == b"fmt ":
            _, frame_bytes = _format(stream.read(16), "little")
        elif name == b"data":
            present = nbytes - position - W64_HEADER_BYTES
            # From a pipe the size is zero or all ones.
            if size < W64_HEADER_BYTES or size >= 1 << 62:
                return Probe("w64")
            declared = size - W64_HEADER_BYTES
            found = samples_found("w64", declared, present, frame_bytes)
            return replace(found, declared_frames=declared // frame_bytes if frame_bytes else None)
        position += (max(size, W64_HEADER_BYTES) + 7) // 8 * 8
    return no_samples("w64", "data chunk", nbytes)
