"""Ogg pages: checksums, sequence numbers and end marks, which libsndfile does not insist on.

It shortens a cut file without a word, and reads only the first link of a chained one. A page is
[OggS, version, flags, granule: 8, serial: 4, sequence: 4, crc: 4, n, n lacing sizes, payload]; each
logical stream opens with a BOS page and closes with an EOS page.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import BinaryIO

from earmill.pipeline.audio.containers.base import Probe

OGG_HEADER_BYTES = 27
OGG_FLAG_BOS, OGG_FLAG_EOS = 2, 4
# Pages without a byte of payload in a row; a writer has no use for more than one.
MAX_EMPTY_PAGES = 1000

# The Ogg checksum is CRC-32 without bit reflection; zlib's is reflected. Reversing the bits of
# every byte turns one into the other, which keeps the loop over bytes in C.
BIT_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def probe_ogg(stream: BinaryIO, nbytes: int) -> Probe:
    """Every page of the file, in order."""
    damage = _ogg_damage(stream, nbytes)
    return Probe("ogg", damage=damage, shifts_time=damage is not None)


@dataclass
class _OggStream:
    """Progress of one logical stream: the next page's number, and whether it was closed."""

    next_page: int
    ended: bool


def _ogg_damage(stream: BinaryIO, nbytes: int) -> str | None:
    streams: dict[int, _OggStream] = {}
    position, empty = 0, 0
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
        empty = empty + 1 if page[26] == 0 else 0
        if empty > MAX_EMPTY_PAGES:
            return f"more than {MAX_EMPTY_PAGES} Ogg pages without a payload"
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
        if serial in streams or any(logical.ended for logical in streams.values()):
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
