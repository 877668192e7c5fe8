"""AIFF, CAF, AU and NIST SPHERE: how many bytes of samples their headers promise.

libsndfile opens all four cut anywhere behind the header and delivers what is left without a word.
Layouts: Apple's AIFF 1.3, AIFF-C and Core Audio Format 1.0; Sun's audio header; NIST SPHERE 2.
"""

from __future__ import annotations

import re
import struct
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

# Compression types of AIFF-C that compress nothing.
AIFC_PLAIN = frozenset(
    {b"NONE", b"twos", b"sowt", b"raw ", b"in24", b"in32", b"fl32", b"FL32", b"fl64", b"FL64"}
    | {b"ulaw", b"alaw", b"ULAW", b"ALAW"}
)
CAF_UNKNOWN = -1
CAF_ONE_FRAME = bytes([0, 0, 0, 1])
AU_UNKNOWN = 0xFFFFFFFF
# Bytes of a sample by Sun's encoding number, for those of whole bytes.
AU_SAMPLE_BYTES = {1: 1, 2: 1, 3: 2, 4: 3, 5: 4, 6: 4, 7: 8, 27: 1}
NIST_FIELD = re.compile(rb"^(\w+) -(?:i|s\d+|r) (\S+)", re.MULTILINE)
NIST_MAX_HEADER = 1 << 16
# The compressed NIST codings hold fewer bytes than their samples.
NIST_PLAIN = re.compile(rb"(pcm|ulaw|mu-law|alaw)?$")


def is_aiff(head: bytes) -> bool:
    return head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC")


def probe_aiff(stream: BinaryIO, nbytes: int) -> Probe:
    """AIFF and AIFF-C: big-endian chunks, padded to even; samples in `SSND` behind two words."""
    frame_bytes, position = None, 12
    for _ in range(MAX_PARTS):
        head = read_at(stream, position, 8)
        if len(head) < 8:
            break
        name, size = head[:4], uint(head[4:], "big")
        if name == b"COMM":
            fields = stream.read(22)
            channels, bits = uint(fields[0:2], "big"), uint(fields[6:8], "big")
            plain = size < 22 or fields[18:22] in AIFC_PLAIN
            frame_bytes = channels * ((bits + 7) // 8) or None if plain else None
        elif name == b"SSND":
            present = nbytes - position - 16
            return samples_found("aiff", max(0, size - 8), present, frame_bytes)
        position += 8 + size + size % 2
    return no_samples("aiff", "SSND chunk", nbytes)


def probe_caf(stream: BinaryIO, nbytes: int) -> Probe:
    """CAF: chunks with 64-bit sizes; `data` starts with a word of its own, -1 means to the end."""
    frame_bytes, position = None, 8
    for _ in range(MAX_PARTS):
        head = read_at(stream, position, 12)
        if len(head) < 12:
            break
        name, size = head[:4], int.from_bytes(head[4:], "big", signed=True)
        if name == b"desc":
            packet = stream.read(24)[16:]
            # Packets of one frame and of a fixed size, or not.
            frame_bytes = uint(packet[:4], "big") or None if packet[4:] == CAF_ONE_FRAME else None
        elif name == b"data":
            if size == CAF_UNKNOWN:
                return Probe("caf")
            return samples_found("caf", max(0, size - 4), nbytes - position - 16, frame_bytes)
        if size < 0:
            break
        position += 12 + size
    return no_samples("caf", "data chunk", nbytes)


def probe_au(stream: BinaryIO, nbytes: int) -> Probe:
    """AU, `.snd`: offset and size of the data, then encoding, rate, channels; either byte order."""
    head = read_at(stream, 0, 24)
    if len(head) < 24:
        return no_samples("au", "whole header", nbytes)
    order: ByteOrder = "little" if head[:4] == b"dns." else "big"
    words = "<5I" if order == "little" else ">5I"
    offset, size, encoding, _, channels = struct.unpack(words, head[4:])
    if size == AU_UNKNOWN:
        return Probe("au")
    frame_bytes = AU_SAMPLE_BYTES.get(encoding, 0) * channels or None
    return samples_found("au", size, nbytes - offset, frame_bytes)


def probe_nist(stream: BinaryIO, nbytes: int) -> Probe:
    """NIST SPHERE: text fields in a header whose size is its second line.

    libsndfile takes all that is behind the header for samples: only the header says how many there
    are.
    """
    second = read_at(stream, 8, 8).strip()
    size = int(second) if second.isdigit() else 0
    header = read_at(stream, 0, min(size, NIST_MAX_HEADER))
    fields = dict(NIST_FIELD.findall(header.partition(b"end_head")[0]))

    def number(name: bytes, default: int) -> int:
        return int(fields[name]) if fields.get(name, b"").isdigit() else default

    if b"sample_count" not in fields or not NIST_PLAIN.match(fields.get(b"sample_coding", b"")):
        return Probe("nist")
    frame_bytes = max(1, number(b"channel_count", 1) * number(b"sample_n_bytes", 2))
    frames = number(b"sample_count", 0)
    found = samples_found("nist", frames * frame_bytes, nbytes - size, frame_bytes)
    return replace(found, declared_frames=frames or None)
