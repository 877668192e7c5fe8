"""The parts of a kind of source, for sources of other distributions.

A kind is one module and one entry point, see docs/extending.md:

    [project.entry-points."earmill.sources"]
    tones = "my_module:TONES"

`earmill.testing.sources` holds the tests it must pass.
"""

from __future__ import annotations

from earmill.pipeline.common.arrow_types import Columns
from earmill.pipeline.common.errors import (
    AbsentError,
    RowError,
    SourceError,
    SourceOutage,
    UnreadableError,
)
from earmill.pipeline.sources.base import Fetched, Item, Source, filesystem, source_errors
from earmill.pipeline.sources.fetch import Blob, fetch_all
from earmill.pipeline.spec import Options, plain_uri
from earmill.pipeline.spec.source import SourceKind, SourceSection

__all__ = [
    "AbsentError",
    "Blob",
    "Columns",
    "Fetched",
    "Item",
    "Options",
    "RowError",
    "Source",
    "SourceError",
    "SourceKind",
    "SourceOutage",
    "SourceSection",
    "UnreadableError",
    "fetch_all",
    "filesystem",
    "plain_uri",
    "source_errors",
]
