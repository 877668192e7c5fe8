"""What a data file claims, held against what the commit says, before anything is allotted or run.

A dataset may be somebody else's. A reader believes dataset.json and the commits as far as they
agree with each other; a store or file that claims other sizes, another type or a codec that our
writers never use is refused, not opened to see what happens.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.one_line import named_line
from earmill.pipeline.formats.parquet.long_rows import LongRows
from earmill.pipeline.formats.rows import OutFile

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
CODECS = frozenset({"sharding_indexed", "bytes", "zstd", "crc32c", "vlen-utf8"})
# Levels cost up to 4 bytes a value, and a page more than it holds where that cannot be compressed.
PARQUET_OVERHEAD = 4


@dataclass(frozen=True)
class Promise:
    """What commit and dataset.json say of one data file.

    Args:
        rows: Good rows of the shard.
        frames: Stream name to frames in the shard.
        columns: Stream name to (width, dtype name) on disk.
        files: Every file of the shard by its path.
    """

    rows: int
    frames: Mapping[str, int]
    columns: Mapping[str, tuple[int, str]]
    files: Mapping[str, OutFile]


def checked_metadata(rel: str, content: bytes, promise: Promise) -> bytes:
    """The root metadata of the Zarr store at `rel`, if all of it is as promised.

    Raises:
        CommitError: It is not the committed file, or describes something our writers do not write.
    """
    named = promise.files.get(f"{rel}/{ROOT_METADATA}")
    if named is None or hashlib.sha256(content).hexdigest() != named.sha256:
        raise _refused(rel, f"its {ROOT_METADATA} is not the one that was committed")
    try:
        root = json.loads(content)
        members = root["consolidated_metadata"]["metadata"]
        if root["zarr_format"] != 3 or root["node_type"] != "group":
            raise _refused(rel, "expected a group of Zarr format 3")
        for path, member in members.items():
            if member["node_type"] == "array":
                _check_codecs(f"{rel}/{path}", member)
                _check_index(f"{rel}/{path}", member, promise)
        for stream in promise.columns:
            _check_values(rel, stream, members[f"{stream}/values"], promise)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise _refused(rel, f"its metadata makes no sense: {type(err).__name__}: {err}") from err
    return content


def _check_codecs(path: str, array: Mapping[str, Any]) -> None:
    names = {*_codec_names(array["codecs"])}
    if array["zarr_format"] != 3 or not names <= CODECS or array.get("storage_transformers"):
        raise _refused(path, f"expected codecs out of {sorted(CODECS)}, got {sorted(names)}")


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
        raise _refused(
            path, f"expected {promise.rows} values, its metadata claims {array['shape']}"
        )


def _check_values(rel: str, stream: str, array: Mapping[str, Any], promise: Promise) -> None:
    """Shape, type and chunks of a stream's values."""
    width, dtype = promise.columns[stream]
    frames = promise.frames[stream]
    wanted, got = ([frames, width], dtype), (array["shape"], array["data_type"])
    if wanted != got:
        raise _refused(f"{rel}/{stream}", f"expected {wanted}, its metadata claims {got}")
    sharding = array["codecs"][0]
    chunk = sharding["configuration"]["chunk_shape"]
    whole = array["chunk_grid"]["configuration"]["chunk_shape"]
    counts = [*chunk, *whole]
    if len(counts) != 4 or not all(type(n) is int and n > 0 for n in counts):
        raise _refused(f"{rel}/{stream}", f"its chunks are {chunk} in objects of {whole}")
    chunk_bytes = math.prod(chunk) * np.dtype(dtype).itemsize
    if (
        chunk[1] != width
        or whole[1] != width
        or (chunk_bytes > MAX_CHUNK_BYTES and chunk[0] > 1)
        or whole[0] > chunk[0] * MAX_CHUNKS_PER_OBJECT
    ):
        raise _refused(f"{rel}/{stream}", f"its chunks are {chunk} in objects of {whole}")
    prefix = f"{rel}/{stream}/values/c/"
    objects = sum(path.startswith(prefix) for path in promise.files)
    if frames > objects * whole[0]:
        raise _refused(
            f"{rel}/{stream}", f"{objects} committed objects cannot hold the {frames} frames"
        )


def check_parquet(rel: str, file: pq.ParquetFile, long_rows: LongRows, promise: Promise) -> None:
    """Rows and columns of a Parquet file.

    Raises:
        CommitError: They are not what was promised.
    """
    rows = promise.rows + sum(long_rows.parts(row) - 1 for row in long_rows.frames)
    if file.metadata.num_rows != rows:
        raise _refused(rel, f"expected {rows} rows, its footer claims {file.metadata.num_rows}")
    schema = file.schema_arrow
    for stream, (width, dtype) in promise.columns.items():
        wanted = pa.list_(pa.list_(pa.from_numpy_dtype(dtype), width))
        got = schema.field(stream).type if stream in schema.names else None
        if got != wanted:
            raise _refused(rel, f"expected {wanted} for {stream}, its footer claims {got}")


def check_column(rel: str, file: pq.ParquetFile, group: int, stream: str, promise: Promise) -> None:
    """Size of one stream in one row group, as the footer claims it, before it is read.

    Raises:
        CommitError: The shard has less.
    """
    meta = file.metadata.row_group(group)
    path = f"{stream}.list.element.list.element"
    column = next(
        (c for c in map(meta.column, range(meta.num_columns)) if c.path_in_schema == path), None
    )
    if column is None:
        raise _refused(rel, f"row group {group} has no column {path}")
    width, dtype = promise.columns[stream]
    limit = promise.frames[stream] * width + meta.num_rows
    nbytes = limit * (np.dtype(dtype).itemsize + PARQUET_OVERHEAD) + MB
    if column.num_values > limit or not 0 <= column.total_uncompressed_size <= nbytes:
        raise _refused(
            rel,
            f"row group {group} claims {column.num_values} values of {stream} in "
            f"{column.total_uncompressed_size} bytes, the shard has {limit} at most",
        )


@contextmanager
def named_damage(where: str, file: str) -> Iterator[None]:
    """Turn whatever damaged bytes make a decoder raise into one line that names row and file.

    What the system says of a file (no right, no network) passes as it is; a missing file does not.
    """
    try:
        yield
    except CommitError as err:
        raise CommitError(f"{where}: {err}") from err
    except (OSError, pa.ArrowException, LookupError, ArithmeticError, ValueError, TypeError) as err:
        told = isinstance(err, OSError) and err.errno is not None
        if told and not isinstance(err, FileNotFoundError):
            raise
        raise _damaged(where, file, err) from err
    except (RuntimeError, MemoryError, AttributeError) as err:
        raise _damaged(where, file, err) from err


def _damaged(where: str, file: str, err: BaseException) -> CommitError:
    return CommitError(
        f"{where}: {file} is missing or damaged although it is committed "
        f"({named_line(err)}); run `earmill verify`"
    )


def _refused(place: str, why: str) -> CommitError:
    return CommitError(
        f"{place}: {why}; the file is damaged or not what was committed: run `earmill verify`"
    )
