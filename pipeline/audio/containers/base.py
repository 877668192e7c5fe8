"""What is known of a container before a sample is decoded, and how headers are read for it.

Every walk over a header is bounded: a container that lists more parts than `MAX_PARTS` in front of
its samples was not written by a program that writes audio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO, Literal

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
