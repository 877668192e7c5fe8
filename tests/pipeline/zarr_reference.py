"""A shard's store as zarr-python writes it: what our own writer is held against, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec, ZstdCodec

from amtcore.features.base import StreamInfo
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.formats.zarr import write as ours

VALUE_CODECS = (BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle"), Crc32cCodec())
INDEX_CODECS = (ZstdCodec(level=3), Crc32cCodec())
# Without it zarr drops blocks that equal the fill value, and -0.0 would come back as 0.0.
KEEP_ALL: Any = {"write_empty_chunks": True}
AXES = {"fc_hz": "centre frequency", "mfc_hz": "modulation centre frequency"}


def write_with_zarr(
    rows: Sequence[FeatureRow],
    streams: Sequence[StreamInfo],
    path: Path,
    attrs: Mapping[str, Any],
    dtype: str,
) -> None:
    """A new store at `path`."""
    root = zarr.create_group(path, zarr_format=3, attributes=_plain(attrs))
    for info in streams:
        stream = json.loads(json.dumps(info.to_dict()))
        about = {"Conventions": "CF-1.11", "stream": stream, **_plain(attrs)}
        group = root.create_group(info.name, attributes=about)
        layout = layout_of(info)
        frames = [np.asarray(row.streams[info.name]) for row in rows]
        sizes = np.array([len(values) for values in frames], dtype=np.int64)
        _values(group, info, frames, layout.stored_dtype(dtype))
        starts = {"long_name": "first frame", **layout.time_attrs()}
        length = {"long_name": "frames in the row", "sample_dimension": "obs"}
        _vector(group, "row_start", np.cumsum(sizes) - sizes, "row", starts)
        _vector(group, "row_size", sizes, "row", length)
        for name, counts in zip(layout.row_counts, layout.counts_of(rows), strict=True):
            _vector(group, name, counts, "row", {"long_name": ours.COUNT_NAMES[name]})
        ids = np.array([row.row_id for row in rows], dtype=object)
        _vector(group, "row_id", ids, "row", {"long_name": "row id", "cf_role": "timeseries_id"})
        for name, values in ours.column_axes(info).items():
            _vector(group, name, values.astype("float64"), layout.axis, _in_hz(AXES[name]))
    for folder in [*(path / info.name for info in streams), path]:
        _consolidate(folder)


def _plain(attrs: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(attrs, sort_keys=True))


def _in_hz(long_name: str) -> dict[str, str]:
    return {"long_name": long_name, "units": "Hz"}


def _values(group: zarr.Group, info: StreamInfo, frames: list[np.ndarray], dtype: str) -> None:
    layout, total = layout_of(info), sum(len(values) for values in frames)
    width = layout.stored_width
    chunk = max(1, min(total, ours.chunk_frames(width, dtype)))
    per_object = max(1, min(ours.CHUNKS_PER_OBJECT, -(-total // chunk)))
    axes = ours.column_axes(info) if layout.axis == "column" else {}
    array = group.create_array(
        "values",
        shape=(total, width),
        dtype=dtype,
        chunks=(chunk, width),
        shards=(chunk * per_object, width),
        filters=None,
        compressors=VALUE_CODECS,
        fill_value=0,
        dimension_names=("obs", "column"),
        attributes=layout.value_attrs() | ({"coordinates": " ".join(axes)} if axes else {}),
        config=KEEP_ALL,
    )
    step = chunk * per_object
    for start in range(0, total, step):
        array[start : start + step] = np.concatenate(frames)[start : start + step]


def _vector(
    group: zarr.Group, name: str, values: np.ndarray, axis: str, attrs: Mapping[str, Any]
) -> None:
    texts = values.dtype == object
    array = group.create_array(
        name,
        shape=values.shape,
        dtype="string" if texts else values.dtype.name,
        chunks=(max(1, len(values)),),
        filters="auto" if texts else None,
        compressors=INDEX_CODECS,
        dimension_names=(axis,),
        attributes=dict(attrs),
        config=KEEP_ALL,
    )
    array[:] = values


def _consolidate(folder: Path) -> None:
    """As zarr.consolidate_metadata does, which warns on every v3 store."""
    members = {
        path.parent.relative_to(folder).as_posix(): json.loads(path.read_text())
        for path in sorted(folder.rglob("zarr.json"))
        if path.parent != folder
    }
    for member in members.values():
        member.pop("consolidated_metadata", None)
    about = {"kind": "inline", "must_understand": False, "metadata": members}
    metadata = json.loads((folder / "zarr.json").read_text()) | {"consolidated_metadata": about}
    (folder / "zarr.json").write_text(json.dumps(metadata, indent=1), encoding="utf-8")
