"""Containers of plain samples: WAV and its long forms, AIFF, CAF, AU and NIST SPHERE.

WAV has sizes of 32 bits (RIFF), of 64 bits in a chunk `ds64` (RF64, BW64), or is Sony's W64. Lists
of (name, size, payload). Sizes are written last, by seeking back, so a copy that stopped half-way
promises more than it holds. libsndfile shortens such a file without a word. Layouts: Microsoft's
multimedia programming reference, EBU Tech 3306, ITU-R BS.2088.

AIFF, CAF, AU and NIST SPHERE promise bytes of samples in their headers. libsndfile opens all four
cut anywhere behind the header and delivers what is left without a word. Layouts: Apple's AIFF 1.3,
AIFF-C and Core Audio Format 1.0; Sun's audio header; NIST SPHERE 2.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, replace
from functools import partial
from typing import BinaryIO

from earmill.pipeline.audio.containers.base import (
    BareSamples,
    ByteOrder,
    Probe,
    Trim,
    no_samples,
    open_window,
    read_at,
    uint,
)
from earmill.pipeline.audio.containers.mpeg import probe_mpeg
from earmill.pipeline.audio.containers.sizes import ChunkForm, Promise, chunks

FORMS = (b"RIFF", b"RIFX", b"RF64", b"BW64")
LONG_SIZE = 0xFFFFFFFF

PCM, FLOAT, A_LAW, MU_LAW, EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
# Codecs whose blocks are one sample of every channel.
PLAIN_CODECS = frozenset({PCM, FLOAT, A_LAW, MU_LAW, EXTENSIBLE})
MPEG_CODECS = frozenset({0x50, 0x55})
# libsndfile's names, by codec and bytes of a sample.
SUBTYPES = {
    (PCM, 1): "PCM_U8",
    (PCM, 2): "PCM_16",
    (PCM, 3): "PCM_24",
    (PCM, 4): "PCM_32",
    (FLOAT, 4): "FLOAT",
    (FLOAT, 8): "DOUBLE",
    (A_LAW, 1): "ALAW",
    (MU_LAW, 1): "ULAW",
}

# W64 names are GUIDs that begin with the RIFF name in lower case; all but the first end alike. The
# GUIDs of Sony's own chunks (markers, summaries) have the last six bytes in common with them.
W64_RIFF = bytes.fromhex("726966662e91cf11a5d628db04c10000")
W64_TAIL = bytes.fromhex("f3acd3118cd100c04f8edb8a")
W64_HEADER_BYTES = 24


def riff_chunks(order: ByteOrder) -> ChunkForm:
    """The chunks of RIFF and AIFF."""
    return ChunkForm(8, lambda head: (head[:4], uint(head[4:], order)))


def _w64_header(head: bytes) -> tuple[bytes, int]:
    if head[4:16] == W64_TAIL or head[:16] == W64_RIFF:
        name = head[:4]
    else:
        name = b"guid" if head[10:16] == W64_TAIL[6:] else bytes(4)
    return name, max(0, uint(head[16:24], "little") - W64_HEADER_BYTES)


W64_CHUNKS = ChunkForm(W64_HEADER_BYTES, _w64_header, align=8)


def is_riff(head: bytes) -> bool:
    return head[:4] in FORMS and head[8:12] == b"WAVE"


@dataclass(frozen=True)
class Format:
    """The contents of a format chunk.

    Args:
        codec: Number of the codec; of extensible formats, that of the sub-format.
        rate_hz: Sample rate.
        frame_bytes: Bytes of one sample of every channel; None where they are not fixed.
        bare: How the samples are read without a header, if they can be.
        is_extensible: The chunk has the longer form.
    """

    codec: int = 0
    rate_hz: int | None = None
    frame_bytes: int | None = None
    bare: BareSamples | None = None
    is_extensible: bool = False

    @property
    def name(self) -> str | None:
        """Name of a codec that is more than bare samples, for messages."""
        return None if self.bare else f"WAV codec {self.codec:#06x}"

    @classmethod
    def of(cls, fields: bytes, order: ByteOrder) -> Format:
        tag, channels = uint(fields[0:2], order), uint(fields[2:4], order)
        rate_hz, block = uint(fields[4:8], order), uint(fields[12:14], order)
        codec = uint(fields[24:26], order) if tag == EXTENSIBLE else tag
        if tag not in PLAIN_CODECS or not block:
            return cls(codec, rate_hz)
        subtype = SUBTYPES.get((codec, block // max(1, channels)))
        bare = None
        if subtype is not None and rate_hz and channels and block % channels == 0:
            bare = BareSamples(rate_hz, channels, subtype, order)
        return cls(codec, rate_hz, block, bare, tag == EXTENSIBLE)


def probe_riff(stream: BinaryIO, nbytes: int, *, behind: bool = True) -> Probe:
    """RIFF, big-endian RIFX, RF64 and BW64."""
    magic = read_at(stream, 0, 4)
    order: ByteOrder = "big" if magic == b"RIFX" else "little"
    form, found, long_size = riff_chunks(order), Format(), None
    for name, start, size in chunks(stream, 12, nbytes, form):
        if name == b"fmt ":
            found = Format.of(read_at(stream, start, min(size, 40)), order)
        elif name == b"ds64":
            long_size = uint(read_at(stream, start, 16)[8:16], order)
        elif name == b"data":
            # EBU Tech 3306: the long size counts only where the short one is -1.
            is_long = long_size is not None and size == LONG_SIZE
            promise = Promise(
                "riff",
                start=start,
                size=long_size if is_long else size,
                frame_bytes=found.frame_bytes,
                bare=found.bare,
                codec=found.name,
                form=form,
                others=() if long_size is None or is_long else (long_size,),
                wraps=not is_long,
                header=partial(_with_size, stream, start, order),
            )
            probe = promise.held_against(stream, nbytes, behind=behind)
            if found.codec in MPEG_CODECS and behind:
                probe = _mpeg_inside(stream, promise, probe, nbytes)
            return _named(replace(probe, rate_hz=found.rate_hz), promise, found, magic)
    return no_samples("riff", "data chunk", nbytes)


def _with_size(stream: BinaryIO, start: int, order: ByteOrder, size: int) -> bytes:
    """The header in front of the samples with another size of them."""
    return read_at(stream, 0, start - 4) + size.to_bytes(4, order)


def _named(probe: Probe, promise: Promise, found: Format, magic: bytes) -> Probe:
    """The probe with the container's name where the decoder has another one."""
    if magic == b"BW64" and probe.samples is None and found.bare is not None:
        # libsndfile does not know this form.
        stop = None if promise.size is None else promise.start + promise.size
        probe = replace(probe, samples=found.bare, start=promise.start, stop=stop)
    if probe.samples is None and probe.container is None:
        return probe
    short = "WAVEX" if found.is_extensible else "WAV"
    names = {b"RF64": "RF64", b"BW64": "BW64"}
    return replace(probe, container=names.get(magic, short))


def _mpeg_inside(stream: BinaryIO, promise: Promise, probe: Probe, nbytes: int) -> Probe:
    """An MP3 with a WAV header: what libsndfile and FFmpeg know of an MP3 they ignore in here."""
    if probe.damage is not None:
        return probe
    size = nbytes - promise.start if probe.header_size else promise.size or 0
    inside = open_window(stream, promise.start, promise.start + size)
    found = probe_mpeg(inside, size)
    if found is None:
        return replace(probe, damage="no MPEG frames in its data chunk")
    start, stop = promise.start, promise.start + size
    found = replace(found, header_size=probe.header_size, container="WAV", stop=stop)
    if found.prefix and not found.start:
        # No encoder's tag says how long its delay is.
        return replace(found, by_ffmpeg=True, prefix=b"", start=start)
    return replace(found, start=start + found.start)


def probe_w64(stream: BinaryIO, nbytes: int, *, behind: bool = True) -> Probe:
    """W64: sizes of 64 bits that count their own header, payloads padded to 8 bytes.

    libsndfile takes all that is behind the samples for samples, padding and further chunks: only
    the header says how many there are.
    """
    found = Format()
    for name, start, size in chunks(stream, 40, nbytes, W64_CHUNKS):
        if name == b"fmt ":
            found = Format.of(read_at(stream, start, min(size, 40)), "little")
        elif name == b"data":
            promise = Promise(
                "w64",
                start=start,
                size=size,
                frame_bytes=found.frame_bytes,
                bare=found.bare,
                codec=found.name,
                form=W64_CHUNKS,
                extra=W64_HEADER_BYTES,
                wraps=False,
            )
            probe = promise.held_against(stream, nbytes, behind=behind)
            if probe.header_size is not None:
                return replace(probe, container="W64")
            frames = size // found.frame_bytes if found.frame_bytes else None
            return replace(probe, declared_frames=frames)
    return no_samples("w64", "data chunk", nbytes)


PCM_SUBTYPES = {1: "PCM_S8", 2: "PCM_16", 3: "PCM_24", 4: "PCM_32"}
FLOAT_SUBTYPES = {4: "FLOAT", 8: "DOUBLE"}
MU_LAW_SUBTYPES, A_LAW_SUBTYPES = {1: "ULAW"}, {1: "ALAW"}
# Compression types of AIFF-C that compress nothing: libsndfile's names by bytes of a sample.
AIFC_PLAIN = {
    **dict.fromkeys((b"NONE", b"twos", b"sowt", b"in24", b"in32"), PCM_SUBTYPES),
    **dict.fromkeys((b"fl32", b"FL32", b"fl64", b"FL64"), FLOAT_SUBTYPES),
    **dict.fromkeys((b"ulaw", b"ULAW"), MU_LAW_SUBTYPES),
    **dict.fromkeys((b"alaw", b"ALAW"), A_LAW_SUBTYPES),
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
    widths = {b"lpcm": FLOAT_SUBTYPES if flags & CAF_IS_FLOAT else PCM_SUBTYPES}
    widths |= {b"ulaw": MU_LAW_SUBTYPES, b"alaw": A_LAW_SUBTYPES}
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
