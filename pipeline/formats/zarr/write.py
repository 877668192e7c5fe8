"""A shard as one Zarr v3 store, CF contiguous ragged: all rows of a stream end to end.

Group a stream: `values (obs, column)`, `row_start (row)`, `row_size (row)` with `sample_dimension`,
and `row_id (row)`; the stream's description is in the group's attributes, its centre frequencies
are coordinates: `fc_hz (column)` and `mfc_hz (column)`. A stream of events has the columns of
`formats.event_rows` and also `n_steps (row)`, the steps of each clip. `row_id` is Zarr's own
`string` type (vlen-utf8), the one text type of zarr 3.1 that opens without a warning: fixed-length
bytes and UTF-32 have no v3 specification yet. Inner chunks are about 1 MB, packed by the sharding
codec into objects of up to 64 MB that are only ever written whole, as a partial write would make
zarr read and write the object again. Private to one attempt, so there is no race.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from earmill.pipeline.formats.digest import ShardDigest, digest_blocks
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.spill import Values
from earmill.pipeline.formats.stream_layout import StreamLayout, layout_of

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo

# What a count of `StreamLayout.row_counts` is.
COUNT_NAMES = {"n_steps": "steps of the clip"}
COLUMN = "column"
# A coordinate, or a further count of each row: metadata and one chunk.
OBJECTS_OF_A_VECTOR = 2
# Of a stream in a Zarr store: group, four arrays' metadata, and three one-object index arrays.
OBJECTS_PER_STREAM = 1 + 4 + 3
CHUNK_BYTES = 2**20
CHUNKS_PER_OBJECT = 64
# The checksum is the last step of writing, hence the first of reading. Objects have one over their
# index of chunks by default. For values as measured on features of all models, see the section on
# codecs of benchmarks/RESULTS.md; zarr gives blosc the size of a value, so that bits are shuffled.
VALUE_CODECS = (BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle"), Crc32cCodec())
INDEX_CODECS = (ZstdCodec(level=3), Crc32cCodec())
# Without it zarr drops blocks that equal the fill value, and -0.0 would come back as 0.0.
_KEEP_ALL = {"write_empty_chunks": True}


def write_zarr(
    rows: Sequence[FeatureRow],
    streams: Sequence[StreamInfo],
    local_dir: Path,
    rel_name: str,
    attrs: Mapping[str, Any],
    *,
    dtype: str,
) -> Path:
    """Write the rows as a store at `local_dir/rel_name` and return that path."""
    path = local_dir / rel_name
    root = zarr.create_group(path, zarr_format=3, attributes=_plain(attrs))
    for info in streams:
        layout = layout_of(info)
        group = root.create_group(info.name, attributes=_group_attrs(info, attrs))
        frames = [row.streams[info.name] for row in rows]
        sizes = np.array([len(values) for values in frames], dtype=np.int64)
        _write_values(group, info, layout, frames, layout.stored_dtype(dtype))
        starts = {"long_name": "first frame", **layout.time_attrs()}
        _write_index(group, "row_start", np.cumsum(sizes) - sizes, starts)
        _write_index(
            group, "row_size", sizes, {"long_name": "frames in the row", "sample_dimension": "obs"}
        )
        for name, counts in zip(layout.row_counts, layout.counts_of(rows), strict=True):
            _write_index(group, name, counts, {"long_name": COUNT_NAMES[name]})
        _write_ids(group, [row.row_id for row in rows])
        _write_axes(group, info, layout)
    for folder in [*(path / info.name for info in streams), path]:
        _consolidate(folder)
    return path


def _plain(value: Any) -> Any:
    """The same as JSON sees it: tuples become lists, and what is not JSON is refused."""
    return json.loads(json.dumps(dict(value), sort_keys=True, allow_nan=False))


def _group_attrs(info: StreamInfo, attrs: Mapping[str, Any]) -> dict[str, Any]:
    stream = json.loads(json.dumps(info.to_dict()))
    return {"Conventions": "CF-1.11", "stream": stream, **_plain(attrs)}


def chunk_frames(width: int, dtype: str) -> int:
    """Frames in an inner chunk of about 1 MB."""
    return max(1, CHUNK_BYTES // (width * np.dtype(dtype).itemsize))


def _write_values(
    group: zarr.Group,
    info: StreamInfo,
    layout: StreamLayout,
    frames: Sequence[Values],
    dtype: str,
) -> None:
    total, width = sum(len(values) for values in frames), layout.stored_width
    # A chunk is decoded whole, so that of a short stream has no more frames than there are.
    chunk = max(1, min(total, chunk_frames(width, dtype)))
    # No larger than the data: zarr allots a whole object while it packs one.
    per_object = max(1, min(CHUNKS_PER_OBJECT, -(-total // chunk)))
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
        attributes=_values_attrs(info, layout),
        config=_KEEP_ALL,
    )
    start = 0
    for block in blocks_of(frames, chunk * per_object):
        array[start : start + len(block)] = block
        start += len(block)


def _values_attrs(info: StreamInfo, layout: StreamLayout) -> dict[str, Any]:
    # Coordinates of another dimension than the array's own are none of it.
    axes = column_axes(info) if layout.axis == COLUMN else {}
    return layout.value_attrs() | ({"coordinates": " ".join(axes)} if axes else {})


def column_axes(info: StreamInfo) -> dict[str, np.ndarray]:
    """What each column stands for, where that is a number: its centre frequencies in Hz."""
    axes = {}
    sizes = np.diff(info.channel_offsets)
    if len(info.fc_hz) == len(sizes) and sizes.sum() == info.width:
        axes["fc_hz"] = np.repeat(info.fc_hz, sizes)
    if len(info.mfc_hz) == info.width:
        axes["mfc_hz"] = np.array(info.mfc_hz)
    return axes


def _write_axes(group: zarr.Group, info: StreamInfo, layout: StreamLayout) -> None:
    """Coordinates of the columns; events have their neurons as an axis of its own."""
    names = {"fc_hz": "centre frequency", "mfc_hz": "modulation centre frequency"}
    for name, values in column_axes(info).items():
        attrs = {"long_name": names[name], "units": "Hz"}
        _write_index(group, name, values.astype("float64"), attrs, axis=layout.axis)


def blocks_of(frames: Sequence[Values], size: int) -> Iterator[np.ndarray]:
    """Regroup rows of frames into blocks of exactly `size` frames; the last may be shorter."""
    held: list[np.ndarray] = []
    count = 0
    for values in frames:
        at = 0
        while count + len(values) - at >= size:
            cut = at + size - count
            yield np.concatenate([*held, values[at:cut]], axis=0)
            held, count, at = [], 0, cut
        if at < len(values):
            held.append(values[at:])
            count += len(values) - at
    if held:
        yield np.concatenate(held, axis=0)


def _write_index(
    group: zarr.Group, name: str, values: np.ndarray, attrs: dict[str, Any], axis: str = "row"
) -> None:
    array = group.create_array(
        name,
        shape=values.shape,
        dtype=values.dtype.name,
        chunks=(max(1, len(values)),),
        filters=None,
        compressors=INDEX_CODECS,
        dimension_names=(axis,),
        attributes=attrs,
        config=_KEEP_ALL,
    )
    array[:] = values


def _write_ids(group: zarr.Group, row_ids: Sequence[str]) -> None:
    array = group.create_array(
        "row_id",
        shape=(len(row_ids),),
        dtype="string",
        chunks=(max(1, len(row_ids)),),
        compressors=INDEX_CODECS,
        dimension_names=("row",),
        attributes={"long_name": "row id", "cf_role": "timeseries_id"},
        config=_KEEP_ALL,
    )
    array[:] = np.array(row_ids, dtype=object)


def _consolidate(folder: Path) -> None:
    """Put the metadata of everything below a group into the group's own zarr.json.

    Same result as zarr.consolidate_metadata, which warns on every v3 store. Each stream's group has
    its own copy, as xarray opens one group and looks there.
    """
    members = {
        path.parent.relative_to(folder).as_posix(): _load(path)
        for path in sorted(folder.rglob("zarr.json"))
        if path.parent != folder
    }
    for member in members.values():
        member.pop("consolidated_metadata", None)
    metadata = _load(folder / "zarr.json")
    metadata["consolidated_metadata"] = {
        "kind": "inline",
        "must_understand": False,
        "metadata": members,
    }
    (folder / "zarr.json").write_text(json.dumps(metadata, indent=1), encoding="utf-8")


def _load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def count_objects(stored_rows: Mapping[str, int], streams: Sequence[StreamInfo], dtype: str) -> int:
    """Files of a store with so many frames or events of each stream."""
    count = 1
    for info in streams:
        layout = layout_of(info)
        per_chunk = chunk_frames(layout.stored_width, layout.stored_dtype(dtype))
        chunks = math.ceil(stored_rows[info.name] / per_chunk)
        vectors = len(layout.row_counts) + len(column_axes(info))
        count += OBJECTS_PER_STREAM + OBJECTS_OF_A_VECTOR * vectors
        count += math.ceil(chunks / CHUNKS_PER_OBJECT)
    return count


def digest_zarr(path: Path, streams: Sequence[StreamInfo]) -> ShardDigest:
    """Read a written store back, an object at a time."""
    root = zarr.open_group(path, mode="r", zarr_format=3)
    digests = {}
    row_ids: tuple[str, ...] = ()
    for info in streams:
        name = info.name
        values = root[f"{name}/values"]
        step = values.shards[0]
        blocks = (values[start : start + step] for start in range(0, values.shape[0], step))
        sizes = root[f"{name}/row_size"][:]
        counts = [root[f"{name}/{count}"][:] for count in layout_of(info).row_counts]
        digests[name] = digest_blocks(blocks, values.shape[1], values.dtype.name, sizes, *counts)
        row_ids = tuple(str(row_id) for row_id in root[f"{name}/row_id"][:])
    return ShardDigest(row_ids, digests)
