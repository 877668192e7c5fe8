"""What is known of a container before a sample is decoded, and how headers are read for it.

Every walk over a header is bounded: a container that lists more parts than `MAX_PARTS` in front of
its samples was not written by a program that writes audio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO, Literal

ByteOrder = Literal["big", "little"]

# Chunks, boxes or tags in front of the samples; real files have a few dozen at most.
MAX_PARTS = 4096
# Behind the end of any file, and a number that seek takes.
FARTHEST = (1 << 63) - 1


@dataclass(frozen=True)
class Probe:
    """What the container says.

    Args:
        kind: riff, w64, aiff, caf, au, nist, ogg, mpeg, flac, mp4, matroska, asf, adts or other;
            from the first bytes, never from the name.
        damage: How the stream is known to be cut or broken, in words.
        shifts_time: The damage moves samples, so that no span of the file can be trusted.
        declared_frames: Frames the header promises, where libsndfile reports another number.
        rate_hz: Sample rate of the header, where libsndfile refuses to open some.
        slack_frames: Frames the decoder may deliver fewer without the file being cut.
        prefix: Bytes to decode in front of the stream.
        offset: Where the stream to decode starts, in bytes.
    """

    kind: str
    damage: str | None = None
    shifts_time: bool = False
    declared_frames: int | None = None
    rate_hz: int | None = None
    slack_frames: int = 0
    prefix: bytes = b""
    offset: int = 0


def read_at(stream: BinaryIO, position: int, size: int) -> bytes:
    """`size` bytes from `position` on, fewer at the end; no damaged size is too far to look."""
    stream.seek(min(position, FARTHEST))
    return stream.read(size)


def uint(raw: bytes, order: ByteOrder) -> int:
    return int.from_bytes(raw, order)


def no_samples(kind: str, part: str, nbytes: int) -> Probe:
    """The finding that a header ends, or goes on without end, before it comes to the samples."""
    return Probe(kind, damage=f"no {part} in {nbytes} bytes")


def samples_found(kind: str, declared: int, present: int, frame_bytes: int | None) -> Probe:
    """The finding of a header that says how many bytes of samples follow.

    Args:
        frame_bytes: Bytes of one sample of every channel; less than that missing is no damage.
            None where samples have no fixed size.
    """
    whole = frame_bytes or 1
    if present // whole >= declared // whole:
        return Probe(kind)
    return Probe(
        kind,
        damage=f"expected {declared} bytes of samples, got {max(0, present)}",
        declared_frames=declared // frame_bytes if frame_bytes else None,
    )
