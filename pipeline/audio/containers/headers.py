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
    BareSamples,
    ByteOrder,
    Probe,
    Trim,
    no_samples,
    read_at,
    uint,
)
from earmill.pipeline.audio.containers.riff import riff_chunks
from earmill.pipeline.audio.containers.sizes import ChunkForm, Promise, chunks

PCM = {1: "PCM_S8", 2: "PCM_16", 3: "PCM_24", 4: "PCM_32"}
FLOATS = {4: "FLOAT", 8: "DOUBLE"}
MU_LAW, A_LAW = {1: "ULAW"}, {1: "ALAW"}
# Compression types of AIFF-C that compress nothing: libsndfile's names by bytes of a sample.
AIFC_PLAIN = {
    **dict.fromkeys((b"NONE", b"twos", b"sowt", b"in24", b"in32"), PCM),
    **dict.fromkeys((b"fl32", b"FL32", b"fl64", b"FL64"), FLOATS),
    **dict.fromkeys((b"ulaw", b"ULAW"), MU_LAW),
    **dict.fromkeys((b"alaw", b"ALAW"), A_LAW),
    b"raw ": {1: "PCM_U8"},
}
CAF_CHUNKS = ChunkForm(
    12, lambda head: (head[:4], int.from_bytes(head[4:], "big", signed=True)), align=1
)
CAF_UNKNOWN = -1
CAF_IS_FLOAT, CAF_IS_LITTLE = 1, 2
AU_UNKNOWN = 0xFFFFFFFF
# Bytes of a sample and libsndfile's name, by Sun's number of an encoding without compression.
AU_PLAIN = {
    1: (1, "ULAW"),
    2: (1, "PCM_S8"),
    3: (2, "PCM_16"),
    4: (3, "PCM_24"),
    5: (4, "PCM_32"),
    6: (4, "FLOAT"),
    7: (8, "DOUBLE"),
    27: (1, "ALAW"),
}
NIST_FIELD = re.compile(rb"^(\w+) -(?:i|s\d+|r) (\S+)", re.MULTILINE)
NIST_MAX_HEADER = 1 << 16
# The compressed NIST codings hold fewer bytes than their samples.
NIST_PLAIN = re.compile(rb"(pcm|ulaw|mu-law|alaw)?$")


def is_aiff(head: bytes) -> bool:
    return head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC")


def probe_aiff(stream: BinaryIO, nbytes: int, *, behind: bool = True) -> Probe:
    """AIFF and AIFF-C: big-endian chunks, padded to even; samples in `SSND` behind two words."""
    frame_bytes, bare, kind, frames, form = None, None, None, 0, riff_chunks("big")
    for name, start, size in chunks(stream, 12, nbytes, form):
        if name == b"COMM":
            fields = read_at(stream, start, min(size, 22))
            frames, frame_bytes, bare = _aiff_format(fields)
            kind = None if bare else f"AIFF codec {fields[18:22]!a}"
        elif name == b"SSND":
            # Two words, and as many bytes as the first of them says.
            first = 8 + uint(read_at(stream, start, 4), "big")
            promise = Promise(
                "aiff",
                start=start + first,
                size=max(0, size - first),
                frame_bytes=frame_bytes,
                bare=bare,
                codec=kind,
                form=form,
                extra=first,
                others=(frames * frame_bytes,) if frame_bytes else (),
                container="AIFF",
            )
            return promise.held_against(stream, nbytes, behind=behind)
    return no_samples("aiff", "SSND chunk", nbytes)


def _aiff_format(fields: bytes) -> tuple[int, int | None, BareSamples | None]:
    """Frames, bytes of a frame and form of the samples, out of a COMM chunk."""
    channels, frames, bits = struct.unpack(">HIH", fields[:8].ljust(8, b"\0"))
    width, kind = (bits + 7) // 8, fields[18:22] or b"NONE"
    if kind not in AIFC_PLAIN:
        return frames, None, None
    subtype, rate_hz = AIFC_PLAIN[kind].get(width), _extended(fields[8:18])
    frame_bytes = channels * width or None
    if subtype is None or not rate_hz or frame_bytes is None:
        return frames, frame_bytes, None
    order: ByteOrder = "little" if kind == b"sowt" else "big"
    return frames, frame_bytes, BareSamples(rate_hz, channels, subtype, order)


def _extended(raw: bytes) -> int:
    """A sample rate out of the 80-bit float of AIFF; 0 where it is none that a file has."""
    exponent, mantissa = uint(raw[:2], "big") - 16383, uint(raw[2:10], "big")
    return mantissa >> (63 - exponent) if 0 <= exponent < 32 else 0


def probe_caf(stream: BinaryIO, nbytes: int, *, behind: bool = True) -> Probe:
    """CAF: chunks with 64-bit sizes; `data` starts with a word of its own, -1 means to the end."""
    frame_bytes, bare, kind, rate_hz, trim = None, None, None, 0, None
    found: Probe | None = None
    for name, start, size in chunks(stream, 8, nbytes, CAF_CHUNKS):
        if name == b"desc":
            fields = read_at(stream, start, 32)
            rate_hz, frame_bytes, bare = _caf_format(fields)
            kind = None if bare else f"CAF codec {fields[8:12]!a}"
        elif name == b"pakt" and rate_hz:
            valid, skip = struct.unpack(">qi", read_at(stream, start + 8, 12).ljust(12, b"\0"))
            trim = Trim(rate_hz, skip, valid) if skip >= 0 and valid > 0 else None
        elif name == b"data":
            promise = Promise(
                "caf",
                start=start + 4,
                size=None if size == CAF_UNKNOWN else max(0, size - 4),
                frame_bytes=frame_bytes,
                bare=bare,
                codec=kind,
                form=CAF_CHUNKS,
                extra=4,
                wraps=False,
                container="CAF",
            )
            found = promise.held_against(stream, nbytes, behind=behind)
            if bare is not None:
                break
    if found is None:
        return no_samples("caf", "data chunk", nbytes)
    return found if bare is not None else replace(found, trim=trim)


def _caf_format(fields: bytes) -> tuple[int, int | None, BareSamples | None]:
    """Rate, bytes of a frame and form of the samples, out of a description chunk."""
    if len(fields) < 32:
        return 0, None, None
    rate, kind, flags, packet, frames, channels = struct.unpack(">d4s4I", fields[:28])
    rate_hz = int(rate) if 0 < rate < 1 << 31 else 0
    if frames != 1 or not packet:  # packets of one frame and of a fixed size, or not
        return rate_hz, None, None
    widths = {b"lpcm": FLOATS if flags & CAF_IS_FLOAT else PCM}
    widths |= {b"ulaw": MU_LAW, b"alaw": A_LAW}
    width, rest = divmod(packet, channels or packet)
    subtype = widths.get(kind, {}).get(width)
    if subtype is None or rest or not (rate_hz and channels):
        return rate_hz, packet, None
    order: ByteOrder = "little" if flags & CAF_IS_LITTLE else "big"
    return rate_hz, packet, BareSamples(rate_hz, channels, subtype, order)


def probe_au(stream: BinaryIO, nbytes: int, *, behind: bool = True) -> Probe:
    """AU, `.snd`: offset and size of the data, then encoding, rate, channels; either byte order."""
    head = read_at(stream, 0, 24)
    if len(head) < 24:
        return no_samples("au", "whole header", nbytes)
    order: ByteOrder = "little" if head[:4] == b"dns." else "big"
    words = "<5I" if order == "little" else ">5I"
    offset, size, encoding, rate_hz, channels = struct.unpack(words, head[4:])
    width, subtype = AU_PLAIN.get(encoding, (0, ""))
    promise = Promise(
        "au",
        start=offset,
        size=None if size == AU_UNKNOWN else size,
        frame_bytes=width * channels or None,
        bare=BareSamples(rate_hz, channels, subtype, order) if width and channels else None,
        codec=None if width else f"AU encoding {encoding}",
        container="AU",
    )
    return promise.held_against(stream, nbytes, behind=behind)


def probe_nist(stream: BinaryIO, nbytes: int, *, behind: bool = True) -> Probe:
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

    frames = number(b"sample_count", 0)
    if not NIST_PLAIN.match(fields.get(b"sample_coding", b"")):
        return Probe("nist")
    if not frames:
        return Probe("nist", header_size="unknown")
    frame_bytes = max(1, number(b"channel_count", 1) * number(b"sample_n_bytes", 2))
    promise = Promise("nist", start=size, size=frames * frame_bytes, frame_bytes=frame_bytes)
    found = promise.held_against(stream, nbytes, behind=behind)
    return replace(found, declared_frames=frames)
