"""The parts of a kind of source, for sources of other distributions.

A kind is one module and one entry point, see docs/extending.md:

    [project.entry-points."earmill.sources"]
    tones = "my_module:TONES"

`earmill.testing.sources` holds the tests it must pass.
"""

from earmill.pipeline.common.arrow_types import Columns as Columns
from earmill.pipeline.common.errors import AbsentError as AbsentError
from earmill.pipeline.common.errors import RowError as RowError
from earmill.pipeline.common.errors import SourceError as SourceError
from earmill.pipeline.common.errors import SourceOutage as SourceOutage
from earmill.pipeline.common.errors import UnreadableError as UnreadableError
from earmill.pipeline.sources.base import Fetched as Fetched
from earmill.pipeline.sources.base import Item as Item
from earmill.pipeline.sources.base import Source as Source
from earmill.pipeline.sources.base import filesystem as filesystem
from earmill.pipeline.sources.base import source_errors as source_errors
from earmill.pipeline.sources.fetch import Blob as Blob
from earmill.pipeline.sources.fetch import fetch_all as fetch_all
from earmill.pipeline.spec import Options as Options
from earmill.pipeline.spec import plain_uri as plain_uri
from earmill.pipeline.spec.source import SourceKind as SourceKind
from earmill.pipeline.spec.source import SourceSection as SourceSection
