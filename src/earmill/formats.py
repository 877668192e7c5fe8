"""The parts of a format of data files, for formats of other distributions.

A format is one module and one entry point, see docs/extending.md:

    [project.entry-points."earmill.formats"]
    npz = "my_module:NPZ"

`earmill.testing.FormatConformance` holds the tests it must pass.
"""

from earmill.pipeline.common.errors import CommitError as CommitError
from earmill.pipeline.formats.block_cache import BlockCache as BlockCache
from earmill.pipeline.formats.block_cache import FrameSpan as FrameSpan
from earmill.pipeline.formats.block_cache import ShardReader as ShardReader
from earmill.pipeline.formats.block_cache import other_row as other_row
from earmill.pipeline.formats.block_cache import outside as outside
from earmill.pipeline.formats.digest import ShardDigest as ShardDigest
from earmill.pipeline.formats.digest import StreamDigest as StreamDigest
from earmill.pipeline.formats.digest import digest_blocks as digest_blocks
from earmill.pipeline.formats.format import Encoding as Encoding
from earmill.pipeline.formats.format import Format as Format
from earmill.pipeline.formats.format import Promise as Promise
from earmill.pipeline.formats.row_table import row_table as row_table
from earmill.pipeline.formats.rows import FeatureRow as FeatureRow
from earmill.pipeline.formats.stream_layout import layout_of as layout_of
from earmill.pipeline.formats.values import pieces as pieces
from earmill.pipeline.storage.layout import Layout as Layout
