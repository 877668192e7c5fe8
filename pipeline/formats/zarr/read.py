"""Random access to one Zarr store: runs of chunks, decoded once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import zarr

from earmill.pipeline.formats.blocks import (
    BlockCache,
    FrameSpan,
    other_row,
    outside,
)
from earmill.pipeline.formats.trust import Promise
from earmill.pipeline.formats.zarr.store import LayoutStore
from earmill.pipeline.storage.layout import Layout

# Chunks of about 1 MB in one request: bounds what a row of hours holds beside its own result.
MAX_RUN = 64


class ZarrShard:
    """A shard's Zarr store; reads only the inner chunks a span touches."""

    def __init__(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> None:
        self._rel, self._cache = rel, cache
        # Format 2 knows filters that run code; of format 3 the store lets only our codecs through.
        self._group = zarr.open_group(
            LayoutStore(layout, rel, promise), mode="r", zarr_format=3, use_consolidated=True
        )
        self._values: dict[str, Any] = {}
        self._rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def read(self, stream: str, span: FrameSpan) -> np.ndarray:
        """A fresh array; see `ShardReader`."""
        first, last = span.start + span.first, span.start + span.last
        self._check_row(stream, span)
        values = self._array(stream)
        end = self._end_of(stream, span.row, values.shape[0])
        if last > end:
            raise outside(self._rel, stream, span.last, end - span.start)
        step = values.chunks[0]
        frames = np.empty((last - first, values.shape[1]), values.dtype)
        for chunk, block in self._blocks(stream, values, range(first // step, -(-last // step))):
            low, high = max(first, chunk * step), min(last, (chunk + 1) * step)
            frames[low - first : high - first] = block[low - chunk * step : high - chunk * step]
        return frames

    def close(self) -> None:
        """Nothing to do: stores hold no handle between reads."""

    def _check_row(self, stream: str, span: FrameSpan) -> None:
        """Refuse a row that the store has elsewhere or not at all."""
        if stream not in self._rows:
            group = self._group[stream]
            self._rows[stream] = group["row_id"][:], group["row_start"][:]
        ids, starts = self._rows[stream]
        if span.row >= len(ids) or ids[span.row] != span.row_id:
            raise other_row(self._rel, span, ids[span.row] if span.row < len(ids) else None)
        if starts[span.row] != span.start:
            raise outside(self._rel, f"{stream}: a start at", span.start, int(starts[span.row]))

    def _end_of(self, stream: str, row: int, n_frames: int) -> int:
        """Where the frames of a row end: where the next ones start. What the index says of its
        length could reach into another row."""
        _, starts = self._rows[stream]
        return min(int(starts[row + 1]) if row + 1 < len(starts) else n_frames, n_frames)

    def _array(self, stream: str) -> Any:
        if stream not in self._values:
            self._values[stream] = self._group[f"{stream}/values"]
        return self._values[stream]

    def _blocks(self, stream: str, values: Any, chunks: range) -> Iterator[tuple[int, np.ndarray]]:
        """Decoded chunks with their numbers, in any order; runs of missing ones in one request."""
        step, missing = values.chunks[0], []
        for chunk in chunks:
            block = self._cache.get((self._rel, stream, chunk))
            if block is None:
                missing.append(chunk)
            else:
                yield chunk, block[0]
        for run in _runs(missing):
            joined = values[run[0] * step : (run[-1] + 1) * step]
            for i, chunk in enumerate(run):
                # A copy: a view would keep the whole run alive behind the cache's back.
                piece = joined[i * step : (i + 1) * step].copy()
                yield chunk, self._cache.put((self._rel, stream, chunk), (piece,))[0]


def _runs(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Group increasing integers into runs without gaps, none longer than a request should be."""
    run: list[int] = []
    for number in numbers:
        if run and (number != run[-1] + 1 or len(run) == MAX_RUN):
            yield run
            run = []
        run.append(number)
    if run:
        yield run
