"""What a container says about itself that libsndfile does not pass on.

libsndfile shortens a cut WAV or Ogg without a word, reads only the first link of a chained Ogg, and
guesses the length of an MP3 that has no frame count (off by any factor for variable bit rate,
losing the tail). `probe` reads the container's own bookkeeping (RIFF chunk sizes; Ogg page
checksums, sequence numbers and end marks; MPEG frame counts) and never decodes a sample.
FLAC needs none of this: its decoder checks every frame, and its header holds the length.
"""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, Literal

from pipeline import mpeg

ByteOrder = Literal["big", "little"]

OGG_HEADER_BYTES = 27
OGG_FLAG_BOS, OGG_FLAG_EOS = 2, 4

# Data sizes that mean "not known when the header was written": ffmpeg and sox writing to a pipe.
RIFF_UNKNOWN_SIZES = frozenset({0x7FFFF000, 0x7FFFFFFF, 0xFFFFFFFF})
RIFF_UNKNOWN_FROM = 0xFFFFFF00

# The Ogg checksum is CRC-32 without bit reflection; zlib's is reflected. Reversing the bits of
# every byte turns one into the other, which keeps the loop over bytes in C.
BIT_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


@dataclass(frozen=True)
class Probe:
    """What the container says.

    Args:
        kind: riff, ogg, mpeg, flac or other; from the first bytes, never from the name.
        damage: How the stream is known to be cut or broken, in words.
        shifts_time: The damage moves samples, so that no span of the file can be trusted.
        declared_frames: Frames the header promises, when libsndfile reports fewer.
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


def probe(stream: BinaryIO, nbytes: int) -> Probe:
    """Read the container's bookkeeping; the stream position is lost."""
    stream.seek(0)
    head = stream.read(12)
    if head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:12] == b"WAVE":
        return _probe_riff(stream, nbytes, "big" if head[:4] == b"RIFX" else "little")
    if head[:4] == b"OggS":
        damage = _ogg_damage(stream, nbytes)
        return Probe("ogg", damage=damage, shifts_time=damage is not None)
    if head[:4] == b"fLaC":
        return Probe("flac")
    return _probe_mpeg(stream, nbytes) or Probe("other")


# RIFF: a list of (id, size, payload padded to even); sizes are written last, by seeking back.


def _probe_riff(stream: BinaryIO, nbytes: int, order: ByteOrder) -> Probe:
    block_bytes, rate_hz, long_size, position = 1, None, None, 12
    while position + 8 <= nbytes:
        stream.seek(position)
        name, size = stream.read(4), _uint(stream.read(4), order)
        if name == b"fmt ":
            fields = stream.read(16)
            rate_hz, block_bytes = _uint(fields[4:8], order), max(1, _uint(fields[12:14], order))
        elif name == b"ds64":
            long_size = _uint(stream.read(16)[8:16], order)
        elif name == b"data":
            declared = long_size if long_size is not None else size
            found = _riff_data(declared, nbytes - position - 8, block_bytes)
            return replace(found, rate_hz=rate_hz)
        position += 8 + size + size % 2
    return Probe("riff", damage=f"no data chunk in {nbytes} bytes")


def _riff_data(declared: int, present: int, block_bytes: int) -> Probe:
    unknown = declared in RIFF_UNKNOWN_SIZES or RIFF_UNKNOWN_FROM <= declared <= 0xFFFFFFFF
    if unknown or present // block_bytes >= declared // block_bytes:
        return Probe("riff")
    return Probe(
        "riff",
        damage=f"expected {declared} bytes of samples, got {present}",
        declared_frames=declared // block_bytes,
    )


def _uint(raw: bytes, order: ByteOrder) -> int:
    return int.from_bytes(raw, order)


# Ogg: pages of [OggS, version, flags, granule: 8, serial: 4, sequence: 4, crc: 4, n, n lacing
# sizes, payload]. Each logical stream opens with a BOS page and closes with an EOS page.


@dataclass
class _OggStream:
    """Progress of one logical stream: the next page's number, and whether it was closed."""

    next_page: int
    ended: bool


def _ogg_damage(stream: BinaryIO, nbytes: int) -> str | None:
    streams: dict[int, _OggStream] = {}
    position = 0
    while position < nbytes:
        page = _read_ogg_page(stream, position)
        if page[:4] != b"OggS":
            if streams and all(logical.ended for logical in streams.values()):
                return None  # a tag that some tool appended
            return f"no Ogg page at byte {position} of {nbytes}"
        expected = _ogg_page_bytes(page)
        if len(page) < OGG_HEADER_BYTES or len(page) < expected:
            return f"Ogg page at byte {position}: expected {expected} bytes, got {len(page)}"
        problem = _ogg_page_damage(page, streams)
        if problem:
            return f"Ogg page at byte {position}: {problem}"
        position += expected
    if not all(logical.ended for logical in streams.values()):
        return "the last Ogg page has no end-of-stream mark"
    return None


def _read_ogg_page(stream: BinaryIO, position: int) -> bytes:
    stream.seek(position)
    header = stream.read(OGG_HEADER_BYTES)
    if header[:4] != b"OggS" or len(header) < OGG_HEADER_BYTES:
        return header
    lacing = stream.read(header[26])
    return header + lacing + stream.read(sum(lacing))


def _ogg_page_bytes(page: bytes) -> int:
    if len(page) < OGG_HEADER_BYTES:
        return OGG_HEADER_BYTES
    lacing = page[OGG_HEADER_BYTES : OGG_HEADER_BYTES + page[26]]
    return OGG_HEADER_BYTES + page[26] + sum(lacing)


def _ogg_page_damage(page: bytes, streams: dict[int, _OggStream]) -> str | None:
    if ogg_crc(page) != int.from_bytes(page[22:26], "little"):
        return "wrong checksum"
    flags, serial = page[5], int.from_bytes(page[14:18], "little")
    number = int.from_bytes(page[18:22], "little")
    if flags & OGG_FLAG_BOS:
        if any(logical.ended for logical in streams.values()):
            return "a second chained stream starts, which the decoder would not read"
        streams[serial] = _OggStream(next_page=number, ended=False)
    logical = streams.get(serial)
    if logical is None:
        return f"stream {serial} has no first page"
    if number != logical.next_page:
        return f"expected page {logical.next_page}, got page {number}"
    logical.next_page += 1
    logical.ended = bool(flags & OGG_FLAG_EOS)
    return None


def ogg_crc(page: bytes) -> int:
    """Checksum of a whole page, its own checksum field taken as zero."""
    zeroed = page[:22] + bytes(4) + page[26:]
    # zlib inverts before and after; these two inversions undo that (the Ogg CRC starts from 0).
    reflected = zlib.crc32(zeroed.translate(BIT_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{reflected:032b}"[::-1], 2)


# MPEG: a chain of frames, each with its own header; a tag in the first one may hold the count.


def _probe_mpeg(stream: BinaryIO, nbytes: int) -> Probe | None:
    start = mpeg.skip_id3(stream, nbytes)
    first = mpeg.first_frame(stream, start)
    if first is None:
        return None
    tag = mpeg.read_count_tag(stream, first)
    present = mpeg.audio_end(stream, nbytes) - first.position
    if tag is not None and tag.fits(present):
        cut = tag.nbytes is not None and present < tag.nbytes
        damage = f"expected {tag.nbytes} bytes of MPEG frames, got {present}" if cut else None
        slack = 0 if cut else mpeg.SLACK_FRAMES
        return Probe("mpeg", damage=damage, slack_frames=slack)
    if tag is not None:
        # Of a concatenated file, whose tag counts the first part only: leave the tag frame out.
        first = mpeg.first_frame(stream, first.position + first.nbytes) or first
    count, damage = mpeg.count_frames(stream, first, nbytes)
    return Probe(
        "mpeg",
        damage=damage,
        slack_frames=mpeg.SLACK_FRAMES,
        prefix=mpeg.count_tag_frame(first, count),
        offset=first.position,
    )


def open_prefixed(stream: BinaryIO, prefix: bytes, offset: int) -> BinaryIO:
    """`prefix` followed by `stream` from `offset` on, as one seekable stream."""
    if not prefix and not offset:
        stream.seek(0)
        return stream
    return io.BufferedReader(_Prefixed(stream, prefix, offset))


class _Prefixed(io.RawIOBase):
    """Bytes in front of a stream; see `open_prefixed`."""

    def __init__(self, stream: BinaryIO, prefix: bytes, offset: int) -> None:
        self._stream, self._prefix, self._offset = stream, prefix, offset
        self._size = len(prefix) + stream.seek(0, io.SEEK_END) - offset
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
        if not chunk:
            self._stream.seek(self._position - len(self._prefix) + self._offset)
            chunk = self._stream.read(len(view))
        view[: len(chunk)] = chunk
        self._position += len(chunk)
        return len(chunk)
