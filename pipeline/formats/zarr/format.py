"""The format `zarr`, as its entry point names it; what it needs is imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from earmill.pipeline.formats.block_cache import BlockCache, ShardReader
from earmill.pipeline.formats.digest import ShardDigest, differences
from earmill.pipeline.formats.format import Encoding, Format, Promise
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.storage.layout import Layout

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo


class ZarrFormat(Format):
    """A shard as one Zarr v3 store; see `earmill.pipeline.formats.zarr.write`."""

    suffix = ".zarr"
    media_type = "application/vnd+zarr"
    summary = "one Zarr v3 store a shard, CF contiguous ragged; for long files and time slices"
    integrity = "CRC-32C of every chunk and chunk index; a missing object is an error"
    is_folder = True
    reads_parts = True

    def write(
        self,
        path: Path,
        rows: Sequence[FeatureRow],
        streams: Sequence[StreamInfo],
        encoding: Encoding,
    ) -> None:
        """Write a store."""
        from earmill.pipeline.formats.zarr.write import write_zarr

        attrs = encoding.attrs or {}
        write_zarr(rows, streams, path.parent, path.name, attrs, dtype=encoding.dtype)

    def digest(self, path: Path, streams: Sequence[StreamInfo]) -> ShardDigest:
        """Return the digest of a store."""
        from earmill.pipeline.formats.zarr.write import digest_zarr

        return digest_zarr(path, streams)

    def problems(
        self,
        path: Path,
        rows: Sequence[FeatureRow],
        streams: Sequence[StreamInfo],
        expected: ShardDigest,
    ) -> list[str]:
        """Compare a store with its rows, bit by bit."""
        from earmill.pipeline.formats.zarr.write import compared_zarr

        return differences(expected, compared_zarr(path, rows, streams, expected))

    def open(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> ShardReader:
        """Open a store."""
        from earmill.pipeline.formats.zarr.read import ZarrShard

        return ZarrShard(layout, rel, promise, cache)

    def objects(
        self, stored_rows: Mapping[str, int], streams: Sequence[StreamInfo], dtype: str
    ) -> int:
        """Count metadata, index arrays, and packed chunks."""
        from earmill.pipeline.formats.zarr.write import count_objects

        return count_objects(stored_rows, streams, dtype)

    def reading(self, paths: Sequence[str]) -> Sequence[str]:
        """With xarray, one stream of one shard."""
        return ("import xarray", f'ds = xarray.open_zarr("{paths[0]}", group="<stream>")')


ZARR = ZarrFormat()
