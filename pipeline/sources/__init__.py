"""Sources of audio, found by their kind among the entry points of `earmill.sources`."""

from __future__ import annotations

from itertools import islice
from typing import cast

from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.sources.base import ChangedRows, Item, Source
from earmill.pipeline.spec.source import SourceSection, source_kind

__all__ = ["Item", "Source", "open_source"]


def open_source(spec: SourceSection, array_rate_hz: int | None = None) -> Source:
    """Return the source that a job names; SourceError if it is missing or cannot be read. Every
    worker opens the source, so no rows are listed. Arrays without a rate have `array_rate_hz`."""
    kind = source_kind(spec.kind)
    if array_rate_hz is not None and not kind.has_arrays:
        raise SourceError(
            f"audio.array_rate_hz: expected a source whose rows may be arrays (kind: hf), got "
            f"kind: {spec.kind}, whose files say their rate; leave it out"
        )
    found: Source = kind.open(spec, array_rate_hz) if kind.has_arrays else kind.open(spec)
    if spec.limit is None:
        return found
    return cast(Source, ChangedRows(found, lambda items: islice(items, spec.limit)))
