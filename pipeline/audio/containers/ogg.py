"""Ogg pages: checksums, sequence numbers and end marks, which libsndfile does not check.

A page is [OggS, version, flags, granule: 8, serial: 4, sequence: 4, crc: 4, n, n lacing sizes,
payload]. Each logical stream opens with a BOS page and closes with an EOS page. Streams beside each
other open together. If further streams open behind them, the file is a chain, and its links are
decoded in turn.
Layouts: RFC 3533, RFC 7845 (Opus), RFC 6716 3.1 (length of a packet).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from earmill.pipeline.audio.containers.base import Probe, read_at, uint

OGG = b"OggS"
OGG_HEADER_BYTES = 27
OGG_FLAG_CONTINUED, OGG_FLAG_BOS, OGG_FLAG_EOS = 1, 2, 4
# Most pages without payload in a row; writers have no use for more than one.
MAX_EMPTY_PAGES = 1000
# Most bytes of a page, so the next page behind a break begins within them.
MOST_PAGE_BYTES = 65307

VORBIS, OPUS = b"\x01vorbis", b"OpusHead"
# Position of the "input sample rate" in the first packet, and the rate at which Opus decodes.
OPUS_RATE, OPUS_HZ = slice(12, 16), 48000
# Samples at 48 kHz of a frame, by the configuration number of a packet.
OPUS_FRAME = (480, 960, 1920, 2880) * 3 + (480, 960) * 2 + (120, 240, 480, 960) * 4

# The Ogg checksum is CRC-32 without bit reflection; zlib has it with reflection. Reversing the bits
# of every byte turns one into the other, and keeps the loop over bytes in C.
BIT_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def probe_ogg(stream: BinaryIO, nbytes: int) -> Probe:
    """Walk over every page of the file."""
    links, damage = _walk(stream, nbytes)
    if damage is not None:
        return Probe("ogg", damage=damage, shifts_time=True)
    unterminated = any(not link.is_ended for link in links)
    parts = tuple(link.probe(stream) for link in links)
    if len(parts) > 1:
        return Probe("ogg", unterminated=unterminated, parts=parts)
    return replace(parts[0], stop=None, unterminated=unterminated)


@dataclass
class _LogicalStream:
    """Progress of one logical stream."""

    next_page: int
    head: bytes  # The first packet.
    is_ended: bool = False  # The end mark was seen.
    # Granule position at which the sound begins; None while it is not known.
    begin: int | None = None


@dataclass
class _Link:
    """Logical streams beside each other: a whole file, or one link of a chain."""

    start: int
    stop: int = 0
    streams: dict[int, _LogicalStream] = field(default_factory=dict)  # Streams by serial number.
    has_data: bool = False  # A page was seen that does not open a stream.

    @property
    def is_ended(self) -> bool:
        return all(logical.is_ended for logical in self.streams.values())

    @property
    def is_plain(self) -> bool:
        """Return True if libsndfile decodes the link correctly. libsndfile cannot read two streams
        beside each other, and needs the end mark. It leaves out the delay of Opus only if the sound
        begins at 0."""
        if len(self.streams) != 1 or not self.is_ended:
            return False
        (logical,) = self.streams.values()
        return logical.head.startswith((VORBIS, OPUS)) and not logical.begin

    def probe(self, stream: BinaryIO) -> Probe:
        if not self.is_plain:
            return Probe("ogg", start=self.start, stop=self.stop, by_ffmpeg=True)
        first = _read_ogg_page(stream, self.start)
        usual = _at_48_khz(first)
        if usual == first:
            return Probe("ogg", start=self.start, stop=self.stop)
        return Probe("ogg", start=self.start + len(first), stop=self.stop, prefix=usual)


def _walk(stream: BinaryIO, nbytes: int) -> tuple[list[_Link], str | None]:
    """Return the links of the file, and a description of the damage."""
    links: list[_Link] = []
    position, empty = 0, 0
    while position < nbytes:
        page = _read_ogg_page(stream, position)
        if page[:4] != OGG:
            rest = read_at(stream, position, MOST_PAGE_BYTES)
            if links and links[-1].is_ended and OGG not in rest:
                return links, None  # a tag that some tool appended
            return links, f"no Ogg page at byte {position} of {nbytes}"
        expected = OGG_HEADER_BYTES
        if len(page) >= OGG_HEADER_BYTES:
            expected += page[26] + sum(page[OGG_HEADER_BYTES : OGG_HEADER_BYTES + page[26]])
        if len(page) < expected:
            return links, f"Ogg page at byte {position}: expected {expected} bytes, got {len(page)}"
        problem = _page_damage(page, position, links)
        if problem:
            return links, f"Ogg page at byte {position}: {problem}"
        position += expected
        links[-1].stop = position
        empty = empty + 1 if page[26] == 0 else 0
        if empty > MAX_EMPTY_PAGES:
            return links, f"more than {MAX_EMPTY_PAGES} Ogg pages without a payload"
    return links, None


def _page_damage(page: bytes, position: int, links: list[_Link]) -> str | None:
    """Add a page to the links; return its damage, if any."""
    if ogg_crc(page) != uint(page[22:26], "little"):
        return "wrong checksum"
    flags, serial, number = page[5], uint(page[14:18], "little"), uint(page[18:22], "little")
    if flags & OGG_FLAG_BOS:
        if not links or links[-1].has_data:
            links.append(_Link(position))
        if serial in links[-1].streams:
            return f"stream {serial} begins twice"
        links[-1].streams[serial] = _LogicalStream(number, page[OGG_HEADER_BYTES + page[26] :])
    elif links:
        links[-1].has_data = True
    logical = links[-1].streams.get(serial) if links else None
    if logical is None:
        return f"stream {serial} has no first page"
    if number != logical.next_page:
        return f"expected page {logical.next_page}, got page {number}"
    if logical.is_ended:
        return f"stream {serial} goes on behind its end"
    logical.next_page += 1
    logical.is_ended = bool(flags & OGG_FLAG_EOS)
    if logical.begin is None and logical.head.startswith(OPUS):
        logical.begin = _opus_begin(page)
    return None


def _opus_begin(page: bytes) -> int | None:
    """Return the granule position at which the sound of a page begins; None if it has none. Pages
    of headers have position 0 or -1. On the last page the position cuts the sound off."""
    granule = int.from_bytes(page[6:14], "little", signed=True)
    if granule in (0, -1) or page[5] & (OGG_FLAG_EOS | OGG_FLAG_CONTINUED):
        return None
    total, samples, position = 0, None, OGG_HEADER_BYTES + page[26]
    for size in page[OGG_HEADER_BYTES:position]:
        if samples is None:
            # The first two bytes of a packet tell the number and the length of its frames.
            head = page[position : position + 2].ljust(2, b"\0")
            is_empty = position >= len(page)
            frames = 0 if is_empty else (1, 2, 2, head[1] & 63)[head[0] & 3]
            samples = frames * OPUS_FRAME[head[0] >> 3]
        position += size
        if size < 255:  # the packet ends here
            total, samples = total + samples, None
    return granule - total


def _at_48_khz(page: bytes) -> bytes:
    """Return the first page of Opus with an "input sample rate" of 48 kHz; other pages as they are.
    The rate is information only (RFC 7845 5.1), but libsndfile would decode at this rate."""
    at = OGG_HEADER_BYTES + page[26]
    if page[at : at + len(OPUS)] != OPUS or len(page) < at + OPUS_RATE.stop:
        return page
    at += OPUS_RATE.start
    page = page[:at] + OPUS_HZ.to_bytes(4, "little") + page[at + 4 :]
    return page[:22] + ogg_crc(page).to_bytes(4, "little") + page[26:]


def _read_ogg_page(stream: BinaryIO, position: int) -> bytes:
    header = read_at(stream, position, OGG_HEADER_BYTES)
    if header[:4] != OGG or len(header) < OGG_HEADER_BYTES:
        return header
    lacing = stream.read(header[26])
    return header + lacing + stream.read(sum(lacing))


def ogg_crc(page: bytes) -> int:
    """Return the checksum of a whole page, with its own checksum field taken as zero."""
    zeroed = page[:22] + bytes(4) + page[26:]
    # zlib inverts before and after; these two inversions undo that (the Ogg CRC starts from 0).
    reflected = zlib.crc32(zeroed.translate(BIT_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{reflected:032b}"[::-1], 2)
