"""A shard as one Zarr v3 store, CF contiguous ragged: all rows of a stream end to end.

Each stream is a group: `values (obs, column)`, `row_start (row)`, `row_size (row)` with
`sample_dimension`, `row_id (row)`, and for events `n_steps (row)`. The group's attributes hold the
stream's description. Its centre frequencies are coordinates: `fc_hz (column)`, `mfc_hz (column)`.
Array `row_id` has the one text type of zarr 3.1 that opens without a warning. Inner chunks are
about 1 MB, packed by the sharding codec into objects of up to 64 MB that are written whole.

A group's `zarr.json` also holds the metadata of everything below it (`consolidated_metadata`); zarr
would warn when it writes that. Each stream's group has a copy, because xarray opens one group.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.formats.format import Encoding
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.stream_layout import described, layout_of
from earmill.pipeline.formats.values import Values, join
from earmill.pipeline.formats.zarr import arrays

# Chosen by measurement on features of all models, see the section on codecs of
# benchmarks/RESULTS.md.
VALUE_CODECS = (BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle"), Crc32cCodec())
VECTOR_CODECS = (ZstdCodec(level=arrays.ZSTD_LEVEL), Crc32cCodec())
# Otherwise zarr leaves out chunks that equal the fill value, and -0.0 would be read as 0.0.
KEEP_ALL: Any = {"write_empty_chunks": True}
# Long names of the counts in `StreamLayout.row_counts`.
COUNT_NAMES = {"n_steps": "steps of the clip"}
AXIS_NAMES = {"fc_hz": "centre frequency", "mfc_hz": "modulation centre frequency"}
COLUMN = "column"
# A coordinate, or a further count of each row: metadata and one chunk.
OBJECTS_OF_A_VECTOR = 2
# Objects of a stream: group, metadata of four arrays, and one chunk of each of three vectors.
OBJECTS_PER_STREAM = 1 + 4 + 3
CHUNK_BYTES = 2**20
CHUNKS_PER_OBJECT = 64


def write_zarr(
    path: Path, rows: Sequence[FeatureRow], streams: Sequence[StreamInfo], encoding: Encoding
) -> None:
    shared = json.loads(json.dumps(dict(encoding.attrs or {}), sort_keys=True, allow_nan=False))
    root = zarr.create_group(path, zarr_format=3, attributes=shared)
    for info in streams:
        about = json.loads(json.dumps(described(info, has_scales=True).to_dict(), allow_nan=False))
        attributes = {"Conventions": "CF-1.11", "stream": about, **shared}
        group = root.create_group(info.name, attributes=attributes)
        _write_stream(group, rows, info, encoding.dtype)
    for folder in [*(path / info.name for info in streams), path]:
        _consolidate(folder)


def _write_stream(
    group: zarr.Group, rows: Sequence[FeatureRow], info: StreamInfo, dtype: str
) -> None:
    layout = layout_of(info)
    frames = [row.streams[info.name] for row in rows]
    sizes = np.array([len(values) for values in frames], dtype=np.int64)
    starts = {"long_name": "first frame", **layout.time_attrs()}
    length = {"long_name": "frames in the row", "sample_dimension": "obs"}
    ids = np.array([row.row_id for row in rows], dtype=object)
    _write_values(group, frames, info, layout.stored_dtype(dtype))
    _write_vector(group, "row_start", np.cumsum(sizes) - sizes, "row", starts)
    _write_vector(group, "row_size", sizes, "row", length)
    for name, counts in zip(layout.row_counts, layout.counts_of(rows), strict=True):
        _write_vector(group, name, counts, "row", {"long_name": COUNT_NAMES[name]})
    _write_vector(group, "row_id", ids, "row", {"long_name": "row id", "cf_role": "timeseries_id"})
    # Coordinates of the columns; the neurons of events are an axis of their own.
    for name, values in column_axes(info).items():
        about = {"long_name": AXIS_NAMES[name], "units": "Hz"}
        _write_vector(group, name, values.astype("float64"), layout.axis, about)


def chunk_frames(width: int, dtype: str) -> int:
    """Return how many frames an inner chunk of about 1 MB has."""
    return max(1, CHUNK_BYTES // (width * np.dtype(dtype).itemsize))


def _write_values(
    group: zarr.Group, frames: Sequence[Values], info: StreamInfo, dtype: str
) -> None:
    layout = layout_of(info)
    total, width = sum(len(values) for values in frames), layout.stored_width
    # A chunk is decoded whole, so a chunk of a short stream has no more frames than the stream.
    chunk = max(1, min(total, chunk_frames(width, dtype)))
    # No larger than the data: zarr allots a whole object when it packs one.
    per_object = max(1, min(CHUNKS_PER_OBJECT, -(-total // chunk)))
    # Coordinates of another dimension do not belong to the array.
    axes = column_axes(info) if layout.axis == COLUMN else {}
    array = group.create_array(
        "values",
        shape=(total, width),
        dtype=dtype,
        chunks=(chunk, width),
        shards=(chunk * per_object, width),
        filters=None,
        compressors=VALUE_CODECS,
        fill_value=0,
        dimension_names=("obs", COLUMN),
        attributes=layout.value_attrs() | ({"coordinates": " ".join(axes)} if axes else {}),
        config=KEEP_ALL,
    )
    start = 0
    for block in blocks_of(frames, chunk * per_object):
        array[start : start + len(block)] = block
        start += len(block)


def _write_vector(
    group: zarr.Group, name: str, values: NDArray[Any], axis: str, attrs: Mapping[str, Any]
) -> None:
    texts = values.dtype == object
    array = group.create_array(
        name,
        shape=values.shape,
        dtype="string" if texts else values.dtype.name,
        chunks=(max(1, len(values)),),
        filters="auto" if texts else None,
        compressors=VECTOR_CODECS,
        dimension_names=(axis,),
        attributes=dict(attrs),
        config=KEEP_ALL,
    )
    array[:] = values


def _consolidate(folder: Path) -> None:
    members = {
        path.parent.relative_to(folder).as_posix(): json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.rglob(arrays.ROOT_METADATA))
        if path.parent != folder
    }
    for member in members.values():
        member.pop("consolidated_metadata", None)
    about = {"kind": "inline", "must_understand": False, "metadata": members}
    root = json.loads((folder / arrays.ROOT_METADATA).read_text(encoding="utf-8"))
    root["consolidated_metadata"] = about
    (folder / arrays.ROOT_METADATA).write_text(json.dumps(root, indent=1), encoding="utf-8")


def column_axes(info: StreamInfo) -> dict[str, np.ndarray]:
    """Return the centre frequencies of the columns in Hz, by the name of their array."""
    axes = {}
    sizes = np.diff(info.channel_offsets)
    if len(info.fc_hz) == len(sizes) and sizes.sum() == info.width:
        axes["fc_hz"] = np.repeat(info.fc_hz, sizes)
    if len(info.mfc_hz) == info.width:
        axes["mfc_hz"] = np.array(info.mfc_hz)
    return axes


def blocks_of(frames: Sequence[Values], size: int) -> Iterator[NDArray[Any]]:
    """Regroup rows of frames into blocks of exactly `size` frames; the last may be shorter."""
    parts: list[NDArray[Any]] = []
    count = 0
    for values in frames:
        at = 0
        while at < len(values):
            parts.append(values[at : at + size - count])
            at, count = at + len(parts[-1]), count + len(parts[-1])
            if count == size:
                yield join(parts)
                parts, count = [], 0
    if parts:
        yield join(parts)
