"""The parts of a format of data files, for formats of other distributions.

A format is one module and one entry point, see docs/extending.md:

    [project.entry-points."earmill.formats"]
    npz = "my_module:NPZ"

`earmill.testing.FormatConformance` holds the tests it must pass.
"""

from __future__ import annotations

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.block_cache import (
    BlockCache,
    FrameSpan,
    ShardReader,
    other_row,
    outside,
)
from earmill.pipeline.formats.digest import ShardDigest, StreamDigest, digest_blocks
from earmill.pipeline.formats.format import Encoding, Format, Promise
from earmill.pipeline.formats.row_table import row_table
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.formats.values import pieces
from earmill.pipeline.storage.layout import Layout

__all__ = [
    "BlockCache",
    "CommitError",
    "Encoding",
    "FeatureRow",
    "Format",
    "FrameSpan",
    "Layout",
    "Promise",
    "ShardDigest",
    "ShardReader",
    "StreamDigest",
    "digest_blocks",
    "layout_of",
    "other_row",
    "outside",
    "pieces",
    "row_table",
]
