"""MPEG audio frame headers: the number of frames of an MP3, or of a file of layer I or II.

An encoder may write the count into the first frame (a Xing or Info tag). Without a tag libsndfile
guesses the length of a file of variable bit rate, and stops there: a file that starts loud and ends
quiet loses most of its samples. So a walk over the headers counts the frames, and the decoder gets
the count as a tag frame in front (Xing layout: flags, frames, bytes).
Field layout: ISO/IEC 11172-3 2.4.1.3 and its low-rate extension 13818-3; gabriel.mp3-tech.org,
Mp3 info tag (delay and padding of the encoder).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import BinaryIO

from earmill.pipeline.audio.containers.base import Probe, audio_end, read_at, skip_tags, uint

# kbit/s by layer and bitrate index, for MPEG 1 and for its extensions.
BITRATES_MPEG1 = {
    1: (0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    2: (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    3: (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
}
LOW_RATES = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
LOW_RATES_LAYER_I = (0, 32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)
BITRATES_MPEG2 = {1: LOW_RATES_LAYER_I, 2: LOW_RATES, 3: LOW_RATES}
# Hz by rate index; MPEG 2 halves and MPEG 2.5 quarters them.
RATES_MPEG1 = (44100, 48000, 32000)
VERSION_MPEG1, VERSION_MPEG2, VERSION_MPEG25 = 3, 2, 0
LAYER_III = 3

# The decoder may drop a first frame whose bit reservoir is missing, and its own start-up delay.
SLACK_FRAMES = 2 * 1152

# Bytes in which a first frame is searched: padding, album art with a wrong size.
SEARCH_BYTES = 1 << 16
TAG_BITRATE_INDEX = 9  # 128 or 80 kbit/s: room for a tag at every rate
# Share of bytes behind the counted audio that may be tags or padding.
TAG_BYTES_TOLERANCE = 0.01
# Position of Fraunhofer's tag: behind the header and 32 bytes, for any size of side information.
VBRI_OFFSET = 36
# Flags of a tag for its fields, in their order, and the bytes of the last two fields.
HAS_FRAMES, HAS_BYTES, HAS_TABLE, HAS_QUALITY = 1, 2, 4, 8
TABLE_BYTES, QUALITY_BYTES = 100, 4
# Bytes of the encoder's part, and the offset in it of delay and padding of 12 bits each.
ENCODER_BYTES, DELAY_OFFSET = 36, 21
# Frames in a row that are not there by chance, if the kind to search for is not known.
LONG_CHAIN = 4


def probe_mpeg(stream: BinaryIO, nbytes: int) -> Probe | None:
    """Probe MPEG audio; None if the bytes are not MPEG frames."""
    first = first_frame(stream, 0)
    if first is None:
        return None
    if first.layer != LAYER_III:
        return _counted(stream, first, nbytes)
    tag = read_count_tag(stream, first)
    present = audio_end(stream, nbytes) - first.position
    if tag is not None and tag.is_of(stream, first, present):
        cut = tag.nbytes is not None and present < tag.nbytes
        damage = f"expected {tag.nbytes} bytes of MPEG frames, got {present}" if cut else None
        slack = 0 if cut else SLACK_FRAMES
        return Probe("mpeg", damage=damage, slack_frames=slack)
    is_vbri = read_at(stream, first.position + VBRI_OFFSET, 4) == b"VBRI"
    if tag is not None or is_vbri:
        # The tag of a concatenated file counts the first part only, and libsndfile does not know
        # Fraunhofer's tag. The tag frame has no sound, so leave it out.
        first = first_frame(stream, first.position + first.nbytes) or first
    return _counted(stream, first, nbytes, tag)


def _counted(
    stream: BinaryIO, first: FrameHeader, nbytes: int, tag: CountTag | None = None
) -> Probe:
    """Return the finding for a file whose frames are counted from `first` on."""
    count, damage = count_frames(stream, first, nbytes)
    if first.layer != LAYER_III:
        return Probe(
            "mpeg",
            damage=damage,
            declared_frames=count * first.samples,
            slack_frames=SLACK_FRAMES,
            codec=f"MPEG layer {first.layer}",
        )
    # The tag's padding belongs to the end of the file only if its count does.
    encoder = b"" if tag is None else tag.delay_of(first, count)
    return Probe(
        "mpeg",
        damage=damage,
        slack_frames=SLACK_FRAMES,
        prefix=count_tag_frame(first, count, encoder),
        start=first.position,
    )


@dataclass(frozen=True)
class FrameHeader:
    """One frame header."""

    position: int  # Byte offset in the stream.
    raw: bytes  # The four header bytes.
    nbytes: int  # Size of the whole frame, header included.
    samples: int  # Samples per channel.
    side_bytes: int  # Side information between header and data.
    rate_hz: int
    layer: int  # Layer 1 to 3.

    def same_kind(self, other: FrameHeader) -> bool:
        """Return True for equal MPEG version, layer and rate, which are fixed in a stream."""
        return self.raw[1] & 0xFE == other.raw[1] & 0xFE and (self.raw[2] ^ other.raw[2]) & 0xC == 0


@dataclass(frozen=True)
class CountTag:
    """A Xing or Info tag."""

    frames: int  # Frames behind the tag frame.
    nbytes: int | None  # Size of all frames; None if the tag has no such field.
    encoder: bytes = b""  # Name, delay and padding; empty without such a field.

    def is_of(self, stream: BinaryIO, first: FrameHeader, present_bytes: int) -> bool:
        """Return True if the tag fits this stream. Concatenated files keep the tag of the first
        file. An encoder that writes to a pipe leaves a tag without a count."""
        if self.frames and self.nbytes is not None:
            if present_bytes > self.nbytes * (1 + TAG_BYTES_TOLERANCE):
                return False
            end = skip_tags(stream, first.position + self.nbytes)
            if present_bytes <= self.nbytes or first_frame(stream, end) is None:
                return True
        return self.counts(stream, first, first.position + present_bytes)

    def counts(self, stream: BinaryIO, first: FrameHeader, nbytes: int) -> bool:
        """Return True if the stream has the tag's number of frames, with or without its own."""
        count, damage = count_frames(stream, first, nbytes)
        return damage is None and self.frames in (count - 1, count)

    def delay_of(self, first: FrameHeader, count: int) -> bytes:
        """Return the encoder's part for a stream of `count` frames; padding is for the end only."""
        if not self.encoder or self.frames in (0, count):
            return self.encoder
        at = DELAY_OFFSET + 1
        delay = self.encoder[at] & 0xF0
        return self.encoder[:at] + bytes([delay, 0]) + self.encoder[at + 2 :]


def parse_header(raw: bytes, position: int = 0) -> FrameHeader | None:
    """Parse the four bytes of a frame header; None if they are not a header."""
    if len(raw) < 4 or raw[0] != 0xFF or raw[1] & 0xE0 != 0xE0:
        return None
    version, layer = raw[1] >> 3 & 3, 4 - (raw[1] >> 1 & 3)
    bitrate_index, rate_index, padding = raw[2] >> 4, raw[2] >> 2 & 3, raw[2] >> 1 & 1
    if version == 1 or layer == 4 or bitrate_index in (0, 15) or rate_index == 3:
        return None
    mpeg1, mono = version == VERSION_MPEG1, raw[3] >> 6 == 3
    rate_hz = RATES_MPEG1[rate_index] // {VERSION_MPEG1: 1, VERSION_MPEG2: 2}.get(version, 4)
    kbits = (BITRATES_MPEG1 if mpeg1 else BITRATES_MPEG2)[layer][bitrate_index]
    samples = 384 if layer == 1 else 1152 if mpeg1 or layer == 2 else 576
    slot = 4 if layer == 1 else 1
    return FrameHeader(
        position=position,
        raw=raw[:4],
        nbytes=(samples // 8 // slot * kbits * 1000 // rate_hz + padding) * slot,
        samples=samples,
        side_bytes=(17 if mono else 32) if mpeg1 else (9 if mono else 17),
        rate_hz=rate_hz,
        layer=layer,
    )


def first_frame(stream: BinaryIO, start: int, *, chain: int = 2) -> FrameHeader | None:
    """Return the first header that headers of its kind follow; None if there is none. A lone frame,
    or a frame whose successor is cut off, counts only at `start` itself. Layer III needs `chain`
    frames in a row, other layers `LONG_CHAIN`."""
    window = read_at(stream, start, SEARCH_BYTES)
    for sync in re.finditer(b"\xff", window):
        index = sync.start()
        header = parse_header(window[index : index + 4], start + index)
        if header is not None:
            wanted = chain if header.layer == LAYER_III else LONG_CHAIN
            count, is_end = _chain(stream, header, wanted)
            alone = index == 0 and is_end and chain == 2 and header.layer == LAYER_III
            if count == wanted or alone:
                return header
    return None


def _chain(stream: BinaryIO, first: FrameHeader, most: int) -> tuple[int, bool]:
    """Return the frames in a row from `first` on, up to `most`, and if the bytes end there."""
    count, position = 1, first.position + first.nbytes
    while count < most:
        raw = read_at(stream, position, 4)
        header = parse_header(raw, position)
        if header is None or not header.same_kind(first):
            return count, len(raw) < 4
        count, position = count + 1, position + header.nbytes
    return count, False


def read_count_tag(stream: BinaryIO, first: FrameHeader) -> CountTag | None:
    """Return the Xing or Info tag of the first frame; 0 frames if it has no count."""
    raw = read_at(stream, first.position, first.nbytes)[4 + first.side_bytes :]
    flags = uint(raw[4:8], "big")
    if raw[:4] not in (b"Xing", b"Info") or len(raw) < 8:
        return None
    counts, at = [0, 0], 8
    for number, flag in enumerate((HAS_FRAMES, HAS_BYTES)):
        if flags & flag:
            counts[number] = uint(raw[at : at + 4], "big")
            at += 4
    at += (TABLE_BYTES if flags & HAS_TABLE else 0) + (QUALITY_BYTES if flags & HAS_QUALITY else 0)
    encoder = raw[at : at + ENCODER_BYTES]
    is_whole = len(encoder) == ENCODER_BYTES and encoder[0]
    return CountTag(counts[0], counts[1] or None, encoder if is_whole else b"")


def count_frames(stream: BinaryIO, first: FrameHeader, nbytes: int) -> tuple[int, str | None]:
    """Return the number of whole frames from `first` on, and a description of the damage."""
    end = audio_end(stream, nbytes)
    count, position = 0, first.position
    while position < end:
        header = parse_header(read_at(stream, position, 4), position)
        if header is None or not header.same_kind(first):
            return count, _damage_at(stream, first, position)
        if position + header.nbytes > end:
            got = end - position
            return count, f"last MPEG frame: expected {header.nbytes} bytes, got {got}"
        count += 1
        position += header.nbytes
    return count, None


def mpeg_goes_on(stream: BinaryIO, position: int, nbytes: int) -> str | None:
    """Return what follows the frames that a tag counts, in words; None for nothing. `position` is
    the position of a decoder that has read the last counted frame."""
    # The decoder may have read the next header, or left frames of padding unread.
    starts = (skip_tags(stream, position), max(0, position - 4))
    unread = next((found for at in starts if (found := first_frame(stream, at))), None)
    first = first_frame(stream, 0)
    tag = None if unread is None or first is None else read_count_tag(stream, first)
    if tag is None or first is None or tag.counts(stream, first, nbytes):
        return None
    return f"more MPEG frames than the {tag.frames} that its tag counts"


def _damage_at(stream: BinaryIO, first: FrameHeader, position: int) -> str | None:
    """Return the damage at a break in the chain; None if only tags follow."""
    start = skip_tags(stream, position)
    resumed = first_frame(stream, start)
    if resumed is not None and resumed.same_kind(first):
        return f"MPEG frames break at byte {position} and go on at byte {resumed.position}"
    other = first_frame(stream, start, chain=LONG_CHAIN)
    if other is None:
        return None
    return (
        f"MPEG frames of {first.rate_hz} Hz, layer {first.layer}, end at byte {position}; at byte "
        f"{other.position} follow frames of {other.rate_hz} Hz, layer {other.layer}"
    )


def count_tag_frame(first: FrameHeader, count: int, encoder: bytes = b"") -> bytes:
    """Return a silent frame of the kind of `first` with an Info tag that counts `count` frames."""
    # The last bit of byte 1 is set: no CRC, which would move the tag by two bytes. No padding.
    sync, version, rates, mode = first.raw
    raw = bytes((sync, version | 1, TAG_BITRATE_INDEX << 4 | rates & 0x0C, mode))
    header = parse_header(raw)
    if header is None:
        raise ValueError(f"no tag frame can be made for header {first.raw.hex()}")
    body = bytes(first.side_bytes) + b"Info" + (1).to_bytes(4, "big") + count.to_bytes(4, "big")
    return (raw + body + encoder).ljust(header.nbytes, b"\0")
