"""The `zarr.json` of groups and arrays: the documents that zarr-python writes, key by key.

A group's own holds those of everything below it too (`consolidated_metadata`), as
zarr.consolidate_metadata would put them there, which warns on every v3 store. Each stream's group
has a copy of its arrays, as xarray opens one group and looks there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from earmill.pipeline.formats.zarr.blosc_frames import BLOSC
from earmill.pipeline.formats.zarr.encode import ZSTD

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
