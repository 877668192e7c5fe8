"""How many bytes of samples a header promises, held against the bytes that are there.

A size is believed where nothing but chunks and tags stands behind the samples. A file that is
shorter than its size is cut, unless the size is one that programs write before they know it.
Sizes of 32 bits that wrapped are found again: with multiples of 4 GiB added they fit. Where the
size does not fit and no other does, the row is refused: the bytes behind could be samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

from earmill.pipeline.audio.containers.base import (
    MAX_PARTS,
    BareSamples,
    HeaderSize,
    Probe,
    audio_end,
    read_at,
)

WRAP = 1 << 32
# Programs write about 2 or 4 GiB for a size that they do not know yet, give or take a header or the
# rounding to frames. Files of exactly these sizes are rarer.
NEAR_BYTES = 4096
# Sizes of 64 bits that no file has.
NO_SIZE = 1 << 62
# Recorders fill the last sector of a file with zeros.
MOST_PADDING = 4096

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
class ChunkForm:
    """How a container writes chunks.

    Args:
        header_bytes: Bytes in front of the payload.
        parse: Returns name and payload size of a header.
        align: Payloads are padded to a multiple of so many bytes.
    """

    header_bytes: int
    parse: Callable[[bytes], tuple[bytes, int]]
    align: int = 2


@dataclass(frozen=True)
class Promise:
    """The size of the samples by the header, and how they are written.

    Args:
        kind: See `Probe`.
        start: First byte of the samples.
        size: Bytes of samples; None where the header says that it does not know.
        frame_bytes: Bytes of one sample of every channel; None where samples have no fixed size.
        bare: How the samples are read without their header; None where they cannot be.
        codec: Name of the codec, where they cannot be.
        form: How chunks behind the samples look; None where the container has none.
        extra: Bytes that the header's size counts besides the samples.
        others: Sizes that the header states in other places.
        wraps: The size has 32 bits.
        header: Returns the header with another size; None where that cannot be done.
        container: What the container is called where the samples are read without it.
    """

    kind: str
    start: int
    size: int | None
    frame_bytes: int | None
    bare: BareSamples | None = None
    codec: str | None = None
    form: ChunkForm | None = None
    extra: int = 0
    others: tuple[int, ...] = ()
    wraps: bool = True
    header: Callable[[int], bytes] | None = None
    container: str | None = None

    def held_against(self, stream: BinaryIO, nbytes: int, *, behind: bool = True) -> Probe:
        """Return what the file of `nbytes` bytes really holds.

        Args:
            behind: Look at what stands behind the samples.
        """
        present = max(0, nbytes - self.start)
        if self.size is None:
            return self._all_of(present, "unknown")
        if self.size > present:
            if self._is_placeholder(self.size):
                return self._all_of(present, "ignored")
            if self._frames(present) >= self._frames(self.size):
                return self._believed()
            return self._refused(f"expected {self.size} bytes of samples, got {present}")
        if not behind or self._nothing_lost(stream, self.size, nbytes):
            return self._believed()
        if self.bare is not None:
            for size in self._other_sizes(present):
                if self._nothing_lost(stream, size, nbytes):
                    return self._as_bare(self.bare, size, "ignored")
        if self._is_placeholder(self.size) and (self.bare or (self.header and present < WRAP)):
            return self._all_of(present, "ignored")
        return self._refused(
            f"expected {self.size} bytes of samples, got {present - self.size} more that are no "
            "chunks: more samples, or another file"
        )

    def _frames(self, size: int) -> int:
        return size // (self.frame_bytes or 1)

    def _is_placeholder(self, size: int) -> bool:
        stated = size + self.extra
        if not self.wraps:
            return size == 0 or stated >= NO_SIZE
        near = abs(stated - WRAP // 2) <= NEAR_BYTES or WRAP - NEAR_BYTES <= stated < WRAP
        return near or size == 0

    def _other_sizes(self, present: int) -> Iterator[int]:
        """Sizes that the header may have meant."""
        yield from (size for size in self.others if 0 < size <= present)
        if self.wraps and self.size is not None:
            yield from range(self.size + WRAP, present + 1, WRAP)

    def _nothing_lost(self, stream: BinaryIO, size: int, nbytes: int) -> bool:
        end = self.start + size
        if nbytes - end < max(2, self.frame_bytes or 0):
            return True
        return no_audio(stream, end, nbytes, self.form, payload=size)

    def _believed(self) -> Probe:
        return Probe(self.kind, codec=self.codec)

    def _all_of(self, present: int, why: HeaderSize) -> Probe:
        """The samples reach to the end of the file."""
        if not present:
            return self._believed()
        if self.bare is not None:
            return self._as_bare(self.bare, present, why)
        found = replace(self._believed(), header_size=why)
        if self.header is None or present >= WRAP:
            return found
        return replace(found, prefix=self.header(present), start=self.start)

    def _as_bare(self, bare: BareSamples, size: int, why: HeaderSize) -> Probe:
        stop = self.start + size
        return Probe(
            self.kind,
            header_size=why,
            samples=bare,
            start=self.start,
            stop=stop,
            container=self.container,
        )

    def _refused(self, why: str) -> Probe:
        size = self.size or 0
        frames = size // self.frame_bytes if self.frame_bytes else None
        return Probe(self.kind, damage=why, declared_frames=frames, codec=self.codec)


def chunks(
    stream: BinaryIO, position: int, end: int, form: ChunkForm
) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, start and size of the payload of each chunk from `position` on.

    A chunk is the last one if its size is negative or reaches behind `end`.
    """
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
    stream: BinaryIO, position: int, nbytes: int, form: ChunkForm | None = None, *, payload: int = 0
) -> bool:
    """Return True if the file holds no samples from `position` on: chunks, tags, padding.

    Args:
        payload: Size of the chunk that ends at `position`, which may be padded.
    """
    end = audio_end(stream, nbytes)
    for _ in range(MAX_PARTS):
        padded = position + (-payload % form.align if form is not None else 0)
        if end <= padded:
            return True
        if nbytes - position <= MOST_PADDING and not any(read_at(stream, position, MOST_PADDING)):
            return True
        # Some writers leave out the padding.
        at = next((p for p in (padded, position) if _may_be_chunk(stream, p, form)), None)
        if at is None or form is None:
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


def _may_be_chunk(stream: BinaryIO, position: int, form: ChunkForm | None) -> bool:
    """Return True if a chunk without samples may start at a position, by its name."""
    if form is None:
        return False
    name, _ = form.parse(read_at(stream, position, form.header_bytes))
    return name not in MORE_AUDIO and name.isascii() and name.decode("ascii").isprintable()
