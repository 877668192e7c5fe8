"""Containers of plain samples: WAV and its long forms, AIFF, CAF, AU and NIST SPHERE.

WAV is a list of chunks (name, size, payload). Its sizes have 32 bits (RIFF), or 64 bits in a chunk
`ds64` (RF64, BW64) or in each chunk (Sony's W64). The headers of AIFF, CAF, AU and NIST SPHERE
state the bytes of samples. libsndfile opens files that are cut anywhere behind the header, and
delivers the rest silently. Layouts: Microsoft's multimedia programming reference, EBU Tech 3306,
ITU-R BS.2088; Apple's AIFF 1.3, AIFF-C and Core Audio Format 1.0; Sun's audio header; NIST SPHERE.

A stated size is believed if only chunks and tags stand behind the samples. A file that is shorter
than its size is cut, unless the size is a placeholder: programs write it before they know the size.
A size of 32 bits that wrapped is found by adding multiples of 4 GiB until it fits. If no size fits,
the row is refused, because the bytes behind the samples could be samples.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import BinaryIO

from earmill.pipeline.audio.containers.base import (
    BareSamples,
    ByteOrder,
    ChunkFormat,
    HeaderSize,
    Probe,
    Trim,
    chunks,
    no_audio,
    no_samples,
    open_window,
    read_at,
    uint,
)
from earmill.pipeline.audio.containers.mpeg import probe_mpeg

RIFF_NAMES = (b"RIFF", b"RIFX", b"RF64", b"BW64")
# Bytes in front of the samples besides the fields of the format chunk, if there are no others.
RIFF_FIXED_BYTES = 28
LONG_SIZE = 0xFFFFFFFF

# libsndfile's names by bytes of a sample.
PCM_SUBTYPES = {1: "PCM_S8", 2: "PCM_16", 3: "PCM_24", 4: "PCM_32"}
FLOAT_SUBTYPES = {4: "FLOAT", 8: "DOUBLE"}
MU_LAW_SUBTYPES, A_LAW_SUBTYPES = {1: "ULAW"}, {1: "ALAW"}

# Codecs of WAV whose blocks are one sample of every channel.
PCM, FLOAT, A_LAW, MU_LAW, EXTENSIBLE = 1, 3, 6, 7, 0xFFFE
WAV_PLAIN = {
    PCM: PCM_SUBTYPES | {1: "PCM_U8"},
    FLOAT: FLOAT_SUBTYPES,
    A_LAW: A_LAW_SUBTYPES,
    MU_LAW: MU_LAW_SUBTYPES,
}
MPEG_CODECS = frozenset({0x50, 0x55})

# W64 names are GUIDs that begin with the RIFF name in lower case; all but the first end alike. The
# GUIDs of Sony's own chunks (markers, summaries) have the last six bytes in common with them.
W64_RIFF = bytes.fromhex("726966662e91cf11a5d628db04c10000")
W64_TAIL = bytes.fromhex("f3acd3118cd100c04f8edb8a")
W64_HEADER_BYTES = 24
# An extensible format names its codec by a GUID of two bytes and this end.
CODEC_TAIL = bytes.fromhex("000000001000800000aa00389b71")
# Limits of libsndfile, which takes other numbers for a broken header.
MOST_CHANNELS, MOST_HZ = 1024, (1 << 31) - 1


WRAP = 1 << 32
# Placeholders are about 2 or 4 GiB: programs subtract a header, or round to frames. Files whose
# true size lies in this range are rarer.
NEAR_BYTES = 4096
NO_SIZE = 1 << 62  # Sizes of 64 bits that no file has.


@dataclass(frozen=True)
class SampleForm:
    """The form of samples by a header. Bytes of one sample of every channel are known if they are
    fixed. Samples can be read without their header, in the form `bare`, or the codec has a name."""

    frame_bytes: int | None = None
    bare: BareSamples | None = None
    codec: str | None = None

    @classmethod
    def of(
        cls,
        codec: str,
        rate_hz: int,
        channels: int,
        frame_bytes: int,
        subtypes: Mapping[int, str],
        order: ByteOrder,
    ) -> SampleForm:
        """Return the form by the fields of a header and libsndfile's names for the codec."""
        width, rest = divmod(frame_bytes, max(1, channels))
        subtype = None if rest else subtypes.get(width)
        if subtype is None or not (rate_hz and channels):
            return cls(frame_bytes or None, codec=codec)
        return cls(frame_bytes, BareSamples(rate_hz, channels, subtype, order, frame_bytes))


@dataclass(frozen=True)
class StatedSize:
    """The size of the samples by the header, and their form."""

    kind: str  # Kind of the container, see `Probe`.
    start: int  # First byte of the samples.
    size: int | None  # Bytes of samples; None if the header says that it does not know.
    samples: SampleForm
    form: ChunkFormat | None = None  # Form of the chunks behind the samples.
    extra: int = 0  # Bytes that the header's size counts besides the samples.
    others: tuple[int, ...] = ()  # Sizes that the header states in other places.
    wraps: bool = True  # The size has 32 bits.
    # Byte order of a size in the four bytes in front of the samples, which may be replaced.
    replaced: ByteOrder | None = None
    container: str | None = None  # Name for samples without their header.

    def compared(self, stream: BinaryIO, nbytes: int, *, behind: bool) -> Probe:
        present = max(0, nbytes - self.start)
        believed, bare = Probe(self.kind, codec=self.samples.codec), self.samples.bare
        if self.size is None:
            return self._all_of(stream, present, "unknown")
        if self.size > present:
            frame_bytes = self.samples.frame_bytes or 1
            if self._is_placeholder(self.size):
                return self._all_of(stream, present, "ignored")
            if present // frame_bytes >= self.size // frame_bytes:
                return believed
            return self._refused(f"expected {self.size} bytes of samples, got {present}")
        if not behind or self._nothing_lost(stream, self.size, nbytes):
            return believed
        if bare is not None:
            others = [size for size in self.others if 0 < size <= present]
            wrapped = range(self.size + WRAP, present + 1, WRAP) if self.wraps else ()
            for size in (*others, *wrapped):
                if self._nothing_lost(stream, size, nbytes):
                    return self.as_bare(size, "ignored")
        if self._is_placeholder(self.size) and (bare or (self.replaced and present < WRAP)):
            return self._all_of(stream, present, "ignored")
        return self._refused(
            f"expected {self.size} bytes of samples, got {present - self.size} more that are no "
            "chunks: more samples, or another file"
        )

    def _is_placeholder(self, size: int) -> bool:
        counted = size + self.extra
        if not self.wraps:
            return size == 0 or counted >= NO_SIZE
        near = abs(counted - WRAP // 2) <= NEAR_BYTES or WRAP - NEAR_BYTES <= counted < WRAP
        return near or size == 0

    def _nothing_lost(self, stream: BinaryIO, size: int, nbytes: int) -> bool:
        end = self.start + size
        if nbytes - end < max(2, self.samples.frame_bytes or 0):
            return True
        return no_audio(stream, end, nbytes, self.form, payload=size)

    def _all_of(self, stream: BinaryIO, present: int, why: HeaderSize) -> Probe:
        """Return the finding that the samples reach to the end of the file."""
        believed = Probe(self.kind, codec=self.samples.codec)
        if not present:
            return believed
        if self.samples.bare is not None:
            return self.as_bare(present, why)
        found = replace(believed, header_size=why)
        if self.replaced is None or present >= WRAP:
            return found
        header = read_at(stream, 0, self.start - 4) + present.to_bytes(4, self.replaced)
        return replace(found, prefix=header, start=self.start)

    def as_bare(self, size: int, why: HeaderSize | None = None) -> Probe:
        """Return the finding that `size` bytes are samples to be read without their header."""
        return Probe(
            self.kind,
            header_size=why,
            samples=self.samples.bare,
            start=self.start,
            stop=self.start + size,
            container=self.container,
        )

    def _refused(self, why: str) -> Probe:
        frame_bytes = self.samples.frame_bytes
        frames = (self.size or 0) // frame_bytes if frame_bytes else None
        return Probe(self.kind, damage=why, declared_frames=frames, codec=self.samples.codec)


# Chunks of RIFF and AIFF, by byte order.
RIFF_CHUNKS: Mapping[ByteOrder, ChunkFormat] = {
    "little": ChunkFormat(8, lambda head: (head[:4], int.from_bytes(head[4:], "little"))),
    "big": ChunkFormat(8, lambda head: (head[:4], int.from_bytes(head[4:], "big"))),
}


def _w64_header(head: bytes) -> tuple[bytes, int]:
    if head[4:16] == W64_TAIL or head[:16] == W64_RIFF:
        name = head[:4]
    else:
        name = b"guid" if head[10:16] == W64_TAIL[6:] else bytes(4)
    return name, max(0, uint(head[16:24], "little") - W64_HEADER_BYTES)


W64_CHUNKS = ChunkFormat(W64_HEADER_BYTES, _w64_header, align=8)


@dataclass(frozen=True)
class WaveFormat:
    """The contents of a format chunk."""

    codec: int = 0  # Number of the codec; for extensible formats, number of the sub-format.
    rate_hz: int | None = None
    samples: SampleForm = SampleForm(codec="WAV codec 0x0000")
    is_extensible: bool = False  # The chunk has the longer form.
    # First byte of the samples in a file that has no other chunks; None if the fields disagree.
    plain_start: int | None = None

    @classmethod
    def of(cls, fields: bytes, order: ByteOrder) -> WaveFormat:
        words = "<HHIIHH" if order == "little" else ">HHIIHH"
        tag, channels, rate_hz, _, block, bits = struct.unpack(words, fields[:16].ljust(16, b"\0"))
        codec = uint(fields[24:26], order) if tag == EXTENSIBLE else tag
        name = f"WAV codec {codec:#06x}"
        if tag not in (*WAV_PLAIN, EXTENSIBLE) or not block:
            return cls(codec, rate_hz, SampleForm(codec=name))
        subtypes = WAV_PLAIN.get(codec, {})
        samples = SampleForm.of(name, rate_hz, channels, block, subtypes, order)
        agree = samples.bare is not None and bits * channels == 8 * block
        agree &= channels <= MOST_CHANNELS and rate_hz <= MOST_HZ and order == "little"
        if tag == EXTENSIBLE:
            agree &= fields[18:20] == fields[14:16] and fields[26:] == CODEC_TAIL
        start = RIFF_FIXED_BYTES + len(fields) if agree else None
        return cls(codec, rate_hz, samples, tag == EXTENSIBLE, start)


def probe_riff(stream: BinaryIO, nbytes: int, *, behind: bool) -> Probe:
    """RIFF, big-endian RIFX, RF64 and BW64."""
    magic = read_at(stream, 0, 4)
    order: ByteOrder = "big" if magic == b"RIFX" else "little"
    form, found, long_size = RIFF_CHUNKS[order], WaveFormat(), None
    for name, start, size in chunks(stream, 12, nbytes, form):
        if name == b"fmt ":
            found = WaveFormat.of(read_at(stream, start, min(size, 40)), order)
        elif name == b"ds64":
            long_size = uint(read_at(stream, start, 16)[8:16], order)
        elif name == b"data":
            plain, end = "WAVEX" if found.is_extensible else "WAV", start + size
            container = {b"RF64": "RF64", b"BW64": "BW64"}.get(magic, plain)
            # EBU Tech 3306: the long size counts only where the short one is -1.
            is_long = long_size is not None and size == LONG_SIZE
            stated = StatedSize(
                "riff",
                start=start,
                size=long_size if is_long else size,
                samples=found.samples,
                form=form,
                others=() if long_size is None or is_long else (long_size,),
                wraps=not is_long,
                replaced=order,
                container=container,
            )
            is_plain = magic == b"RIFF" and start == found.plain_start and size > 0
            if is_plain and end <= nbytes <= end + size % 2:
                # libsndfile takes twice the time for the header and the samples together.
                return replace(stated.as_bare(size), rate_hz=found.rate_hz)
            probe = stated.compared(stream, nbytes, behind=behind)
            if found.codec in MPEG_CODECS and behind:
                probe = _mpeg_inside(stream, stated, probe, nbytes)
            if magic == b"BW64" and probe.samples is None and (bare := found.samples.bare):
                # libsndfile does not read BW64.
                stop = None if stated.size is None else start + stated.size
                probe = replace(probe, samples=bare, start=start, stop=stop, container=container)
            return replace(probe, rate_hz=found.rate_hz)
    return no_samples("riff", "data chunk", nbytes)


def _mpeg_inside(stream: BinaryIO, stated: StatedSize, probe: Probe, nbytes: int) -> Probe:
    """Probe an MP3 with a WAV header. Both decoders ignore its count tag and delay in there."""
    if probe.damage is not None:
        return probe
    size = nbytes - stated.start if probe.header_size else stated.size or 0
    start, stop = stated.start, stated.start + size
    found = probe_mpeg(open_window(stream, start, stop), size)
    if found is None:
        return replace(probe, damage="no MPEG frames in its data chunk")
    found = replace(found, header_size=probe.header_size, container=stated.container, stop=stop)
    if found.prefix and not found.start:
        # No encoder's tag says how long its delay is.
        return replace(found, by_ffmpeg=True, prefix=b"", start=start)
    return replace(found, start=start + found.start)


def probe_w64(stream: BinaryIO, nbytes: int, *, behind: bool) -> Probe:
    """W64: sizes of 64 bits that count their own header, payloads padded to 8 bytes. The number of
    samples comes from the header, because libsndfile takes padding and chunks behind the samples
    for samples."""
    found = WaveFormat()
    for name, start, size in chunks(stream, 40, nbytes, W64_CHUNKS):
        if name == b"fmt ":
            found = WaveFormat.of(read_at(stream, start, min(size, 40)), "little")
        elif name == b"data":
            stated = StatedSize(
                "w64",
                start=start,
                size=size,
                samples=found.samples,
                form=W64_CHUNKS,
                extra=W64_HEADER_BYTES,
                wraps=False,
            )
            probe = stated.compared(stream, nbytes, behind=behind)
            if probe.header_size is not None:
                return replace(probe, container="W64")
            frame_bytes = found.samples.frame_bytes
            return replace(probe, declared_frames=size // frame_bytes if frame_bytes else None)
    return no_samples("w64", "data chunk", nbytes)


# Compression types of AIFF-C that compress nothing: libsndfile's names by bytes of a sample.
AIFC_PLAIN = {
    **dict.fromkeys((b"NONE", b"twos", b"sowt", b"in24", b"in32"), PCM_SUBTYPES),
    **dict.fromkeys((b"fl32", b"FL32", b"fl64", b"FL64"), FLOAT_SUBTYPES),
    **dict.fromkeys((b"ulaw", b"ULAW"), MU_LAW_SUBTYPES),
    **dict.fromkeys((b"alaw", b"ALAW"), A_LAW_SUBTYPES),
    b"raw ": {1: "PCM_U8"},
}
CAF_CHUNKS = ChunkFormat(
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


def probe_aiff(stream: BinaryIO, nbytes: int, *, behind: bool) -> Probe:
    """AIFF and AIFF-C: big-endian chunks, padded to even; samples in `SSND` behind two words."""
    samples, form = SampleForm(), RIFF_CHUNKS["big"]
    others: tuple[int, ...] = ()
    for name, start, size in chunks(stream, 12, nbytes, form):
        if name == b"COMM":
            fields = read_at(stream, start, min(size, 22))
            channels, frames, bits = struct.unpack(">HIH", fields[:8].ljust(8, b"\0"))
            kind, codec = fields[18:22] or b"NONE", f"AIFF codec {fields[18:22]!a}"
            samples, others = SampleForm(codec=codec), ()
            if kind in AIFC_PLAIN:
                frame_bytes = channels * ((bits + 7) // 8)
                order: ByteOrder = "little" if kind == b"sowt" else "big"
                rate_hz, subtypes = _extended(fields[8:18]), AIFC_PLAIN[kind]
                samples = SampleForm.of(codec, rate_hz, channels, frame_bytes, subtypes, order)
                others = (frames * frame_bytes,)
        elif name == b"SSND":
            # Two words; the first word is the number of bytes in front of the samples.
            first = 8 + uint(read_at(stream, start, 4), "big")
            stated = StatedSize(
                "aiff",
                start=start + first,
                size=max(0, size - first),
                samples=samples,
                form=form,
                extra=first,
                others=others,
                container="AIFF",
            )
            return stated.compared(stream, nbytes, behind=behind)
    return no_samples("aiff", "SSND chunk", nbytes)


def _extended(raw: bytes) -> int:
    """Return a sample rate from the 80-bit float of AIFF; 0 if no file has such a rate."""
    exponent, mantissa = uint(raw[:2], "big") - 16383, uint(raw[2:10], "big")
    return mantissa >> (63 - exponent) if 0 <= exponent < 32 else 0


def probe_caf(stream: BinaryIO, nbytes: int, *, behind: bool) -> Probe:
    """CAF: chunks with 64-bit sizes; `data` starts with a word of its own, -1 means to the end."""
    samples, rate_hz, trim = SampleForm(), 0, None
    found: Probe | None = None
    for name, start, size in chunks(stream, 8, nbytes, CAF_CHUNKS):
        if name == b"desc":
            rate_hz, samples = _caf_format(read_at(stream, start, 32))
        elif name == b"pakt" and rate_hz:
            valid, skip = struct.unpack(">qi", read_at(stream, start + 8, 12).ljust(12, b"\0"))
            trim = Trim(rate_hz, skip, valid) if skip >= 0 and valid > 0 else None
        elif name == b"data":
            stated = StatedSize(
                "caf",
                start=start + 4,
                size=None if size == CAF_UNKNOWN else max(0, size - 4),
                samples=samples,
                form=CAF_CHUNKS,
                extra=4,
                wraps=False,
                container="CAF",
            )
            found = stated.compared(stream, nbytes, behind=behind)
            if samples.bare is not None:
                return found
    return no_samples("caf", "data chunk", nbytes) if found is None else replace(found, trim=trim)


def _caf_format(fields: bytes) -> tuple[int, SampleForm]:
    codec = f"CAF codec {fields[8:12]!a}"
    if len(fields) < 32:
        return 0, SampleForm(codec=codec)
    rate, kind, flags, packet, frames, channels = struct.unpack(">d4s4I", fields[:28])
    rate_hz = int(rate) if 0 < rate < 1 << 31 else 0
    if frames != 1 or not packet:  # compressed: packets have several frames, or no fixed size
        return rate_hz, SampleForm(codec=codec)
    widths = {b"lpcm": FLOAT_SUBTYPES if flags & CAF_IS_FLOAT else PCM_SUBTYPES}
    widths |= {b"ulaw": MU_LAW_SUBTYPES, b"alaw": A_LAW_SUBTYPES}
    order: ByteOrder = "little" if flags & CAF_IS_LITTLE else "big"
    return rate_hz, SampleForm.of(codec, rate_hz, channels, packet, widths.get(kind, {}), order)


def probe_au(stream: BinaryIO, nbytes: int, *, behind: bool) -> Probe:
    """AU, `.snd`: offset and size of the data, then encoding, rate, channels; either byte order."""
    head = read_at(stream, 0, 24)
    if len(head) < 24:
        return no_samples("au", "whole header", nbytes)
    order: ByteOrder = "little" if head[:4] == b"dns." else "big"
    words = "<5I" if order == "little" else ">5I"
    offset, size, encoding, rate_hz, channels = struct.unpack(words, head[4:])
    width, subtype = AU_PLAIN.get(encoding, (0, ""))
    codec, subtypes = f"AU encoding {encoding}", {width: subtype} if width else {}
    samples = SampleForm.of(codec, rate_hz, channels, width * channels, subtypes, order)
    data = None if size == AU_UNKNOWN else size
    stated = StatedSize("au", start=offset, size=data, samples=samples, container="AU")
    return stated.compared(stream, nbytes, behind=behind)


def probe_nist(stream: BinaryIO, nbytes: int, *, behind: bool) -> Probe:
    """NIST SPHERE: text fields in a header whose size is its second line. libsndfile takes
    everything behind the header for samples, so the number of samples comes from the header."""
    second = read_at(stream, 8, 8).strip()
    size = int(second) if second.isdigit() else 0
    header = read_at(stream, 0, min(size, NIST_MAX_HEADER))
    fields = dict(NIST_FIELD.findall(header.partition(b"end_head")[0]))
    numbers = {name: int(text) for name, text in fields.items() if text.isdigit()}
    frames = numbers.get(b"sample_count", 0)
    if not NIST_PLAIN.match(fields.get(b"sample_coding", b"")):
        return Probe("nist")
    if not frames:
        return Probe("nist", header_size="unknown")
    width = numbers.get(b"channel_count", 1) * numbers.get(b"sample_n_bytes", 2)
    samples = SampleForm(max(1, width))
    stated = StatedSize("nist", size, frames * max(1, width), samples)
    return replace(stated.compared(stream, nbytes, behind=behind), declared_frames=frames)
