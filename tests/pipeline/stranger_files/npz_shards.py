"""A shard as one npz file, as a format."""

from pathlib import Path
from typing import Any

import numpy as np

from earmill import formats
from earmill.formats import BlockCache, Encoding, FrameSpan, Layout, Promise, layout_of


class NpzFormat(formats.Format):
    suffix = ".npz"
    summary = "one npz file a shard; for NumPy alone"
    integrity = "CRC-32 of every array"

    def write(self, path: Path, rows: Any, streams: Any, encoding: Encoding) -> None:
        arrays = {"row_id": np.array([row.row_id for row in rows], "U")}
        for layout in map(layout_of, streams):
            values = [row.streams[layout.name][:] for row in rows]
            none = np.empty((0, layout.stored_width), layout.stored_dtype(encoding.dtype))
            arrays[layout.name] = np.concatenate([none, *values])
            arrays[f"{layout.name}.n_frames"] = np.array([len(each) for each in values], np.int64)
            for name, counts in zip(layout.row_counts, layout.counts_of(rows), strict=True):
                arrays[f"{layout.name}.{name}"] = counts
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    def digest(self, path: Path, streams: Any) -> formats.ShardDigest:
        digests = {}
        with np.load(path) as held:
            for layout in map(layout_of, streams):
                values, names = held[layout.name], ("n_frames", *layout.row_counts)
                counts = [held[f"{layout.name}.{name}"] for name in names]
                kind = layout.stored_width, values.dtype.name
                digests[layout.name] = formats.digest_blocks([values], *kind, *counts)
            return formats.ShardDigest(tuple(held["row_id"].tolist()), digests)

    def open(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> "NpzShard":
        return NpzShard(layout, rel)


class NpzShard:
    def __init__(self, layout: Layout, rel: str) -> None:
        with layout.open_file(rel) as file, np.load(file) as held:
            self._rel, self._held = rel, dict(held)

    def read(self, stream: str, span: FrameSpan) -> np.ndarray:
        ids, sizes = self._held["row_id"], self._held[f"{stream}.n_frames"]
        if span.row >= len(ids) or ids[span.row] != span.row_id:
            raise formats.other_row(self._rel, span, [*ids, None][min(span.row, len(ids))])
        if span.last > sizes[span.row]:
            raise formats.outside(self._rel, stream, span.last, sizes[span.row])
        return self._held[stream][span.start :][span.first : span.last].copy()

    def close(self) -> None: ...


NPZ = NpzFormat()
