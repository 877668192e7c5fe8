"""The format `parquet`, as its entry point names it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from earmill.pipeline.formats.block_cache import BlockCache, ShardReader
from earmill.pipeline.formats.digest import ShardDigest
from earmill.pipeline.formats.format import Encoding, Format, Promise
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.storage.layout import Layout

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo


class ParquetFormat(Format):
    """A shard as one Parquet file; see `earmill.pipeline.formats.parquet.write`."""

    suffix = ".parquet"
    # The name that Croissant readers know; they refuse application/vnd.apache.parquet.
    media_type = "application/x-parquet"
    summary = "one Parquet file a shard, one row a clip; for row access and SQL"
    integrity = "CRC-32 of every page; sizes in the footer against the commit"
    is_table = True
    has_scales = False

    def write(
        self,
        path: Path,
        rows: Sequence[FeatureRow],
        streams: Sequence[StreamInfo],
        encoding: Encoding,
    ) -> None:
        """Write a file."""
        from earmill.pipeline.formats.parquet.write import write_parquet

        write_parquet(path, rows, streams, encoding)

    def digest(self, path: Path, streams: Sequence[StreamInfo]) -> ShardDigest:
        """Return the digest of a file."""
        from earmill.pipeline.formats.parquet.write import digest_parquet

        return digest_parquet(path, streams)

    def open(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> ShardReader:
        """Open a file."""
        from earmill.pipeline.formats.parquet.read import ParquetShard

        return ParquetShard(layout, rel, promise, cache)

    def reading(self, paths: Sequence[str]) -> Sequence[str]:
        """With Hugging Face datasets, all shards."""
        return (
            "from datasets import load_dataset",
            'ds = load_dataset("path/to/this/folder")  # the files listed above, no others',
        )


PARQUET = ParquetFormat()
