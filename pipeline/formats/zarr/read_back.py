"""What a store that was just written really holds, read from its files and not remembered.

By the reader's own pieces: metadata, index of chunks, checksums, decompressor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.formats.digest import (
    ShardDigest,
    StreamDigest,
    digest_blocks,
    same_bits,
)
from earmill.pipeline.formats.format import Promise
from earmill.pipeline.formats.rows import FeatureRow, OutFile, pieces
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.formats.zarr.arrays import (
    ROOT_METADATA,
    FrameChunks,
    read_index,
    read_numbers,
    read_strings,
)
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.stored_file import StoredFile

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo


def digest_zarr(path: Path, streams: Sequence[StreamInfo]) -> ShardDigest:
    """Of a written store, chunk by chunk."""
    store = WrittenStore(path)
    digests = {}
    for info in streams:
        values = store.frame_chunks(info.name)
        counts = [store.numbers(info.name, name) for name in ("row_size", *_counts(info))]
        blocks = store.frames(info.name)
        digests[info.name] = digest_blocks(blocks, values.width, values.dtype.name, *counts)
    row_ids = tuple(store.row_ids(streams[-1].name)) if streams else ()
    return ShardDigest(row_ids, digests)


def compared_zarr(
    path: Path,
    rows: Sequence[FeatureRow],
    streams: Sequence[StreamInfo],
    expected: ShardDigest,
) -> ShardDigest:
    """The same, without hashing values that are those of the rows bit by bit.

    Args:
        expected: The digest of the rows; a stream that is the same throughout has its hash.
    """
    store = WrittenStore(path)
    digests = {}
    for info in streams:
        values, counts = store.frame_chunks(info.name), layout_of(info).counts_of(rows)
        held = [row.streams[info.name] for row in rows]
        sizes = np.array([len(each) for each in held], np.int64)
        same = same_bits(
            store.frames(info.name), (piece for each in held for piece in pieces(each))
        ) and all(
            np.array_equal(store.numbers(info.name, name), wanted)
            for name, wanted in zip(("row_size", *_counts(info)), (sizes, *counts), strict=True)
        )
        sha256 = expected.streams[info.name].sha256 if same else ""
        kind = values.width, values.dtype.name
        digests[info.name] = StreamDigest(values.n_frames, *kind, sha256)
    row_ids = tuple(store.row_ids(streams[-1].name)) if streams else ()
    return ShardDigest(row_ids, digests)


def _counts(info: StreamInfo) -> Sequence[str]:
    return layout_of(info).row_counts


class WrittenStore:
    """A store in a local folder.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self._layout, self._rel = Layout.open(path.parent), path.name
        root = json.loads((path / ROOT_METADATA).read_text(encoding="utf-8"))
        self._arrays = root["consolidated_metadata"]["metadata"]
        sizes = {
            file.relative_to(path.parent).as_posix(): file.stat().st_size
            for file in path.rglob("*")
            if file.is_file()
        }
        files = {rel: OutFile(rel, nbytes, "") for rel, nbytes in sizes.items()}
        self._promise = Promise(rows=0, frames={}, columns={}, files=files)

    def frame_chunks(self, stream: str) -> FrameChunks:
        """How its frames lie."""
        return FrameChunks.of(f"{self._rel}/{stream}", self._arrays[f"{stream}/values"])

    def frames(self, stream: str) -> Iterator[NDArray[Any]]:
        """All frames, chunk by chunk; each is gone when the next one is asked for."""
        values = self.frame_chunks(stream)
        memory = np.empty(values.chunk_bytes, np.uint8)
        for chunk in range(-(-values.n_frames // values.chunk_frames)):
            number, place = values.object_of(chunk)
            if place == 0:
                rel = f"{self._rel}/{stream}/values/c/{number}/0"
                named = self._promise.files[rel]
                file = StoredFile(self._layout, rel, named.bytes, named.sha256)
                spans = read_index(file, values.object_chunks)
            low, high = spans[place].tolist()
            yield values.decode(chunk, file.read(low, high - low), memory)

    def numbers(self, stream: str, name: str) -> NDArray[Any]:
        """A vector of numbers, one of each row."""
        return read_numbers(*self._place(stream, name))

    def row_ids(self, stream: str) -> list[str]:
        """In the order of the rows."""
        return read_strings(*self._place(stream, "row_id"))

    def _place(self, stream: str, name: str) -> tuple[Layout, str, Any, Promise]:
        key = f"{stream}/{name}"
        return self._layout, f"{self._rel}/{key}", self._arrays[key], self._promise
