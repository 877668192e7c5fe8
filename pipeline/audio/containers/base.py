"""The findings about a file, and reading of what stands around its samples: chunks and tags.

Every walk is bounded by `MAX_PARTS`: no audio program writes more parts in front of samples.

Tags are ID3 (versions 1 and 2) and APE (version 2). Taggers put them around files of any format.
Tags behind the audio matter only if nothing else says where the audio ends. Layouts: id3.org, ID3
tag version 2.4.0, 3.1 and 3.4; wiki.hydrogenaud.io, APEv2 specification.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Literal

from earmill.pipeline.common.byte_streams import SeekableFile

ByteOrder = Literal["big", "little"]
HeaderSize = Literal["ignored", "unknown"]

# Chunks, boxes or tags in front of the samples; real files have a few dozen at most.
MAX_PARTS = 4096
FARTHEST = (1 << 63) - 1  # Behind the end of any file, and a number that seek takes.


@dataclass(frozen=True)
class BareSamples:
    """A form of uncompressed samples, which can be read without their header."""

    rate_hz: int
    channels: int
    subtype: str  # Name of the sample format in libsndfile.
    order: ByteOrder
    frame_bytes: int  # Bytes of one sample of every channel.


@dataclass(frozen=True)
class Trim:
    """The part of a stream that is sound, as counted by the container."""

    rate_hz: int  # Sample rate of the counts.
    skip: int  # Frames of encoder delay before the sound.
    frames: int


@dataclass(frozen=True)
class Probe:
    """The findings about one file."""

    kind: str  # Name of the container, from the first bytes of the file.
    damage: str | None = None  # Damage in words; None if none is known.
    shifts_time: bool = False  # The damage moves samples: no span can be trusted.
    # Frames of the file, if the decoder reports another number or none.
    declared_frames: int | None = None
    rate_hz: int | None = None  # Rate of the header, which libsndfile may refuse.
    slack_frames: int = 0  # Frames that the decoder may leave out although the file is whole.
    # `ignored`: the header's size of the samples cannot be right. `unknown`: the header states that
    # it does not know the size.
    header_size: HeaderSize | None = None
    unterminated: bool = False  # The stream ends without its end mark.
    prefix: bytes = b""  # Bytes to decode in front of the stream.
    start: int = 0  # First byte to decode.
    stop: int | None = None  # Byte behind the last one to decode; None is the end of the file.
    samples: BareSamples | None = None  # Form of samples that are read without their header.
    container: str | None = None  # Name, if the decoder would give another one.
    by_ffmpeg: bool = False  # FFmpeg decodes it; libsndfile cannot, or does it wrongly.
    # Name of a codec that libsndfile may not know, for messages; FFmpeg then decodes it.
    codec: str | None = None
    trim: Trim | None = None  # The part of the decoded frames that is sound.
    parts: tuple[Probe, ...] = ()  # Complete streams in a row, each with its start and stop.


def read_at(stream: BinaryIO, position: int, size: int) -> bytes:
    """Return `size` bytes from `position` on, fewer at the end; `position` may be behind it."""
    stream.seek(min(position, FARTHEST))
    return stream.read(size)


def uint(raw: bytes, order: ByteOrder) -> int:
    return int.from_bytes(raw, order)


def no_samples(kind: str, part: str, nbytes: int) -> Probe:
    """Return the finding that a header has no samples behind it."""
    return Probe(kind, damage=f"no {part} in {nbytes} bytes")


ID3V1_BYTES = 128
APE_BYTES = 32
APE = b"APETAGEX"
APE_HAS_HEADER = 1 << 31
ID3V2_BYTES = 10
ID3V2_HAS_FOOTER = 0x10


def skip_tags(stream: BinaryIO, position: int = 0) -> int:
    """Return the byte behind all tags that start at `position`; `position` itself without any."""
    for _ in range(MAX_PARTS):
        size = _tag_bytes(read_at(stream, position, APE_BYTES))
        if not size:
            break
        position += size
    return position


def audio_end(stream: BinaryIO, nbytes: int) -> int:
    """Return the byte at which the tags at the end of a file start; `nbytes` without any."""
    for _ in range(MAX_PARTS):
        tail = read_at(stream, max(0, nbytes - ID3V1_BYTES), min(ID3V1_BYTES, nbytes))
        if len(tail) == ID3V1_BYTES and tail[:3] == b"TAG":
            size = ID3V1_BYTES
        elif tail[-APE_BYTES:-24] == APE:
            footer = tail[-APE_BYTES:]
            size = uint(footer[12:16], "little")
            size += APE_BYTES if uint(footer[20:24], "little") & APE_HAS_HEADER else 0
        elif tail[-ID3V2_BYTES:-7] == b"3DI":
            size = 2 * ID3V2_BYTES + _seven_bits(tail[-4:])
        else:
            return nbytes
        if not 0 < size <= nbytes:
            return nbytes
        nbytes -= size
    return nbytes


def _tag_bytes(head: bytes) -> int:
    """Return the size of the tag that starts with these bytes; 0 if no tag does."""
    if head[:3] == b"ID3" and len(head) >= ID3V2_BYTES:
        footer = ID3V2_BYTES if head[5] & ID3V2_HAS_FOOTER else 0
        return ID3V2_BYTES + _seven_bits(head[6:10]) + footer
    if head[:8] == APE and len(head) == APE_BYTES:
        return APE_BYTES + uint(head[12:16], "little")
    return ID3V1_BYTES if head[:3] == b"TAG" else 0


def _seven_bits(raw: bytes) -> int:
    """Return a size of ID3v2: four groups of seven bits."""
    return raw[0] << 21 | raw[1] << 14 | raw[2] << 7 | raw[3]


MOST_PADDING = 4096  # Recorders fill the last sector of a file with zeros.

# Chunks that stand behind samples. A chunk that is cut is known by its name alone.
KNOWN_CHUNKS = frozenset(
    # WAV, RF64 and W64.
    b"LIST|list|INFO|bext|id3 |ID3 |cue |smpl|inst|fact|PEAK|JUNK|junk|FLLR|PAD |pad |iXML|aXML|"
    b"axml|chna|_PMX|DISP|acid|cart|plst|labl|note|levl|minf|elm1|regn|umid|afsp|summ|mark|"
    # AIFF.
    b"MARK|INST|MIDI|AESD|APPL|COMT|NAME|AUTH|(c) |ANNO|FVER|COMM|CHAN|SAXL|basc|trns|cate|"
    # CAF.
    b"pakt|kuki|chan|strg|info|ovvw|peak|edct|free|uuid".split(b"|")
)
# A second file behind the first, or more samples.
MORE_AUDIO = frozenset(
    b"RIFF|RIFX|RF64|BW64|riff|FORM|caff|.snd|dns.|fLaC|OggS|data|SSND".split(b"|")
)


@dataclass(frozen=True)
class ChunkFormat:
    """Form of the chunks of a container."""

    header_bytes: int
    parse: Callable[[bytes], tuple[bytes, int]]  # Header to name and payload size.
    align: int = 2  # Payloads are padded to a multiple of this many bytes.


def chunks(
    stream: BinaryIO, position: int, end: int, form: ChunkFormat
) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, start and size of the payload of each chunk from `position` on. A chunk is the
    last one if its size is negative or reaches behind `end`."""
    for _ in range(MAX_PARTS):
        head = read_at(stream, position, form.header_bytes) if position < end else b""
        if len(head) < form.header_bytes:
            return
        name, size = form.parse(head)
        start = position + form.header_bytes
        yield name, start, size
        if size < 0:
            return
        position = start + size + -size % form.align


def no_audio(
    stream: BinaryIO, position: int, nbytes: int, form: ChunkFormat | None = None, payload: int = 0
) -> bool:
    """Return True if the file holds no samples from `position` on: chunks, tags, padding. A chunk
    of size `payload` ends at `position`, and may be padded."""
    end = audio_end(stream, nbytes)
    for _ in range(MAX_PARTS):
        padded = position + (-payload % form.align if form is not None else 0)
        if end <= padded:
            return True
        if nbytes - position <= MOST_PADDING and not any(read_at(stream, position, MOST_PADDING)):
            return True
        if form is None:
            return False
        for at in (padded, position):  # some writers leave out the padding
            name, _ = form.parse(read_at(stream, at, form.header_bytes))
            if name not in MORE_AUDIO and name.isascii() and name.decode("ascii").isprintable():
                break
        else:
            return False
        head = read_at(stream, at, form.header_bytes)[: end - at]
        name = head[:4]
        if len(head) < form.header_bytes:
            return any(known.startswith(name) for known in KNOWN_CHUNKS)
        name, payload = form.parse(head)
        position = at + form.header_bytes + payload
        if payload < 0 or position > end:
            return name in KNOWN_CHUNKS
    return False


def open_window(
    stream: BinaryIO, start: int = 0, stop: int | None = None, prefix: bytes = b""
) -> BinaryIO:
    """Open `prefix` and the bytes of `stream` from `start` to `stop` as one seekable stream."""
    if not prefix and not start and stop is None:
        stream.seek(0)
        return stream
    return io.BufferedReader(_Window(stream, start, stop, prefix))


class _Window(SeekableFile):
    def __init__(self, stream: BinaryIO, start: int, stop: int | None, prefix: bytes) -> None:
        end = stream.seek(0, io.SEEK_END)
        end = end if stop is None else min(stop, end)
        super().__init__(len(prefix) + max(0, end - start))
        self._stream, self._start, self._prefix = stream, start, prefix

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        size = left if size < 0 else min(size, left)
        chunk = self._prefix[self._at : self._at + size]
        if not chunk and size:
            self._stream.seek(self._at - len(self._prefix) + self._start)
            chunk = self._stream.read(size)
        self._at += len(chunk)
        return chunk
