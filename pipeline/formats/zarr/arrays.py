"""The arrays of a Zarr store as our writers make them, and what its metadata may claim.

    object = chunk* index crc       of `values`; index: (offset, bytes) of every chunk, uint64
    file   = chunk                  of a vector such as `row_start`: one chunk

A chunk of frames is always whole: the last of a stream has zeros behind its frames. See
`formats.zarr.chunks` for what a chunk is.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.format import Promise, refused
from earmill.pipeline.formats.zarr.chunks import CRC, ChunkCodec, strings, vector_chunk, vlen_utf8
from earmill.pipeline.formats.zarr.write import CHUNKS_PER_OBJECT
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.stored_file import Bytes, StoredFile

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
        # No more than was committed, and a byte that would show that there is more.
        content = bytes(layout.read_range(key, 0, most + 1))
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


ENTRY_BYTES = 16
KEYS = {"name": "default", "configuration": {"separator": "/"}}
INDEX_CODECS = ["bytes", "crc32c"]


@dataclass(frozen=True)
class FrameChunks:
    """How the frames of a stream lie in chunks and objects.

    Args:
        n_frames, width, dtype: Of the whole array.
        chunk_frames: Frames in a chunk.
        object_chunks: Chunks in an object.
        codec: Of a chunk.
    """

    n_frames: int
    width: int
    dtype: np.dtype[Any]
    chunk_frames: int
    object_chunks: int
    codec: ChunkCodec

    @classmethod
    def of(cls, place: str, array: Mapping[str, Any]) -> FrameChunks:
        """Out of metadata that `zarr.trust` has checked.

        Raises:
            CommitError: Zarr could read it, but our writers do not write so.
        """
        (sharding,) = array["codecs"]
        settings = sharding["configuration"]
        chunk, whole = settings["chunk_shape"], array["chunk_grid"]["configuration"]["chunk_shape"]
        index_codecs = [codec["name"] for codec in settings["index_codecs"]]
        try:
            codec = ChunkCodec.of(settings["codecs"])
        except ValueError as err:
            raise refused(place, str(err)) from err
        usual = (
            sharding["name"] == "sharding_indexed"
            and settings.get("index_location", "end") == "end"
            and index_codecs == INDEX_CODECS
            and array["chunk_key_encoding"] == KEYS
            and whole[0] % chunk[0] == 0
        )
        if not usual:
            raise refused(place, "expected chunks in objects with an index at their end")
        n_frames, width = array["shape"]
        dtype, object_chunks = np.dtype(array["data_type"]), whole[0] // chunk[0]
        return cls(n_frames, width, dtype, chunk[0], object_chunks, codec)

    @property
    def chunk_bytes(self) -> int:
        """Decoded."""
        return self.chunk_frames * self.width * self.dtype.itemsize

    @property
    def n_objects(self) -> int:
        """Of the whole array."""
        return -(-self.n_frames // (self.chunk_frames * self.object_chunks))

    def object_of(self, chunk: int) -> tuple[int, int]:
        """The object a chunk lies in, and its place there."""
        return divmod(chunk, self.object_chunks)

    def chunks_in(self, number: int) -> int:
        """Chunks of an object: its places, or those that are left for the last one."""
        n_chunks = -(-self.n_frames // self.chunk_frames)
        return min(self.object_chunks, n_chunks - number * self.object_chunks)

    def decode(self, chunk: int, stored: Bytes, memory: Bytes) -> NDArray[Any]:
        """The frames of a chunk, without what is behind the last.

        Args:
            memory: Where they go, `chunk_bytes` long.
        """
        frames = memory.view(self.dtype).reshape(self.chunk_frames, self.width)
        self.codec.decode_into(frames, stored)
        return frames[: self.n_frames - chunk * self.chunk_frames]


def read_end(file: StoredFile) -> Bytes:
    """As much of an object's end as the longest index takes that our writers make."""
    nbytes = min(file.nbytes, CHUNKS_PER_OBJECT * ENTRY_BYTES + CRC.nbytes)
    return file.read(file.nbytes - nbytes, nbytes)


def read_index(file: StoredFile, n_chunks: int, end: Bytes | None = None) -> NDArray[np.int64]:
    """Where the chunks of an object lie: (chunk, [first byte, byte behind]); -1 where none is.

    Args:
        end: Last bytes of the object, or all, where they are there.
    Raises:
        CommitError: The index is damaged, or points elsewhere.
    """
    nbytes = n_chunks * ENTRY_BYTES + CRC.nbytes
    place = file.layout.url(file.rel)
    try:
        size = min(file.nbytes, nbytes)
        if end is not None and len(end) >= size:
            found = end[len(end) - size :]
        else:
            found = file.read(file.nbytes - size, size)
        body = CRC.checked(found)
    except CommitError as err:
        raise CommitError(f"{place}, index of chunks: {err}") from err
    entries = body.view("<u8").reshape(-1, 2)
    there = (entries != np.iinfo(np.uint64).max).any(axis=1)
    offsets, sizes = entries[:, 0], entries[:, 1]
    limit = np.uint64(file.nbytes - nbytes)
    inside = (offsets <= limit) & (sizes <= limit) & (offsets + sizes <= limit)
    if len(entries) != n_chunks or not (inside | ~there).all():
        raise refused(place, "its index of chunks points out of the object")
    spans = np.stack([offsets, offsets + sizes], axis=1).astype(np.int64)
    spans[~there] = -1
    return spans


def read_numbers(
    layout: Layout,
    rel: str,
    array: Mapping[str, Any],
    promise: Promise,
    said: pa.ChunkedArray | None = None,
) -> NDArray[Any]:
    """The numbers of a vector of one chunk.

    Args:
        said: What they may be: where it makes the committed file, that is not fetched.
    Raises:
        CommitError: They are damaged or missing.
    """
    dtype = np.dtype(array["data_type"]).newbyteorder("<")
    if said is not None:
        values = np.asarray(said.to_numpy())
        if _is_committed(rel, promise, values.astype(dtype).tobytes()):
            return _whole(rel, values, array)
    content = _content(layout, rel, array, promise, "bytes")
    return _whole(rel, content.view(dtype), array)


def read_strings(
    layout: Layout,
    rel: str,
    array: Mapping[str, Any],
    promise: Promise,
    said: pa.ChunkedArray | None = None,
) -> list[str]:
    """The texts of a vector of one chunk; see `read_numbers`."""
    if said is not None:
        texts = said.to_pylist()
        if _is_committed(rel, promise, vlen_utf8(texts)):
            return _whole(rel, texts, array)
    texts = strings(_content(layout, rel, array, promise, "vlen-utf8"))
    return _whole(rel, texts, array)


def _is_committed(rel: str, promise: Promise, content: bytes) -> bool:
    """Whether the file of a vector that was committed has this in it: writers of one release make
    equal files of equal values. Those of another may not, and then the file is read."""
    named = promise.files.get(f"{rel}/c/0")
    return named is not None and hashlib.sha256(vector_chunk(content)).hexdigest() == named.sha256


def _whole(rel: str, values: Any, array: Mapping[str, Any]) -> Any:
    if array["shape"] != [len(values)]:
        raise refused(rel, f"expected {array['shape']} values, its chunk holds {len(values)}")
    return values


def _content(
    layout: Layout, rel: str, array: Mapping[str, Any], promise: Promise, first: str
) -> Bytes:
    key = f"{rel}/c/0"
    if array["shape"] == [0]:
        # No chunk is written of no values; vlen-utf8 has a count of them.
        return np.zeros(4 if first == "vlen-utf8" else 0, np.uint8)
    try:
        codec = ChunkCodec.of(array["codecs"], first)
    except ValueError as err:
        raise refused(rel, str(err)) from err
    if key not in promise.files:
        raise refused(rel, "expected one chunk, the commit names none")
    file = StoredFile(layout, key, promise.files[key].bytes, promise.files[key].sha256)
    return codec.decode_bytes(file.read(0, file.nbytes), MAX_METADATA_BYTES)
