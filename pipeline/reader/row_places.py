"""Where the rows of a set lie in their shards, and how long they are: an index ready for use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from earmill.pipeline.formats.block_cache import FrameSpan
from earmill.pipeline.formats.format import Format
from earmill.pipeline.reader.catalog import Catalog
from earmill.pipeline.reader.read_ahead import Span, Spans, Wanted


class RowPlaces:
    """Numbers of rows, by position in the set.

    Args:
        catalog: Of the set.
        streams: Those that are read.
        fmt: The format that is read.
    """

    def __init__(self, catalog: Catalog, streams: Sequence[str], fmt: Format) -> None:
        self._table = catalog.table
        self.layouts = {name: fmt.layout_of(catalog.streams[name]) for name in streams}
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
        if "shard" not in self._plain:
            column = self._table.column("shard").combine_chunks().dictionary_encode()
            self._plain["shard"] = column.dictionary.to_pylist(), column.indices.to_numpy()
        names, numbers = self._plain["shard"]
        return str(names[numbers[position]])

    def seconds(self, position: int) -> float:
        """Duration of a row, s."""
        return float(self._seconds[position])

    def all_frames(self, position: int) -> Mapping[str, tuple[int, int]]:
        """Frames [first, last) of each stream of a row."""
        return {name: (0, int(n_frames[position])) for name, n_frames in self.lengths.items()}

    def frames(self, position: int, span_s: Span) -> Mapping[str, tuple[int, int]]:
        """Frames [first, last) of each stream that overlap a stretch of a row."""
        return {
            name: layout.frame_range(int(self.lengths[name][position]), *span_s)
            for name, layout in self.layouts.items()
        }

    def spans(
        self, position: int, row_id: str, frames: Mapping[str, tuple[int, int]]
    ) -> dict[str, FrameSpan]:
        """Where these stored rows [first, last) of each stream of a row lie."""
        row = int(self.rows[position])
        return {
            name: FrameSpan(row_id, row, int(self.starts[name][position]), first, last)
            for name, (first, last) in frames.items()
        }

    def wanted(self, wanted: Wanted) -> dict[str, FrameSpan]:
        """Stored rows of each stream in a stretch of a row, or in all of it; of a stretch without
        the streams whose stored rows are no frames: their places are told when they are read."""
        position, span_s = wanted
        if span_s is None:
            rows = {name: (0, int(sizes[position])) for name, sizes in self.sizes.items()}
        else:
            frames = self.frames(position, span_s)
            rows = {k: frames[k] for k, v in self.layouts.items() if not v.row_counts}
        return self.spans(position, self.scalar("row_id", position), rows)

    def nbytes(self, rows: Sequence[int], spans_s: Spans | None) -> np.ndarray:
        """About how many bytes rows, or stretches of them, take when they are decoded."""
        at = np.asarray(rows, np.int64)
        if spans_s is None:
            return np.asarray(self._nbytes[at])
        taken = np.array([np.inf if span is None else span[1] - span[0] for span in spans_s])
        return np.asarray(self._nbytes[at] * np.minimum(1.0, taken / self._seconds[at]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plain": {}}
