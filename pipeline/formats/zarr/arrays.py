"""The arrays of a Zarr store: limits on their metadata, their chunk index, and decoding.

    object = chunk* index crc       of `values`; index: (offset, bytes) of every chunk, uint64
    file   = chunk                  of a vector such as `row_start`: one chunk
    chunk  = body crc               crc: CRC-32C of the body, four bytes, little endian
    body   = blosc frame | zstd frame | the numbers themselves

A chunk of frames always has its full size: the last chunk of a stream has zeros after its frames.
Its claimed size is checked before it is decompressed into the memory that is cached.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
from numcodecs import VLenUTF8, blosc, zstd
from numpy.typing import NDArray

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.format import Promise, refused
from earmill.pipeline.storage.layout import Layout, StoredFile
from earmill.pipeline.storage.local_cache import Bytes

MB = 2**20
ROOT_METADATA = "zarr.json"
# Limit for the metadata of one store; the metadata of a stream of 1000 channels has 50 kB.
MAX_METADATA_BYTES = 64 * MB
# Limit for a decoded chunk; writers make chunks of 1 MB, or of one frame where a frame is larger.
MAX_CHUNK_BYTES = 64 * MB
MAX_CHUNKS_PER_OBJECT = 2**16
# Arrays with the centre frequencies of columns or neurons, and the limit for their length.
AXES, MAX_AXIS = ("fc_hz", "mfc_hz"), 2**20
# Codecs that our writers use or have used; none of them can run code.
CODECS = frozenset({"sharding_indexed", "bytes", "blosc", "zstd", "crc32c", "vlen-utf8"})
# Compressors inside of blosc that our writers use or may use.
BLOSC_NAMES = frozenset({"lz4", "zstd"})
CRC_CODEC, CRC_BYTES = "crc32c", 4
TEXT_CODEC = "vlen-utf8"
BLOSC_HEADER_BYTES, ZSTD_MAGIC = 16, b"\x28\xb5\x2f\xfd"
ZSTD_LEVEL = 3
ENTRY_BYTES = 16
KEYS = {"name": "default", "configuration": {"separator": "/"}}
INDEX_CODECS = ["bytes", CRC_CODEC]
# blosc's own threads would run beside the threads that decode chunks.
blosc.use_threads = False


def read_metadata(
    layout: Layout, rel: str, promise: Promise
) -> tuple[Mapping[str, Any], dict[str, FrameChunks]]:
    """Return the metadata of the Zarr store at `rel`, and the streams' chunks; CommitError if they
    are not what was committed, or nothing that our writers write."""
    key = f"{rel}/{ROOT_METADATA}"
    named = promise.files.get(key)
    most = min(0 if named is None else named.bytes, MAX_METADATA_BYTES)
    if layout.cache is not None and named is not None:
        content = promise.file(layout, key).read(0, most).tobytes()
    else:
        # One byte more than was committed, to notice a file that is too long.
        content = bytes(layout.read_range(key, 0, most + 1))
    if named is None or hashlib.sha256(content).hexdigest() != named.sha256:
        raise refused(rel, f"its {ROOT_METADATA} is not the one that was committed")
    try:
        root = json.loads(content)
        members: Mapping[str, Any] = root["consolidated_metadata"]["metadata"]
        if root["zarr_format"] != 3 or root["node_type"] != "group":
            raise refused(rel, "expected a group of Zarr format 3")
        for path, member in members.items():
            if member["node_type"] == "array":
                _check_array(f"{rel}/{path}", member, promise)
        names = promise.columns
        chunks = {stream: _checked_chunks(rel, stream, members, promise) for stream in names}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise refused(rel, f"its metadata makes no sense: {type(err).__name__}: {err}") from err
    return members, chunks


def _check_array(path: str, array: Mapping[str, Any], promise: Promise) -> None:
    """Check the codecs of an array and the length of a vector: one value a row, or an axis."""
    names = {*_codec_names(array["codecs"])}
    if array["zarr_format"] != 3 or not names <= CODECS or array.get("storage_transformers"):
        raise refused(path, f"expected codecs out of {sorted(CODECS)}, got {sorted(names)}")
    name = path.rpartition("/")[2]
    (length,) = array["shape"] if name != "values" else (promise.rows,)
    if length != promise.rows and not (name in AXES and 0 <= length <= MAX_AXIS):
        raise refused(path, f"expected {promise.rows} values, its metadata claims {array['shape']}")


def _codec_names(codecs: Any) -> Iterator[str]:
    for codec in codecs:
        yield str(codec["name"])
        inner = codec.get("configuration", {})
        for key in ("codecs", "index_codecs"):
            yield from _codec_names(inner.get(key, ()))


def _checked_chunks(
    rel: str, stream: str, members: Mapping[str, Any], promise: Promise
) -> FrameChunks:
    array, place = members[f"{stream}/values"], f"{rel}/{stream}"
    (width, dtype), frames = promise.columns[stream], promise.frames[stream]
    wanted, got = ([frames, width], dtype), (array["shape"], array["data_type"])
    if wanted != got:
        raise refused(place, f"expected {wanted}, its metadata claims {got}")
    chunks = FrameChunks.of(place, array)
    prefix = f"{place}/values/c/"
    objects = sum(path.startswith(prefix) for path in promise.files)
    if frames > objects * chunks.chunk_frames * chunks.object_chunks:
        raise refused(place, f"{objects} committed objects cannot hold the {frames} frames")
    return chunks


@dataclass(frozen=True)
class ChunkCodec:
    """The codecs of an array's chunks: blosc, zstd or "", and perhaps a checksum, which stores of
    layout version 1 lack."""

    compressor: str
    has_crc: bool

    @classmethod
    def of(
        cls, place: str, codecs: Sequence[Mapping[str, Any]], first: str = "bytes"
    ) -> ChunkCodec:
        """Read the codecs of an array: `first`, perhaps a compressor, then perhaps the checksum.
        CommitError for any other chain."""
        names = [codec["name"] for codec in codecs]
        has_crc = names[-1] == CRC_CODEC
        inner = codecs[1:-1] if has_crc else codecs[1:]
        known = (
            names[0] == first
            and codecs[0].get("configuration", {}).get("endian", "little") == "little"
            and len(inner) <= 1
            and all(
                each["name"] == "zstd"
                or (each["name"] == "blosc" and each["configuration"]["cname"] in BLOSC_NAMES)
                for each in inner
            )
        )
        if not known:
            why = f"expected {first}, then blosc or zstd, then crc32c, got {names}"
            raise refused(place, why)
        return cls(inner[0]["name"] if inner else "", has_crc)

    def decode(self, stored: Bytes, least: int, most: int) -> Bytes:
        """Decode a stored chunk; a CommitError, before memory is taken, if it claims a size outside
        of `least` to `most` bytes, and if it is damaged."""
        body = without_crc(stored) if self.has_crc else stored
        size = {"blosc": _blosc_size, "zstd": _zstd_size, "": len}[self.compressor](body)
        if not least <= size <= most:
            raise CommitError(
                f"expected a chunk of {most} bytes, got one of {size}: run `earmill verify`"
            )
        decoders = {"blosc": blosc.decompress, "zstd": zstd.decompress, "": bytes}
        try:
            return np.frombuffer(decoders[self.compressor](body), np.uint8)
        except (RuntimeError, ValueError) as error:
            raise CommitError(
                f"a chunk cannot be decoded ({error}): run `earmill verify`"
            ) from error


def without_crc(stored: Bytes) -> Bytes:
    """Return some bytes without the CRC-32C at their end; a CommitError if it is wrong."""
    body, crc = stored[:-CRC_BYTES], stored[-CRC_BYTES:]
    if len(crc) < CRC_BYTES or google_crc32c.value(body) != _number(crc):
        raise CommitError("the CRC-32C of a chunk does not fit its bytes: run `earmill verify`")
    return body


def _blosc_size(body: Bytes) -> int:
    if len(body) < BLOSC_HEADER_BYTES or _number(body[12:16]) != len(body):
        raise CommitError("a chunk is no blosc frame: run `earmill verify`")
    return _number(body[4:8])


def _zstd_size(body: Bytes) -> int:
    """Return the size of the content, which follows descriptor, window and dictionary (RFC 8878,
    section 3.1.1.1)."""
    descriptor = int(body[4]) if len(body) > 4 and body[:4].tobytes() == ZSTD_MAGIC else 0
    single = descriptor >> 5 & 1
    size_bytes = (single, 2, 4, 8)[descriptor >> 6]
    start = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3]
    if not size_bytes or len(body) < start + size_bytes:
        raise CommitError("a chunk is no zstd frame of known size: run `earmill verify`")
    return _number(body[start : start + size_bytes]) + (256 if size_bytes == 2 else 0)


def _number(little_endian: Bytes) -> int:
    return int.from_bytes(little_endian.tobytes(), "little")


@dataclass(frozen=True)
class FrameChunks:
    """The chunks and objects of a stream's frames."""

    n_frames: int
    width: int
    dtype: np.dtype[Any]
    chunk_frames: int
    object_chunks: int
    codec: ChunkCodec

    @classmethod
    def of(cls, place: str, array: Mapping[str, Any]) -> FrameChunks:
        """Read the chunks from the metadata of an array; CommitError for chunks that our writers do
        not make."""
        (sharding,) = array["codecs"]
        settings = sharding["configuration"]
        chunk, whole = settings["chunk_shape"], array["chunk_grid"]["configuration"]["chunk_shape"]
        index_codecs = [codec["name"] for codec in settings["index_codecs"]]
        n_frames, width = array["shape"]
        dtype = np.dtype(array["data_type"])
        are_counts = all(type(n) is int and n > 0 for n in (*chunk, *whole))
        if (
            not are_counts
            or [*chunk[1:], *whole[1:]] != [width, width]
            or (math.prod(chunk) * dtype.itemsize > MAX_CHUNK_BYTES and chunk[0] > 1)
            or whole[0] > chunk[0] * MAX_CHUNKS_PER_OBJECT
        ):
            raise refused(place, f"its chunks are {chunk} in objects of {whole}")
        codec = ChunkCodec.of(place, settings["codecs"])
        usual = (
            sharding["name"] == "sharding_indexed"
            and settings.get("index_location", "end") == "end"
            and index_codecs == INDEX_CODECS
            and array["chunk_key_encoding"] == KEYS
            and whole[0] % chunk[0] == 0
        )
        if not usual:
            raise refused(place, "expected chunks in objects with an index at their end")
        return cls(n_frames, width, dtype, chunk[0], whole[0] // chunk[0], codec)

    @property
    def n_chunks(self) -> int:
        return -(-self.n_frames // self.chunk_frames)

    def decode(self, chunk: int, stored: Bytes) -> NDArray[Any]:
        """Decode the frames of a chunk, without the zeros after the last frame."""
        nbytes = self.chunk_frames * self.width * self.dtype.itemsize
        frames = self.codec.decode(stored, nbytes, nbytes).view(self.dtype)
        return frames.reshape(-1, self.width)[: self.n_frames - chunk * self.chunk_frames]


def read_index(file: StoredFile, n_chunks: int, content: Bytes | None = None) -> NDArray[np.int64]:
    """Read where the chunks of an object lie: (chunk, [first byte, end]). Missing chunks have -1.
    `content` is the whole object, if it was read already."""
    nbytes = n_chunks * ENTRY_BYTES + CRC_BYTES
    place, size = file.layout.url(file.rel), min(file.nbytes, nbytes)
    try:
        start = file.nbytes - size
        body = without_crc(file.read(start, size) if content is None else content[start:])
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


def read_vector(
    layout: Layout,
    rel: str,
    array: Mapping[str, Any],
    promise: Promise,
    said: pa.ChunkedArray | None = None,
) -> Any:
    """Read a vector of one chunk, numbers or texts, from the folder `rel`. Nothing is fetched if
    the values in the dataset's index (`said`) encode to the committed file."""
    if array["shape"] == [0]:
        return []  # A vector without values has no chunk.
    texts = array["codecs"][0]["name"] == TEXT_CODEC
    dtype = None if texts else np.dtype(array["data_type"]).newbyteorder("<")
    named = promise.files.get(f"{rel}/c/0")
    values: Any = None
    if said is not None and named is not None:
        if texts:
            values = said.to_pylist()
            encoded = VLenUTF8().encode(np.array(values, object))
        else:
            values = np.asarray(said.to_numpy())
            encoded = values.astype(dtype).tobytes()
        if hashlib.sha256(vector_chunk(encoded)).hexdigest() != named.sha256:
            values = None
    if values is None:
        file = promise.file(layout, f"{rel}/c/0")
        codec = ChunkCodec.of(rel, array["codecs"], TEXT_CODEC if texts else "bytes")
        content = codec.decode(file.read(0, file.nbytes), 0, MAX_METADATA_BYTES)
        if texts and [_number(content[:4])] != array["shape"]:
            raise refused(rel, f"expected {array['shape']} texts, its chunk claims another number")
        values = VLenUTF8().decode(content).tolist() if texts else content.view(dtype)
    if array["shape"] != [len(values)]:
        raise refused(rel, f"expected {array['shape']} values, its chunk holds {len(values)}")
    return values


def vector_chunk(content: bytes) -> bytes:
    """Encode the only chunk of a vector as zarr does with the codecs of our stores."""
    body = bytes(zstd.compress(content, ZSTD_LEVEL, False))
    return body + google_crc32c.value(body).to_bytes(CRC_BYTES, "little")
