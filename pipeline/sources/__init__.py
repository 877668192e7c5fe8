"""Sources of audio, found by their kind among the entry points of `earmill.sources`.

They may import `spec`, `audio`, `storage` and `common`.
"""

from __future__ import annotations

from earmill.pipeline.sources.base import Item, Source
from earmill.pipeline.spec.source_kinds import SourceSection, source_kind

__all__ = ["Item", "Source", "open_source"]


def open_source(spec: SourceSection) -> Source:
    """The source a job names; SourceError when it is missing or cannot be read.

    Cheap enough for every worker: rows are listed by `items()`, which is also where an empty source
    shows.
    """
    found: Source = source_kind(spec.kind).open(spec)
    return found
