"""Random access to one Zarr store: chunks decoded once, straight into the block that is kept.

Not through zarr, which would open the same bytes: its general path costs more than decoding. What
zarr reads as silence, a chunk that is not there, is an error here, as writers write every chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.blocks import (
    Block,
    BlockCache,
    FrameSpan,
    Piece,
    other_row,
    outside,
)
from earmill.pipeline.formats.half import put_together
from earmill.pipeline.formats.trust import Promise
from earmill.pipeline.formats.zarr.arrays import (
    FrameChunks,
    read_numbers,
    read_strings,
)
from earmill.pipeline.formats.zarr.objects import FrameObject
from earmill.pipeline.formats.zarr.trust import read_metadata
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.stored_file import StoredFile

# Of one request: a local file gives a few chunks as fast as many, and their bytes stay in the cache
# of the processor until they are decoded.
REMOTE_REQUEST_BYTES, LOCAL_REQUEST_BYTES = 8 * 2**20, 2 * 2**20
PREPARE_THREADS = 8
VECTORS = ("row_id", "row_start")


class ZarrShard:
    """A shard's Zarr store; reads only the inner chunks a span touches. Safe in several threads."""

    def __init__(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> None:
        self._layout, self._promise, self._cache = layout, promise, cache
        self.rel = rel
        self._arrays: Mapping[str, Any] = read_metadata(layout, rel, promise)
        self._values = {
            stream: FrameChunks.of(f"{rel}/{stream}", self._arrays[f"{stream}/values"])
            for stream in promise.columns
        }
        self._request_bytes = LOCAL_REQUEST_BYTES if layout.is_local else REMOTE_REQUEST_BYTES
        self._rows: dict[str, tuple[list[str], np.ndarray]] = {}
        self._vectors: dict[str, Any] = {}
        self._objects: dict[tuple[str, int], FrameObject] = {}

    def read(self, stream: str, span: FrameSpan) -> np.ndarray:
        """A fresh array; see `ShardReader`."""
        values = self._values[stream]
        shape = span.last - span.first, values.width
        return put_together(self.pieces(stream, span), shape, values.dtype)

    def pieces(self, stream: str, span: FrameSpan) -> Iterator[Piece]:
        """Parts of chunks; see `GivesPieces`."""
        first, last = span.start + span.first, span.start + span.last
        self._check_row(stream, span)
        values = self._values[stream]
        end = self._end_of(stream, span.row, values.n_frames)
        if last > end:
            raise outside(self.rel, stream, span.last, end - span.start)
        step = values.chunk_frames
        for chunk, block in self._blocks(stream, self.blocks(stream, span)):
            low, high = max(first, chunk * step), min(last, (chunk + 1) * step)
            yield low - first, block[low - chunk * step : high - chunk * step]

    def blocks(self, stream: str, span: FrameSpan) -> Sequence[int]:
        """The chunks that hold these frames; see `ReadsAhead`."""
        step = self._values[stream].chunk_frames
        return range((span.start + span.first) // step, -(-(span.start + span.last) // step))

    def requests(self, blocks: Iterable[Block]) -> Iterator[list[Block]]:
        """Chunks of a stream that lie end to end in one object, of bounded size; see
        `ReadsAhead`.

        From a remote store what reading asks for first comes at once: row ids, starts, and indexes
        of objects, each a round trip if they came one after the other.
        """
        wanted = {stream: sorted(numbers) for stream, numbers in _by_stream(blocks)}
        if self._layout.is_local:
            for stream, chunks in wanted.items():
                yield from self._requests(stream, chunks)
            return
        with ThreadPoolExecutor(PREPARE_THREADS) as pool:
            objects = {stream: self._ask(pool, stream, wanted[stream]) for stream in wanted}
            places = {self._vector_key(s, name): (s, name) for s in wanted for name in VECTORS}
            vectors = [
                pool.submit(self._vector, *place)
                for key, place in places.items()
                if key not in self._vectors
            ]
            for stream, chunks in wanted.items():
                for each in objects[stream]:
                    each.result()
                yield from self._requests(stream, chunks)
            for each in vectors:
                each.result()

    def _ask(
        self, pool: ThreadPoolExecutor, stream: str, chunks: Sequence[int]
    ) -> list[Future[FrameObject]]:
        """Begin to fetch the indexes of the objects with these chunks, and small objects that are
        wanted as a whole with their index."""
        values = self._values[stream]
        counts = Counter(values.object_of(chunk)[0] for chunk in chunks)
        return [
            pool.submit(self._object, stream, number, count == values.chunks_in(number))
            for number, count in counts.items()
            if (stream, number) not in self._objects
        ]

    def _requests(self, stream: str, chunks: Sequence[int]) -> Iterator[list[Block]]:
        for run in self._runs(stream, chunks):
            yield [(stream, chunk) for chunk in run]

    def load(self, blocks: Sequence[Block]) -> None:
        """See `ReadsAhead`."""
        for stream, numbers in _by_stream(blocks):
            for _ in self._load(stream, numbers):
                pass

    def close(self) -> None:
        """Nothing to do: no handle is held between reads."""

    def _check_row(self, stream: str, span: FrameSpan) -> None:
        """Refuse a row that the store has elsewhere or not at all."""
        if stream not in self._rows:
            self._keep_rows(stream)
        ids, starts = self._rows[stream]
        if span.row >= len(ids) or ids[span.row] != span.row_id:
            raise other_row(self.rel, span, ids[span.row] if span.row < len(ids) else None)
        if starts[span.row] != span.start:
            raise outside(self.rel, f"{stream}: a start at", span.start, int(starts[span.row]))

    def _keep_rows(self, stream: str) -> None:
        row_ids, starts = (self._vector(stream, name) for name in VECTORS)
        self._rows[stream] = row_ids, starts

    def _vector_key(self, stream: str, name: str) -> str:
        """Equal for vectors that were committed with equal bytes, as those of streams often were:
        they are read once."""
        rel = f"{self.rel}/{stream}/{name}"
        committed = self._promise.files.get(f"{rel}/c/0")
        return rel if committed is None else f"{name} {committed.sha256}"

    def _vector(self, stream: str, name: str) -> Any:
        """The ids of the rows, or where they start."""
        key = self._vector_key(stream, name)
        if key not in self._vectors:
            rel, array = f"{self.rel}/{stream}/{name}", self._arrays[f"{stream}/{name}"]
            read: Any = read_strings if name == "row_id" else read_numbers
            self._vectors[key] = read(self._layout, rel, array, self._promise)
        return self._vectors[key]

    def _end_of(self, stream: str, row: int, n_frames: int) -> int:
        """Where the frames of a row end: where the next ones start. What the index says of its
        length could reach into another row."""
        _, starts = self._rows[stream]
        return min(int(starts[row + 1]) if row + 1 < len(starts) else n_frames, n_frames)

    def _blocks(self, stream: str, chunks: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Decoded chunks with their numbers, in any order."""
        there = self._cache.held([(self.rel, stream, chunk) for chunk in chunks])
        missing = [chunk for chunk, block in zip(chunks, there, strict=True) if block is None]
        for chunk, block in zip(chunks, there, strict=True):
            if block is not None:
                yield chunk, block[0]
        if missing:
            yield from self._awaited(stream, missing)

    def _awaited(self, stream: str, chunks: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Chunks that were not there: what nobody fetches is fetched, the others waited for."""
        # Claimed, or threads that read ahead would read the same chunks at the same time; and read
        # before others are waited for, who may wait for these.
        mine = self._cache.claim((self.rel, stream, chunk) for chunk in chunks)
        claimed = [chunk for _, _, chunk in mine]
        try:
            yield from self._load(stream, claimed)
        finally:
            self._cache.release(mine)
        missing = []
        for chunk in sorted({*chunks} - {*claimed}):
            block = self._cache.get((self.rel, stream, chunk))
            if block is None:
                missing.append(chunk)
            else:
                yield chunk, block[0]
        yield from self._load(stream, missing)

    def _load(self, stream: str, chunks: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Fetch, decode and keep chunks; neighbours of an object come in one request."""
        values = self._values[stream]
        for run in self._runs(stream, chunks):
            found = self._object(stream, run[0] // values.object_chunks)
            places = [values.object_of(chunk)[1] for chunk in run]
            start, end = int(found.spans[places[0], 0]), int(found.spans[places[-1], 1])
            stored = found.read(start, end)
            blocks = []
            for chunk, place in zip(run, places, strict=True):
                low, high = found.spans[place] - start
                try:
                    memory = self._cache.memory(values.chunk_bytes)
                    frames = values.decode(chunk, stored[low:high], memory)
                except CommitError as err:
                    url = self._layout.url(found.file.rel)
                    raise CommitError(f"{url}, chunk {place}: {err}") from err
                blocks.append((chunk, self._cache.put((self.rel, stream, chunk), (frames,))[0]))
            yield from blocks

    def _runs(self, stream: str, chunks: Iterable[int]) -> Iterator[list[int]]:
        """Increasing chunks in runs that lie end to end in one object, of bounded size."""
        object_of = self._values[stream].object_of
        run: list[int] = []
        # Of the run: its object, where it begins and where it ends.
        last = begin = end = -1
        for chunk in chunks:
            number, place = object_of(chunk)
            low, high = self._object(stream, number).spans[place].tolist()
            if low < 0:
                raise CommitError(
                    f"{self.rel}/{stream}/values: chunk {chunk} is missing although the shard is "
                    "committed; run `earmill verify`"
                )
            far = number != last or low != end or high - begin > self._request_bytes
            if run and far:
                yield run
                run = []
            begin = begin if run else low
            last, end = number, high
            run.append(chunk)
        if run:
            yield run

    def _object(self, stream: str, number: int, whole: bool = False) -> FrameObject:
        """An object of a stream; its index is read once.

        Args:
            whole: It is wanted as a whole.
        """
        key = stream, number
        if key not in self._objects:
            rel = f"{self.rel}/{stream}/values/c/{number}/0"
            if rel not in self._promise.files:
                raise CommitError(
                    f"{self._layout.url(rel)} is missing from the commit; run `earmill verify`"
                )
            named = self._promise.files[rel]
            file = StoredFile(self._layout, rel, named.bytes, named.sha256)
            whole = whole and named.bytes <= self._request_bytes
            places = self._values[stream].object_chunks
            self._objects[key] = FrameObject(file, places, whole=whole)
        return self._objects[key]


def _by_stream(blocks: Iterable[Block]) -> Iterator[tuple[str, list[int]]]:
    numbers: dict[str, list[int]] = {}
    for stream, number in blocks:
        numbers.setdefault(stream, []).append(number)
    yield from numbers.items()
