"""A shard as one Zarr v3 store, CF contiguous ragged: all rows of a stream end to end.

Group a stream: `values (obs, column)`, `row_start (row)`, `row_size (row)` with `sample_dimension`,
and `row_id (row)`; the stream's description is in the group's attributes, its centre frequencies
are coordinates: `fc_hz (column)` and `mfc_hz (column)`. A stream of events has the columns of
`formats.stream_layout` and also `n_steps (row)`, the steps of each clip. `row_id` is Zarr's own
`string` type (vlen-utf8), the one text type of zarr 3.1 that opens without a warning: fixed-length
bytes and UTF-32 have no v3 specification yet. Inner chunks are about 1 MB, packed by the sharding
codec into objects of up to 64 MB that are only ever written whole. Private to one attempt, so there
is no race. Not written through zarr, but byte for byte as zarr-python writes the same rows.

The `zarr.json` of groups and arrays are the documents that zarr-python writes, key by key. A
group's own holds those of everything below it too (`consolidated_metadata`), as
zarr.consolidate_metadata would put them there, which warns on every v3 store. Each stream's group
has a copy of its arrays, as xarray opens one group and looks there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.formats.rows import FeatureRow, Values
from earmill.pipeline.formats.stream_layout import layout_of, with_scales
from earmill.pipeline.formats.zarr.chunks import BLOSC, ZSTD, vlen_utf8, write_frames, write_vector

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo

Document = dict[str, Any]
STRING = "string"
_CRC: Document = {"name": "crc32c"}


def frames_document(
    shape: tuple[int, int],
    dtype: str,
    *,
    chunk_frames: int,
    object_chunks: int,
    dimensions: Sequence[str],
    attributes: Mapping[str, Any],
) -> Document:
    """Of frames in objects of chunks."""
    width, itemsize = shape[1], np.dtype(dtype).itemsize
    sharding = {
        "chunk_shape": [chunk_frames, width],
        "codecs": [
            _bytes(itemsize),
            # Its size tells blosc how to shuffle bits.
            {"name": "blosc", "configuration": {"typesize": itemsize, **BLOSC}},
            _CRC,
        ],
        "index_codecs": [_bytes(8), _CRC],
        "index_location": "end",
    }
    return _array(
        shape,
        dtype,
        (chunk_frames * object_chunks, width),
        [{"name": "sharding_indexed", "configuration": sharding}],
        dimensions,
        attributes,
    )


def vector_document(
    length: int, dtype: str, dimension: str, attributes: Mapping[str, Any]
) -> Document:
    """Of a short array, one chunk."""
    texts = {"name": "vlen-utf8", "configuration": {}}
    first = texts if dtype == STRING else _bytes(np.dtype(dtype).itemsize)
    codecs = [first, {"name": "zstd", "configuration": ZSTD}, _CRC]
    return _array((length,), dtype, (max(1, length),), codecs, (dimension,), attributes)


def group_document(attributes: Mapping[str, Any]) -> Document:
    """Of a group, without what is below it."""
    return {"attributes": plain(attributes), "zarr_format": 3, "node_type": "group"}


def write_documents(root: Path, documents: Mapping[str, Document]) -> None:
    """Into the folders of all groups and arrays, by their paths in the store; `.` is the root."""
    for place, document in documents.items():
        folder = root / place
        folder.mkdir(parents=True, exist_ok=True)
        if document["node_type"] == "array":
            text = json.dumps(document, indent=2)
        else:
            text = json.dumps(document | _consolidated(place, documents), indent=1)
        (folder / "zarr.json").write_text(text, encoding="utf-8")


def plain(value: Mapping[str, Any], *, sort_keys: bool = False) -> Document:
    """The same as JSON sees it: tuples become lists, and what is not JSON is refused."""
    text = json.dumps(dict(value), sort_keys=sort_keys, allow_nan=False)
    found: Document = json.loads(text)
    return found


def _consolidated(place: str, documents: Mapping[str, Document]) -> Document:
    prefix = "" if place == "." else f"{place}/"
    below = {
        path.removeprefix(prefix): document
        for path, document in documents.items()
        if path != place and path.startswith(prefix)
    }
    # In the order of the files' paths.
    order = sorted(below, key=lambda path: [*path.split("/"), "zarr.json"])
    members = {path: below[path] for path in order}
    about = {"kind": "inline", "must_understand": False, "metadata": members}
    return {"consolidated_metadata": about}


def _array(
    shape: Sequence[int],
    dtype: str,
    chunk_shape: Sequence[int],
    codecs: Sequence[Document],
    dimensions: Sequence[str],
    attributes: Mapping[str, Any],
) -> Document:
    fill = "" if dtype == STRING else np.dtype(dtype).type(0).item()
    return {
        "shape": [*shape],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*chunk_shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": [*codecs],
        "attributes": plain(attributes),
        "dimension_names": [*dimensions],
        "zarr_format": 3,
        "node_type": "array",
        "storage_transformers": [],
    }


def _bytes(itemsize: int) -> Document:
    """Single bytes have no order."""
    if itemsize == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}


# What a count of `StreamLayout.row_counts` is.
COUNT_NAMES = {"n_steps": "steps of the clip"}
COLUMN = "column"
# A coordinate, or a further count of each row: metadata and one chunk.
OBJECTS_OF_A_VECTOR = 2
# Of a stream in a Zarr store: group, four arrays' metadata, and three one-object index arrays.
OBJECTS_PER_STREAM = 1 + 4 + 3
CHUNK_BYTES = 2**20
CHUNKS_PER_OBJECT = 64


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
    path.mkdir(parents=True)
    shared = plain(attrs, sort_keys=True)
    documents = {".": group_document(shared)}
    for info in streams:
        about = with_scales(info).to_dict()
        stream = {"Conventions": "CF-1.11", "stream": about, **shared}
        documents[info.name] = group_document(stream)
        for name, document in _write_stream(path / info.name, rows, info, dtype).items():
            documents[f"{info.name}/{name}"] = document
    write_documents(path, documents)
    return path


def _write_stream(
    folder: Path, rows: Sequence[FeatureRow], info: StreamInfo, dtype: str
) -> dict[str, Document]:
    """The arrays of a stream; what is left to write is their metadata."""
    layout = layout_of(info)
    frames = [row.streams[info.name] for row in rows]
    sizes = np.array([len(values) for values in frames], dtype=np.int64)
    starts = {"long_name": "first frame", **layout.time_attrs()}
    length = {"long_name": "frames in the row", "sample_dimension": "obs"}
    documents = {
        "values": _write_values(folder / "values", frames, info, layout.stored_dtype(dtype)),
        "row_start": _write_numbers(folder / "row_start", np.cumsum(sizes) - sizes, starts),
        "row_size": _write_numbers(folder / "row_size", sizes, length),
    }
    for name, counts in zip(layout.row_counts, layout.counts_of(rows), strict=True):
        documents[name] = _write_numbers(folder / name, counts, {"long_name": COUNT_NAMES[name]})
    documents["row_id"] = _write_ids(folder / "row_id", [row.row_id for row in rows])
    # Coordinates of the columns; events have their neurons as an axis of its own.
    names = {"fc_hz": "centre frequency", "mfc_hz": "modulation centre frequency"}
    for name, values in column_axes(info).items():
        about = {"long_name": names[name], "units": "Hz"}
        numbers = values.astype("float64")
        documents[name] = _write_numbers(folder / name, numbers, about, axis=layout.axis)
    return documents


def chunk_frames(width: int, dtype: str) -> int:
    """Frames in an inner chunk of about 1 MB."""
    return max(1, CHUNK_BYTES // (width * np.dtype(dtype).itemsize))


def _write_values(folder: Path, frames: Sequence[Values], info: StreamInfo, dtype: str) -> Document:
    layout = layout_of(info)
    total, width = sum(len(values) for values in frames), layout.stored_width
    # A chunk is decoded whole, so that of a short stream has no more frames than there are.
    chunk = max(1, min(total, chunk_frames(width, dtype)))
    # No larger than the data: zarr allots a whole object when it packs one.
    per_object = max(1, min(CHUNKS_PER_OBJECT, -(-total // chunk)))
    chunks = _whole_chunks(frames, chunk)
    for number in range(-(-total // (chunk * per_object))):
        path = folder / "c" / str(number) / "0"
        path.parent.mkdir(parents=True)
        write_frames(path, islice(chunks, per_object), per_object)
    # Coordinates of another dimension than the array's own are none of it.
    axes = column_axes(info) if layout.axis == COLUMN else {}
    return frames_document(
        (total, width),
        dtype,
        chunk_frames=chunk,
        object_chunks=per_object,
        dimensions=("obs", COLUMN),
        attributes=layout.value_attrs() | ({"coordinates": " ".join(axes)} if axes else {}),
    )


def _whole_chunks(frames: Sequence[Values], size: int) -> Iterator[NDArray[Any]]:
    """Frames in chunks of one size; behind the last frame are zeros."""
    for block in blocks_of(frames, size):
        rest = np.zeros((size - len(block), *block.shape[1:]), block.dtype)
        yield np.concatenate([block, rest]) if len(rest) else block


def column_axes(info: StreamInfo) -> dict[str, np.ndarray]:
    """What each column stands for, where that is a number: its centre frequencies in Hz."""
    axes = {}
    sizes = np.diff(info.channel_offsets)
    if len(info.fc_hz) == len(sizes) and sizes.sum() == info.width:
        axes["fc_hz"] = np.repeat(info.fc_hz, sizes)
    if len(info.mfc_hz) == info.width:
        axes["mfc_hz"] = np.array(info.mfc_hz)
    return axes


def blocks_of(frames: Sequence[Values], size: int) -> Iterator[NDArray[Any]]:
    """Regroup rows of frames into blocks of exactly `size` frames; the last may be shorter."""
    held: list[NDArray[Any]] = []
    count = 0
    for values in frames:
        at = 0
        while count + len(values) - at >= size:
            cut = at + size - count
            yield _joined([*held, values[at:cut]])
            held, count, at = [], 0, cut
        if at < len(values):
            held.append(values[at:])
            count += len(values) - at
    if held:
        yield _joined(held)


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """One array of parts that follow each other; a part by itself is not copied."""
    return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts, axis=0)


def _write_numbers(
    folder: Path, values: NDArray[Any], attrs: Mapping[str, Any], axis: str = "row"
) -> Document:
    _write_vector(folder, len(values), values.astype(values.dtype.newbyteorder("<")).tobytes())
    return vector_document(len(values), values.dtype.name, axis, attrs)


def _write_ids(folder: Path, row_ids: Sequence[str]) -> Document:
    _write_vector(folder, len(row_ids), vlen_utf8(row_ids))
    about = {"long_name": "row id", "cf_role": "timeseries_id"}
    return vector_document(len(row_ids), STRING, "row", about)


def _write_vector(folder: Path, length: int, content: bytes) -> None:
    # No chunk is written of no values.
    if length:
        (folder / "c").mkdir(parents=True)
        write_vector(folder / "c" / "0", content)


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
