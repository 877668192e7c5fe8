"""The writers of one shard, by format name.

Each writes privately into a local folder, without the time, the host or a random value, so that
equal rows give equal bytes; each can read its own file back as a `ShardDigest`, which must equal
the one taken from the rows before anything is published. Zarr suits long files and time slices,
Parquet suits row access and SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earmill.pipeline.formats.digest import ShardDigest
from earmill.pipeline.formats.parquet.write import digest_parquet, write_parquet
from earmill.pipeline.formats.row_table import row_table, write_table
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.zarr.write import digest_zarr, write_zarr

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo

__all__ = ["FORMATS", "Encoding", "encode", "read_back", "row_table", "write_table"]

FORMATS = ("zarr", "parquet")


@dataclass(frozen=True)
class Encoding:
    """How the rows of one dataset become files.

    Args:
        dtype: Of frames, float16 or float32; rows must already have it. Events are int32.
        row_group_profile: Parquet only; random (small row groups) or scan (large ones).
        extra_types: Carried-through column to its type, see `common.arrow_types`. Give it for the
            whole plan, or a column that is empty in one shard changes its type in the next.
        attrs: Stored in every file; must be the same for every attempt of a shard.
    """

    dtype: str = "float16"
    row_group_profile: str = "random"
    extra_types: Mapping[str, Any] | None = None
    attrs: Mapping[str, Any] | None = None


def encode(
    fmt: str,
    rows: Sequence[FeatureRow],
    streams: Sequence[StreamInfo],
    *,
    folder: Path,
    name: str,
    encoding: Encoding,
) -> Path:
    """Write the shard in one format under `folder` and return the path of the file or store."""
    attrs = encoding.attrs or {}
    if fmt == "zarr":
        return write_zarr(rows, streams, folder, name, attrs, dtype=encoding.dtype)
    if fmt == "parquet":
        return write_parquet(
            rows,
            streams,
            folder,
            name,
            attrs,
            dtype=encoding.dtype,
            row_group_profile=encoding.row_group_profile,
            extra_types=encoding.extra_types,
        )
    raise ValueError(f"format is one of {list(FORMATS)}, got {fmt!r}")


def read_back(fmt: str, path: Path, streams: Sequence[StreamInfo]) -> ShardDigest:
    """What an encoded shard really holds."""
    readers: dict[str, Callable[[Path, Sequence[StreamInfo]], ShardDigest]] = {
        "zarr": digest_zarr,
        "parquet": digest_parquet,
    }
    return readers[fmt](path, streams)
