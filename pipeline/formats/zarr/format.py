"""The format `zarr`, and random access to one store. Chunks are decoded straight into the block
that is kept; zarr's general path costs more than decoding. zarr reads a missing chunk as zeros;
here it is an error."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.block_cache import (
    Block,
    BlockCache,
    BlockReader,
    FrameSpan,
    Piece,
    ShardReader,
    other_row,
    outside,
)
from earmill.pipeline.formats.digest import ShardDigest, digest_blocks
from earmill.pipeline.formats.format import Encoding, Format, Promise
from earmill.pipeline.formats.rows import FeatureRow, OutFile
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.formats.zarr import arrays
from earmill.pipeline.storage.layout import Layout, StoredFile
from earmill.pipeline.storage.local_cache import Bytes
from earmill.pipeline.storage.local_store import files_below

# Bytes of one request. A local file gives a few chunks as fast as many, and a few stay in the
# processor's cache until they are decoded.
REMOTE_REQUEST_BYTES, LOCAL_REQUEST_BYTES = 8 * 2**20, 2 * 2**20
VECTORS = ("row_id", "row_start")


class ZarrShard(BlockReader):
    """A shard's Zarr store for several threads."""

    def __init__(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> None:
        super().__init__(rel, promise.columns)
        self._layout, self._promise, self._cache = layout, promise, cache
        self._request_bytes = LOCAL_REQUEST_BYTES if layout.is_local else REMOTE_REQUEST_BYTES
        self._arrays, self._values = arrays.read_metadata(layout, rel, promise)
        self._vectors: dict[str, Any] = {}
        self._indexes: dict[tuple[str, int], NDArray[np.int64]] = {}
        self._asking = Lock()  # Threads that read ahead do not send the same requests twice.

    def pieces(self, stream: str, span: FrameSpan) -> Iterator[Piece]:
        """Yield parts of chunks; refuse a row that lies elsewhere in the store or ends before."""
        ids, starts = (self._vector(stream, name) for name in VECTORS)
        if span.row >= len(ids) or ids[span.row] != span.row_id:
            raise other_row(self.rel, span, ids[span.row] if span.row < len(ids) else None)
        if starts[span.row] != span.start:
            raise outside(self.rel, f"{stream}: a start at", span.start, int(starts[span.row]))
        values = self._values[stream]
        first, last, end = span.start + span.first, span.start + span.last, values.n_frames
        if span.row + 1 < len(starts):
            end = min(end, int(starts[span.row + 1]))
        if last > end:
            raise outside(self.rel, stream, span.last, end - span.start)
        step = values.chunk_frames
        for chunk, block in self._blocks(stream, self.blocks(stream, span)):
            low, high = max(first, chunk * step), min(last, (chunk + 1) * step)
            yield low - first, block[low - chunk * step : high - chunk * step]

    def blocks(self, stream: str, span: FrameSpan) -> Sequence[int]:
        step = self._values[stream].chunk_frames
        return range((span.start + span.first) // step, -(-(span.start + span.last) // step))

    def requests(self, blocks: Iterable[Block], pool: Executor) -> Iterator[list[Block]]:
        """Group contiguous chunks of an object, bounded in bytes."""
        objects = [*self._objects(blocks)]
        if not self._layout.is_local:
            self._ask_first(objects, pool)
        for stream, number, chunks in objects:
            for _, _, run in self._runs(stream, number, chunks):
                yield [(stream, chunk) for chunk in run]

    def _objects(self, blocks: Iterable[Block]) -> Iterator[tuple[str, int, list[int]]]:
        """Group chunks by their object: its stream, its number, and the chunks in order."""

        def place(block: Block) -> tuple[str, int]:
            return block[0], block[1] // self._values[block[0]].object_chunks

        for (stream, number), group in groupby(sorted(blocks), place):
            yield stream, number, [chunk for _, chunk in group]

    def _ask_first(self, objects: Sequence[tuple[str, int, list[int]]], pool: Executor) -> None:
        """Fetch row ids, starts and indexes of objects in concurrent requests."""
        with self._asking:
            vectors = {self._vector_key(s, k): (s, k) for s, _, _ in objects for k in VECTORS}
            left = [place for key, place in vectors.items() if key not in self._vectors]
            unknown = [
                (stream, number)
                for stream, number, chunks in objects
                if (stream, number) not in self._indexes
                and not self._comes_whole(stream, number, len(chunks))
            ]
            asked: list[Future[Any]] = [pool.submit(self._index, *each) for each in unknown]
            asked += [pool.submit(self._vector, *each) for each in left]
            for each in asked:
                each.result()

    def _comes_whole(self, stream: str, number: int, n_chunks: int) -> bool:
        """Return True if an object is fetched in one request, with its index."""
        if self._layout.is_local or (stream, number) in self._indexes:
            return False
        values = self._values[stream]
        every = min(values.object_chunks, values.n_chunks - number * values.object_chunks)
        return n_chunks == every and self._file(stream, number).nbytes <= self._request_bytes

    def load(self, blocks: Sequence[Block]) -> None:
        for _ in self._load(blocks):
            pass

    def _vector_key(self, stream: str, name: str) -> str:
        """Return one key for vectors of several streams that have equal bytes."""
        rel = f"{self.rel}/{stream}/{name}"
        committed = self._promise.files.get(f"{rel}/c/0")
        return rel if committed is None else f"{name} {committed.sha256}"

    def _vector(self, stream: str, name: str) -> Any:
        key = self._vector_key(stream, name)
        if key not in self._vectors:
            column, said = None, self._promise.said
            # A local file is read as fast as it is encoded.
            if said is not None and not self._layout.is_local:
                column = said.column(name if name == "row_id" else f"{stream}_start")
            rel, array = f"{self.rel}/{stream}/{name}", self._arrays[f"{stream}/{name}"]
            self._vectors[key] = arrays.read_vector(self._layout, rel, array, self._promise, column)
        return self._vectors[key]

    def _blocks(self, stream: str, chunks: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield decoded chunks: cached, then loaded here, then loaded by other threads."""
        keys = [(self.rel, stream, chunk) for chunk in chunks]
        missing = []
        for key, block in zip(keys, self._cache.held(keys), strict=True):
            if block is None:
                missing.append(key)
            else:
                yield key[2], block[0]
        # Claim chunks, so that threads that read ahead do not read them too. Load them before the
        # wait for other chunks, because other threads may wait for these.
        mine = self._cache.claim(missing)
        try:
            yield from self._load((stream, chunk) for _, _, chunk in mine)
        finally:
            self._cache.release(mine)
        for key in sorted({*missing} - {*mine}):
            block, chunk = self._cache.get(key), key[2]
            yield from self._load([(stream, chunk)]) if block is None else [(chunk, block[0])]

    def _load(self, blocks: Iterable[Block]) -> Iterator[tuple[int, np.ndarray]]:
        """Fetch, decode and keep chunks."""
        for stream, number, chunks in self._objects(blocks):
            file = self._file(stream, number)
            for begin, end, run in self._runs(stream, number, chunks):
                content = file.read(begin, end - begin)
                spans = self._index(stream, number, content if end == file.nbytes else None)
                with self._cache.decoding:
                    decoded = [self._decoded(stream, chunk, spans, content, begin) for chunk in run]
                yield from decoded

    def _decoded(
        self, stream: str, chunk: int, spans: NDArray[np.int64], content: Bytes, begin: int
    ) -> tuple[int, np.ndarray]:
        """Decode and keep a chunk out of the content of its object from byte `begin` on."""
        values, (low, high) = self._values[stream], self._span(stream, chunk, spans)
        try:
            frames = values.decode(chunk, content[low - begin : high - begin])
        except CommitError as err:
            number, place = divmod(chunk, values.object_chunks)
            url = self._layout.url(self._file(stream, number).rel)
            raise CommitError(f"{url}, chunk {place}: {err}") from err
        return chunk, self._cache.put((self.rel, stream, chunk), (frames,))[0]

    def _runs(
        self, stream: str, number: int, chunks: Sequence[int]
    ) -> Iterator[tuple[int, int, Sequence[int]]]:
        """Group sorted chunks of an object into contiguous ranges, one request each: the first byte
        of a range, its end, and its chunks. See also `_comes_whole`."""
        if self._comes_whole(stream, number, len(chunks)):
            yield 0, self._file(stream, number).nbytes, chunks
            return
        spans = self._index(stream, number)
        run, begin, end = list[int](), -1, -1
        for chunk in chunks:
            low, high = self._span(stream, chunk, spans)
            if run and (low != end or high - begin > self._request_bytes):
                yield begin, end, run
                run = []
            begin, end = begin if run else low, high
            run.append(chunk)
        if run:
            yield begin, end, run

    def _span(self, stream: str, chunk: int, spans: NDArray[np.int64]) -> tuple[int, int]:
        """Return the first byte of a chunk in its object, and its end."""
        low, high = spans[chunk % self._values[stream].object_chunks].tolist()
        if low < 0:
            raise CommitError(
                f"{self.rel}/{stream}/values: chunk {chunk} is missing although the shard is "
                "committed; run `earmill verify`"
            )
        return low, high

    def _index(self, stream: str, number: int, content: Bytes | None = None) -> NDArray[np.int64]:
        """Return where the chunks of an object lie, read once or taken from its whole content."""
        if (stream, number) not in self._indexes:
            file, n_chunks = self._file(stream, number), self._values[stream].object_chunks
            self._indexes[stream, number] = arrays.read_index(file, n_chunks, content)
        return self._indexes[stream, number]

    def _file(self, stream: str, number: int) -> StoredFile:
        return self._promise.file(self._layout, f"{self.rel}/{stream}/values/c/{number}/0")


class ZarrFormat(Format):
    """A shard as one Zarr v3 store. zarr-python is imported when a store is written."""

    suffix = ".zarr"
    media_type = "application/vnd+zarr"
    summary = "one Zarr v3 store a shard, CF contiguous ragged; for long files and time slices"
    integrity = "CRC-32C of every chunk and chunk index; a missing object is an error"
    is_folder = True
    reads_parts = True

    def write(
        self,
        path: Path,
        rows: Sequence[FeatureRow],
        streams: Sequence[StreamInfo],
        encoding: Encoding,
    ) -> None:
        from earmill.pipeline.formats.zarr.write import write_zarr

        write_zarr(path, rows, streams, encoding)

    def digest(self, path: Path, streams: Sequence[StreamInfo]) -> ShardDigest:
        layout, digests = Layout.open(path.parent), {}
        root = json.loads((path / arrays.ROOT_METADATA).read_text(encoding="utf-8"))
        about = root["consolidated_metadata"]["metadata"]
        rels = [f"{path.name}/{name}" for name in files_below(path)]
        files = {rel: OutFile(rel, (path.parent / rel).stat().st_size, "") for rel in rels}
        promise = Promise(rows=0, frames={}, columns={}, files=files)

        def vector(name: str) -> Any:
            return arrays.read_vector(layout, f"{path.name}/{name}", about[name], promise)

        def frames_of(stream: str, values: arrays.FrameChunks) -> Iterator[NDArray[Any]]:
            for chunk in range(values.n_chunks):
                number, place = divmod(chunk, values.object_chunks)
                if place == 0:
                    file = promise.file(layout, f"{path.name}/{stream}/values/c/{number}/0")
                    spans = arrays.read_index(file, values.object_chunks)
                low, high = spans[place].tolist()
                yield values.decode(chunk, file.read(low, high - low))

        for info in streams:
            name = f"{info.name}/values"
            values = arrays.FrameChunks.of(name, about[name])
            columns = ("row_size", *layout_of(info).row_counts)
            counts = [vector(f"{info.name}/{column}") for column in columns]
            blocks = frames_of(info.name, values)
            digests[info.name] = digest_blocks(blocks, values.width, values.dtype.name, *counts)
        # The writer gives every stream the same row ids.
        row_ids = tuple(vector(f"{streams[-1].name}/row_id")) if streams else ()
        return ShardDigest(row_ids, digests)

    def open(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> ShardReader:
        return ZarrShard(layout, rel, promise, cache)

    def objects(
        self, stored_rows: Mapping[str, int], streams: Sequence[StreamInfo], dtype: str
    ) -> int:
        from earmill.pipeline.formats.zarr import write

        count = 1
        for info in streams:
            layout = layout_of(info)
            per_chunk = write.chunk_frames(layout.stored_width, layout.stored_dtype(dtype))
            chunks = math.ceil(stored_rows[info.name] / per_chunk)
            vectors = len(layout.row_counts) + len(write.column_axes(info))
            count += write.OBJECTS_PER_STREAM + write.OBJECTS_OF_A_VECTOR * vectors
            count += math.ceil(chunks / write.CHUNKS_PER_OBJECT)
        return count

    def reading(self, paths: Sequence[str]) -> Sequence[str]:
        return ("import xarray", f'ds = xarray.open_zarr("{paths[0]}", group="<stream>")')


ZARR = ZarrFormat()
