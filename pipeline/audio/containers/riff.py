"""WAV in its sizes: RIFF (32 bit), RF64 and BW64 (a chunk `ds64` holds the sizes), Sony's W64.

Lists of (name, size, payload). Sizes are written last, by seeking back, so a copy that stopped
half-way promises more than it holds. libsndfile shortens such a file without a word.
Layouts: Microsoft's multimedia programming reference, EBU Tech 3306, ITU-R BS.2088.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import BinaryIO

from earmill.pipeline.audio.containers.base import (
    BareSamples,
    ByteOrder,
    Probe,
    no_samples,
    read_at,
    uint,
)
from earmill.pipeline.audio.containers.mpeg import probe_mpeg
from earmill.pipeline.audio.containers.sizes import ChunkForm, Promise, chunks
from earmill.pipeline.audio.containers.window import open_window

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
