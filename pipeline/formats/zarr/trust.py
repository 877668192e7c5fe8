"""What the metadata of a Zarr store may claim."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from earmill.pipeline.formats.trust import Promise, refused
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.stored_file import StoredFile

MB = 2**20
ROOT_METADATA = "zarr.json"
# Of one store's metadata; a stream of a thousand channels has 50 kB.
MAX_METADATA_BYTES = 64 * MB
# Decoded; writers make chunks of 1 MB, or one frame where that is more.
MAX_CHUNK_BYTES = 64 * MB
MAX_CHUNKS_PER_OBJECT = 2**16
# Centre frequencies of columns or neurons.
AXES, MAX_AXIS = ("fc_hz", "mfc_hz"), 2**20
# What our writers use and have used; none of them can run code.
CODECS = frozenset({"sharding_indexed", "bytes", "blosc", "zstd", "crc32c", "vlen-utf8"})


def read_metadata(layout: Layout, rel: str, promise: Promise) -> Mapping[str, Any]:
    """The metadata of every group and array of the Zarr store at `rel`; raises as
    `checked_metadata`."""
    key = f"{rel}/{ROOT_METADATA}"
    named = promise.files.get(key)
    most = min(0 if named is None else named.bytes, MAX_METADATA_BYTES)
    if layout.cache is not None and named is not None:
        content = StoredFile(layout, key, named.bytes, named.sha256).read(0, most).tobytes()
    else:
        found = layout.read_whole_straight(key, most)
        # No more than was committed, and a byte that would show that there is more.
        content = layout.read_range(key, 0, most + 1) if found is None else found
    return checked_metadata(rel, content, promise)


def checked_metadata(rel: str, content: bytes, promise: Promise) -> Mapping[str, Any]:
    """What the root metadata of the Zarr store at `rel` says of its members, if all of it is as
    promised.

    Raises:
        CommitError: It is not the committed file, or describes something our writers do not write.
    """
    named = promise.files.get(f"{rel}/{ROOT_METADATA}")
    if named is None or hashlib.sha256(content).hexdigest() != named.sha256:
        raise refused(rel, f"its {ROOT_METADATA} is not the one that was committed")
    try:
        root = json.loads(content)
        members: Mapping[str, Any] = root["consolidated_metadata"]["metadata"]
        if root["zarr_format"] != 3 or root["node_type"] != "group":
            raise refused(rel, "expected a group of Zarr format 3")
        for path, member in members.items():
            if member["node_type"] == "array":
                _check_codecs(f"{rel}/{path}", member)
                _check_index(f"{rel}/{path}", member, promise)
        for stream in promise.columns:
            _check_values(rel, stream, members[f"{stream}/values"], promise)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise refused(rel, f"its metadata makes no sense: {type(err).__name__}: {err}") from err
    return members


def _check_codecs(path: str, array: Mapping[str, Any]) -> None:
    names = {*_codec_names(array["codecs"])}
    if array["zarr_format"] != 3 or not names <= CODECS or array.get("storage_transformers"):
        raise refused(path, f"expected codecs out of {sorted(CODECS)}, got {sorted(names)}")


def _codec_names(codecs: Any) -> Iterator[str]:
    for codec in codecs:
        yield str(codec["name"])
        inner = codec.get("configuration", {})
        for key in ("codecs", "index_codecs"):
            yield from _codec_names(inner.get(key, ()))


def _check_index(path: str, array: Mapping[str, Any], promise: Promise) -> None:
    """An array that says something of each row is as long as there are rows; axes are short."""
    name = path.rpartition("/")[2]
    (length,) = array["shape"] if name != "values" else (promise.rows,)
    if length != promise.rows and not (name in AXES and 0 <= length <= MAX_AXIS):
        raise refused(path, f"expected {promise.rows} values, its metadata claims {array['shape']}")


def _check_values(rel: str, stream: str, array: Mapping[str, Any], promise: Promise) -> None:
    """Shape, type and chunks of a stream's values."""
    width, dtype = promise.columns[stream]
    frames = promise.frames[stream]
    wanted, got = ([frames, width], dtype), (array["shape"], array["data_type"])
    if wanted != got:
        raise refused(f"{rel}/{stream}", f"expected {wanted}, its metadata claims {got}")
    sharding = array["codecs"][0]
    chunk = sharding["configuration"]["chunk_shape"]
    whole = array["chunk_grid"]["configuration"]["chunk_shape"]
    counts = [*chunk, *whole]
    if len(counts) != 4 or not all(type(n) is int and n > 0 for n in counts):
        raise refused(f"{rel}/{stream}", f"its chunks are {chunk} in objects of {whole}")
    chunk_bytes = math.prod(chunk) * np.dtype(dtype).itemsize
    if (
        chunk[1] != width
        or whole[1] != width
        or (chunk_bytes > MAX_CHUNK_BYTES and chunk[0] > 1)
        or whole[0] > chunk[0] * MAX_CHUNKS_PER_OBJECT
    ):
        raise refused(f"{rel}/{stream}", f"its chunks are {chunk} in objects of {whole}")
    prefix = f"{rel}/{stream}/values/c/"
    objects = sum(path.startswith(prefix) for path in promise.files)
    if frames > objects * whole[0]:
        raise refused(
            f"{rel}/{stream}", f"{objects} committed objects cannot hold the {frames} frames"
        )
