"""Containers put together byte by byte from their specifications: the tests' second route.

Nothing here comes from an encoder or from the code under test. Layouts: RIFF/WAVE as in Microsoft's
multimedia programming reference with WAVE_FORMAT_EXTENSIBLE; RF64 as in EBU Tech 3306; Sony's
Wave64; Apple's AIFF 1.3, AIFF-C and CAF 1.0; Sun's audio header; NIST SPHERE; RFC 3533 (Ogg).
"""

from __future__ import annotations

import struct
from typing import Literal

import numpy as np

Order = Literal["little", "big"]

PCM, FLOAT, A_LAW, MU_LAW, EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
UNKNOWN_32 = 0xFFFFFFFF
# Behind the codec number in the subformat of WAVE_FORMAT_EXTENSIBLE (KSDATAFORMAT_SUBTYPE_*).
SUBFORMAT_TAIL = bytes.fromhex("000000001000800000aa00389b71")
W64_TAIL = bytes.fromhex("f3acd3118cd100c04f8edb8a")


def chunk(
    name: bytes, payload: bytes, *, order: Order = "little", size: int | None = None
) -> bytes:
    """Name, size, payload, padded to even; `size` claims another one."""
    claimed = len(payload) if size is None else size
    return name + claimed.to_bytes(4, order) + payload + bytes(len(payload) % 2)


def wave_format(
    codec: int = PCM,
    channels: int = 1,
    bits: int = 16,
    rate_hz: int = 8000,
    *,
    order: Order = "little",
    extensible: bool = False,
) -> bytes:
    """The payload of a `fmt ` chunk."""
    frame = channels * bits // 8
    tag = EXTENSIBLE if extensible else codec
    mark = "<" if order == "little" else ">"
    fields = struct.pack(mark + "HHIIHH", tag, channels, rate_hz, rate_hz * frame, frame, bits)
    if not extensible:
        return fields
    more = struct.pack(mark + "HHIH", 22, bits, (1 << channels) - 1, codec)
    return fields + more + SUBFORMAT_TAIL


def wave(*chunks: bytes, form: bytes = b"RIFF", order: Order = "little") -> bytes:
    """A RIFF file of these chunks."""
    body = b"WAVE" + b"".join(chunks)
    size = UNKNOWN_32 if form == b"RF64" else len(body)
    return form + size.to_bytes(4, order) + body


def ds64(riff: int, data: int, frames: int) -> bytes:
    """The chunk that holds an RF64 file's sizes; its table of further chunks is empty."""
    return chunk(b"ds64", struct.pack("<QQQI", riff, data, frames, 0))


def w64_chunk(name: bytes, payload: bytes, *, size: int | None = None) -> bytes:
    """A W64 chunk: the size counts its own 24 bytes, the payload is padded to 8."""
    claimed = len(payload) + 24 if size is None else size
    return name + W64_TAIL + claimed.to_bytes(8, "little") + payload + bytes(-len(payload) % 8)


def w64(*chunks: bytes) -> bytes:
    """A W64 file of these chunks."""
    body = b"".join(chunks)
    riff = bytes.fromhex("726966662e91cf11a5d628db04c10000")
    return riff + (40 + len(body)).to_bytes(8, "little") + b"wave" + W64_TAIL + body


def extended(rate_hz: int) -> bytes:
    """An integer rate as the 80-bit float of AIFF: sign and exponent + 16383, then 64 bits."""
    exponent = rate_hz.bit_length() - 1
    return struct.pack(">HQ", exponent + 16383, rate_hz << (63 - exponent))


def comm(
    frames: int, channels: int = 1, bits: int = 16, rate_hz: int = 8000, kind: bytes = b""
) -> bytes:
    """A `COMM` chunk; `kind` is the compression type of AIFF-C, with an empty name."""
    fields = struct.pack(">HIH", channels, frames, bits) + extended(rate_hz)
    return chunk(b"COMM", fields + (kind + bytes(2) if kind else b""), order="big")


def ssnd(samples: bytes, *, size: int | None = None) -> bytes:
    """An `SSND` chunk: two words (offset, block size), then the samples."""
    return chunk(b"SSND", bytes(8) + samples, order="big", size=size)


def aiff(*chunks: bytes, kind: bytes = b"AIFF") -> bytes:
    """An AIFF or AIFF-C file of these chunks."""
    body = kind + b"".join(chunks)
    return b"FORM" + len(body).to_bytes(4, "big") + body


def caf_chunk(name: bytes, payload: bytes, *, size: int | None = None) -> bytes:
    """A CAF chunk; no padding."""
    claimed = len(payload) if size is None else size
    return name + claimed.to_bytes(8, "big", signed=True) + payload


def caf_desc(channels: int = 1, bits: int = 16, rate_hz: int = 8000) -> bytes:
    """A `desc` chunk of big-endian integer PCM."""
    frame = channels * bits // 8
    fields = struct.pack(">d4sIIIII", rate_hz, b"lpcm", 0, frame, 1, channels, bits)
    return caf_chunk(b"desc", fields)


def caf(*chunks: bytes) -> bytes:
    """A CAF file of these chunks."""
    return b"caff" + struct.pack(">HH", 1, 0) + b"".join(chunks)


def au(
    samples: bytes,
    encoding: int = 3,
    channels: int = 1,
    rate_hz: int = 8000,
    *,
    size: int | None = None,
    offset: int = 24,
    order: Order = "big",
) -> bytes:
    """A Sun audio file; the space between header and samples is its annotation."""
    words = (offset, len(samples) if size is None else size, encoding, rate_hz, channels)
    magic = b".snd" if order == "big" else b"dns."
    head = magic + struct.pack((">" if order == "big" else "<") + "5I", *words)
    return head.ljust(offset, b"\0") + samples


def sphere(samples: bytes, frames: int, *, header: int = 1024, **fields: str) -> bytes:
    """A NIST SPHERE file; `fields` are `name=<type> <value>` and replace or add to the usual."""
    usual = {
        "channel_count": "-i 1",
        "sample_count": f"-i {frames}",
        "sample_rate": "-i 8000",
        "sample_n_bytes": "-i 2",
        "sample_byte_format": "-s2 01",
        "sample_sig_bits": "-i 16",
        "sample_coding": "-s3 pcm",
    }
    lines = [f"{name} {text}" for name, text in (usual | fields).items() if text]
    text = "\n".join(["NIST_1A", f"{header:7d}", *lines, "end_head", ""])
    return text.encode().ljust(header, b"\0") + samples


def crc_bit_by_bit(page: bytes) -> int:
    """The checksum of RFC 3533: polynomial 0x04c11db7, highest bit first, starting from 0."""
    register = 0
    for byte in page:
        register ^= byte << 24
        for _ in range(8):
            carry = register & 0x80000000
            register = (register << 1 & 0xFFFFFFFF) ^ (0x04C11DB7 if carry else 0)
    return register


def ogg_page(
    payload: bytes,
    *,
    number: int,
    serial: int = 7,
    flags: int = 0,
    granule: int = 0,
    lacing: bytes | None = None,
) -> bytes:
    """One page, with its checksum; the payload is one packet unless `lacing` says otherwise."""
    if lacing is None:
        lacing = b"\xff" * (len(payload) // 255) + bytes([len(payload) % 255])
    head = b"OggS" + struct.pack("<BBqIII", 0, flags, granule, serial, number, 0)
    page = head + bytes([len(lacing)]) + lacing + payload
    return page[:22] + crc_bit_by_bit(page).to_bytes(4, "little") + page[26:]


def ramp(frames: int, channels: int = 1, bits: int = 16) -> np.ndarray:
    """(frames, channels) whole numbers over the full range of so many bits, both ends included."""
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    steps = np.linspace(low, high, frames * channels).round().astype(np.int64)
    return np.clip(steps, low, high).reshape(frames, channels)


def as_pcm(values: np.ndarray, bits: int, order: Order = "little") -> bytes:
    """Whole numbers, interleaved, in so many bits each."""
    size = bits // 8
    return b"".join(int(v).to_bytes(size, order, signed=True) for v in values.ravel())
