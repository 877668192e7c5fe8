"""Where the rows of a set lie in their shards, and how long they are: an index ready for use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from earmill.pipeline.formats.blocks import FrameSpan
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.reader.catalog import Catalog
from earmill.pipeline.reader.read_ahead import Wanted


class RowPlaces:
    """Numbers of rows, by position in the set.

    Args:
        catalog: Of the set.
        streams: Those that are read.
    """

    def __init__(self, catalog: Catalog, streams: Sequence[str]) -> None:
        self._table = catalog.table
        self.layouts = {name: layout_of(catalog.streams[name]) for name in streams}
        self.starts = {name: catalog.column(f"{name}_start") for name in streams}
        self.sizes = {name: catalog.column(f"{name}_n_frames") for name in streams}
        # Frames or steps of each clip: what a slice counts in.
        self.lengths = {k: catalog.column(v.length_column) for k, v in self.layouts.items()}
        self.rows, self._seconds = catalog.column("row"), catalog.column("seconds")
        self._nbytes = np.zeros(len(self.rows), np.int64)
        for name, layout in self.layouts.items():
            self._nbytes += self.sizes[name] * layout.row_bytes(catalog.dtype)
        self._plain: dict[str, Any] = {}

    def scalar(self, column: str, position: int) -> Any:
        """One cell of the table of rows."""
        # A table has its columns by name, and each in pieces: ten times slower than an array.
        if column not in self._plain:
            self._plain[column] = self._table.column(column).combine_chunks()
        return self._plain[column][position].as_py()

    def shard(self, position: int) -> str:
        """The shard of a row."""
        return str(self.scalar("shard", position))

    def frames(self, position: int, span_s: tuple[float, float]) -> Mapping[str, tuple[int, int]]:
        """Frames [first, last) of each stream that overlap a stretch of a row."""
        return {
            name: layout.frame_range(int(self.lengths[name][position]), *span_s)
            for name, layout in self.layouts.items()
        }

    def stored(self, position: int) -> dict[str, FrameSpan]:
        """All stored rows of a row, by stream."""
        row_id, row = self.scalar("row_id", position), int(self.rows[position])
        return {
            name: FrameSpan(
                row_id, row, int(self.starts[name][position]), 0, int(self.sizes[name][position])
            )
            for name in self.layouts
        }

    def wanted(self, position: int, span_s: tuple[float, float] | None) -> dict[str, FrameSpan]:
        """Stored rows of each stream in a stretch of a row, or in all of it; of a stretch without
        the streams whose stored rows are no frames: their places are told when they are read."""
        found = self.stored(position)
        if span_s is None:
            return found
        frames = self.frames(position, span_s)
        return {
            name: replace(found[name], first=first, last=last)
            for name, (first, last) in frames.items()
            if not self.layouts[name].row_counts
        }

    def nbytes(self, wanted: Wanted) -> int:
        """About how many bytes a row, or a stretch of it, takes when it is decoded."""
        position, span_s = wanted
        nbytes = int(self._nbytes[position])
        if span_s is None:
            return nbytes
        return int(nbytes * min(1.0, (span_s[1] - span_s[0]) / self._seconds[position]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plain": {}}
