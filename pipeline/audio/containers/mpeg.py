"""MPEG audio layer III frame headers: how many frames an MP3 holds.

An encoder may write the count into the first frame (a Xing or Info tag). Without it the length of a
variable-bit-rate file is a guess, and libsndfile stops at its guess: a file that starts loud
and ends quiet loses most of its samples. So frames are counted here by walking their headers, and
the count is handed to the decoder as a tag frame in front (Xing layout: flags, frames, bytes).
Field layout: ISO/IEC 11172-3 2.4.1.3 and its low-rate extension 13818-3.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import BinaryIO

from earmill.pipeline.audio.containers.base import MAX_PARTS, Probe

# kbit/s by bitrate index, layer III.
BITRATES_MPEG1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
BITRATES_MPEG2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
# Hz by rate index; MPEG 2 halves and MPEG 2.5 quarters them.
RATES_MPEG1 = (44100, 48000, 32000)
VERSION_MPEG1, VERSION_MPEG2, VERSION_MPEG25 = 3, 2, 0
LAYER_III = 1

# The decoder may drop a first frame whose bit reservoir is missing, and its own start-up delay.
SLACK_FRAMES = 2 * 1152

# How far a first frame may be from the start (padding, album art with a wrong size).
SEARCH_BYTES = 1 << 16
TAG_BITRATE_INDEX = 9  # 128 or 80 kbit/s: room for a tag at every rate
TAG_BYTES_TOLERANCE = 0.01
# Behind the header and 32 bytes, however many of them are side information.
VBRI_OFFSET = 36


def probe_mpeg(stream: BinaryIO, nbytes: int) -> Probe | None:
    """None where the bytes are no MPEG frames."""
    start = skip_id3(stream, nbytes)
    first = first_frame(stream, start)
    if first is None:
        return None
    tag = read_count_tag(stream, first)
    present = audio_end(stream, nbytes) - first.position
    if tag is not None and tag.fits(present):
        cut = tag.nbytes is not None and present < tag.nbytes
        damage = f"expected {tag.nbytes} bytes of MPEG frames, got {present}" if cut else None
        slack = 0 if cut else SLACK_FRAMES
        return Probe("mpeg", damage=damage, slack_frames=slack)
    if tag is not None or is_vbri(stream, first):
        # Of a concatenated file, whose tag counts the first part only, or Fraunhofer's tag, which
        # libsndfile does not know: leave the tag frame out, it is no sound.
        first = first_frame(stream, first.position + first.nbytes) or first
    count, damage = count_frames(stream, first, nbytes)
    return Probe(
        "mpeg",
        damage=damage,
        slack_frames=SLACK_FRAMES,
        prefix=count_tag_frame(first, count),
        offset=first.position,
    )


@dataclass(frozen=True)
class FrameHeader:
    """One frame header.

    Args:
        position: Byte offset in the stream.
        raw: The four header bytes.
        nbytes: Whole frame, header included.
        samples: Samples per channel in the frame.
        side_bytes: Side information between header and data.
    """

    position: int
    raw: bytes
    nbytes: int
    samples: int
    side_bytes: int

    def same_kind(self, other: FrameHeader) -> bool:
        """Same MPEG version, layer and sample rate: these never change inside a stream."""
        return self.raw[1] & 0xFE == other.raw[1] & 0xFE and (self.raw[2] ^ other.raw[2]) & 0xC == 0


@dataclass(frozen=True)
class CountTag:
    """A Xing or Info tag: frames, and bytes of all frames when given."""

    frames: int
    nbytes: int | None

    def fits(self, present_bytes: int) -> bool:
        """Whether the tag can be this stream's: concatenated files keep the first one's tag."""
        return self.nbytes is None or present_bytes <= self.nbytes * (1 + TAG_BYTES_TOLERANCE)


def parse_header(raw: bytes, position: int = 0) -> FrameHeader | None:
    """The frame header in four bytes, or None where they are none (or not layer III)."""
    if len(raw) < 4 or raw[0] != 0xFF or raw[1] & 0xE0 != 0xE0:
        return None
    version, layer = raw[1] >> 3 & 3, raw[1] >> 1 & 3
    bitrate_index, rate_index, padding = raw[2] >> 4, raw[2] >> 2 & 3, raw[2] >> 1 & 1
    bad = version == 1 or layer != LAYER_III or bitrate_index in (0, 15) or rate_index == 3
    if bad:
        return None
    mpeg1, mono = version == VERSION_MPEG1, raw[3] >> 6 == 3
    rate_hz = RATES_MPEG1[rate_index] // {VERSION_MPEG1: 1, VERSION_MPEG2: 2}.get(version, 4)
    kbits = (BITRATES_MPEG1 if mpeg1 else BITRATES_MPEG2)[bitrate_index]
    samples = 1152 if mpeg1 else 576
    return FrameHeader(
        position=position,
        raw=raw[:4],
        nbytes=samples // 8 * kbits * 1000 // rate_hz + padding,
        samples=samples,
        side_bytes=(17 if mono else 32) if mpeg1 else (9 if mono else 17),
    )


def skip_id3(stream: BinaryIO, nbytes: int) -> int:
    """Offset behind any ID3v2 tags at the start."""
    position = 0
    for _ in range(MAX_PARTS):
        stream.seek(position)
        head = stream.read(10)
        if head[:3] != b"ID3" or len(head) < 10:
            break
        # Four 7-bit groups; a footer (flag 0x10) repeats the ten header bytes.
        size = head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9]
        position += 10 + size + (10 if head[5] & 0x10 else 0)
    return position


def audio_end(stream: BinaryIO, nbytes: int) -> int:
    """Offset where an ID3v1 tag at the end starts, else the end."""
    stream.seek(max(0, nbytes - 128))
    return nbytes - 128 if stream.read(3) == b"TAG" and nbytes >= 128 else nbytes


def first_frame(stream: BinaryIO, start: int) -> FrameHeader | None:
    """The first header that another header of its kind follows; random bytes rarely do that.

    A lone frame, or one cut before its successor, counts only at `start` itself.
    """
    stream.seek(start)
    window = stream.read(SEARCH_BYTES)
    index = window.find(b"\xff")
    while index >= 0:
        header = parse_header(window[index : index + 4], start + index)
        if header is not None:
            stream.seek(header.position + header.nbytes)
            after = stream.read(4)
            follower = parse_header(after)
            if follower is not None and follower.same_kind(header):
                return header
            if index == 0 and len(after) < 4:
                return header
        index = window.find(b"\xff", index + 1)
    return None


def read_count_tag(stream: BinaryIO, first: FrameHeader) -> CountTag | None:
    """The Xing or Info tag of the first frame, if it holds a frame count."""
    stream.seek(first.position + 4 + first.side_bytes)
    raw = stream.read(16)
    flags = int.from_bytes(raw[4:8], "big")
    if raw[:4] not in (b"Xing", b"Info") or not flags & 1 or len(raw) < 16:
        return None
    nbytes = int.from_bytes(raw[12:16], "big") if flags & 2 else None
    return CountTag(frames=int.from_bytes(raw[8:12], "big"), nbytes=nbytes or None)


def is_vbri(stream: BinaryIO, first: FrameHeader) -> bool:
    """Whether the first frame holds Fraunhofer's tag instead of sound."""
    stream.seek(first.position + VBRI_OFFSET)
    return stream.read(4) == b"VBRI"


def count_frames(stream: BinaryIO, first: FrameHeader, nbytes: int) -> tuple[int, str | None]:
    """Whole frames from `first` on, and the damage found on the way, in words."""
    end = audio_end(stream, nbytes)
    count, position = 0, first.position
    while position < end:
        stream.seek(position)
        header = parse_header(stream.read(4), position)
        if header is None:
            return count, _damage_at(stream, first, position)
        if position + header.nbytes > end:
            got = end - position
            return count, f"last MPEG frame: expected {header.nbytes} bytes, got {got}"
        count += 1
        position += header.nbytes
    return count, None


def _damage_at(stream: BinaryIO, first: FrameHeader, position: int) -> str | None:
    """What a break in the chain means: damage if frames go on behind it, else trailing tags."""
    resumed = first_frame(stream, position)
    if resumed is None or not resumed.same_kind(first):
        return None
    return f"MPEG frames break at byte {position} and go on at byte {resumed.position}"


def count_tag_frame(first: FrameHeader, count: int) -> bytes:
    """A silent frame of the stream's kind whose Info tag says `count` frames follow."""
    # The last bit of byte 1 set: no CRC, which would move the tag by two bytes. No padding.
    raw = bytes(
        (
            first.raw[0],
            first.raw[1] | 1,
            TAG_BITRATE_INDEX << 4 | (first.raw[2] & 0x0C),
            first.raw[3],
        )
    )
    header = parse_header(raw)
    if header is None:
        raise ValueError(f"no tag frame can be made for header {first.raw.hex()}")
    body = bytes(first.side_bytes) + b"Info" + (1).to_bytes(4, "big") + count.to_bytes(4, "big")
    frame = io.BytesIO(bytes(header.nbytes))
    frame.write(raw + body)
    return frame.getvalue()
