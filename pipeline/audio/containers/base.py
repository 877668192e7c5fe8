"""What a container declares, and how its headers and the tags around its audio are read.

Every walk over a header is bounded: a container that lists more parts than `MAX_PARTS` in front of
its samples was not written by a program that writes audio.

Tags are ID3 (versions 1 and 2) and APE (version 2). Taggers put them around files of any format.
Tags in front are skipped for every format. Tags behind the audio matter only where nothing else
says where it ends. Layouts: id3.org, ID3 tag version 2.4.0, 3.1 and 3.4; wiki.hydrogenaud.io, APEv2
specification.

`open_window` opens a part of a stream, with bytes of ours in front of it, as a seekable stream.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

ByteOrder = Literal["big", "little"]
HeaderSize = Literal["ignored", "unknown"]

# Chunks, boxes or tags in front of the samples; real files have a few dozen at most.
MAX_PARTS = 4096
# Behind the end of any file, and a number that seek takes.
FARTHEST = (1 << 63) - 1


@dataclass(frozen=True)
class BareSamples:
    """Samples without compression, which can be read without their header.

    Args:
        rate_hz: Sample rate.
        channels: Channels.
        subtype: libsndfile's name of the sample format.
        order: Byte order.
    """

    rate_hz: int
    channels: int
    subtype: str
    order: ByteOrder


@dataclass(frozen=True)
class Trim:
    """Frames of a stream that are sound, where the container counts them.

    Args:
        rate_hz: Sample rate that the counts are in.
        skip: Frames of encoder delay before the sound.
        frames: Frames of sound.
    """

    rate_hz: int
    skip: int
    frames: int


@dataclass(frozen=True)
class Probe:
    """The findings about one file.

    Args:
        kind: Name of the container; from the first bytes, never from the name.
        damage: How the stream is known to be cut or broken, in words.
        shifts_time: The damage moves samples, so that no span of the file can be trusted.
        declared_frames: Frames of the file, where the decoder reports another number or none.
        rate_hz: Sample rate of the header, where libsndfile refuses to open some.
        slack_frames: Frames the decoder may deliver fewer without the file being cut.
        header_size: How many samples there are is not known from the header: it is `ignored` as it
            cannot be right, or says itself that it is `unknown`.
        unterminated: The stream ends without its end mark.
        prefix: Bytes to decode in front of the stream.
        start: Where the bytes to decode start in the file.
        stop: Where they end; None is the end of the file.
        samples: They are to be read as bare samples.
        container: Name of the container, where the decoder would give another one.
        by_ffmpeg: libsndfile cannot decode it, or not rightly.
        codec: Name of a codec that libsndfile may not know, for messages; FFmpeg is asked then.
        trim: Which of the decoded frames are sound.
        parts: Complete streams in a row, each with a `start` and a `stop` of its own.
    """

    kind: str
    damage: str | None = None
    shifts_time: bool = False
    declared_frames: int | None = None
    rate_hz: int | None = None
    slack_frames: int = 0
    header_size: HeaderSize | None = None
    unterminated: bool = False
    prefix: bytes = b""
    start: int = 0
    stop: int | None = None
    samples: BareSamples | None = None
    container: str | None = None
    by_ffmpeg: bool = False
    codec: str | None = None
    trim: Trim | None = None
    parts: tuple[Probe, ...] = ()


def read_at(stream: BinaryIO, position: int, size: int) -> bytes:
    """`size` bytes from `position` on, fewer at the end; no damaged size is too far to look."""
    stream.seek(min(position, FARTHEST))
    return stream.read(size)


def uint(raw: bytes, order: ByteOrder) -> int:
    return int.from_bytes(raw, order)


def no_samples(kind: str, part: str, nbytes: int) -> Probe:
    """The finding that a header ends, or goes on without end, before it comes to the samples."""
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
    """Bytes of the tag that starts with these; 0 where none does."""
    if head[:3] == b"ID3" and len(head) >= ID3V2_BYTES:
        footer = ID3V2_BYTES if head[5] & ID3V2_HAS_FOOTER else 0
        return ID3V2_BYTES + _seven_bits(head[6:10]) + footer
    if head[:8] == APE and len(head) == APE_BYTES:
        return APE_BYTES + uint(head[12:16], "little")
    return ID3V1_BYTES if head[:3] == b"TAG" else 0


def _seven_bits(raw: bytes) -> int:
    """A size of ID3v2: four groups of seven bits."""
    return raw[0] << 21 | raw[1] << 14 | raw[2] << 7 | raw[3]


def open_window(
    stream: BinaryIO, start: int = 0, stop: int | None = None, prefix: bytes = b""
) -> BinaryIO:
    """Return `prefix`, then the bytes of `stream` from `start` to `stop`, as one stream.

    Args:
        stop: Byte behind the last; None is the end of the stream.
    """
    if not prefix and not start and stop is None:
        stream.seek(0)
        return stream
    return io.BufferedReader(_Window(stream, start, stop, prefix))


class _Window(io.RawIOBase):
    """See `open_window`."""

    def __init__(self, stream: BinaryIO, start: int, stop: int | None, prefix: bytes) -> None:
        self._stream, self._start, self._prefix = stream, start, prefix
        end = stream.seek(0, io.SEEK_END)
        end = end if stop is None else min(stop, end)
        self._size = len(prefix) + max(0, end - start)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        chunk = self._prefix[self._position : self._position + len(view)]
        left = self._size - self._position
        if not chunk and left > 0:
            self._stream.seek(self._position - len(self._prefix) + self._start)
            chunk = self._stream.read(min(len(view), left))
        view[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)
