"""Long recordings of a source as the spans that a job asks for; see `spec.spans`.

Only a recording whose length is known is cut, and only in a container that can be sought in: a span
of any other would be decoded from the recording's start. Planned spans know what they are a part
of, so that whoever computes them reads the seconds around them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from earmill.pipeline.common.arrow_types import Columns
from earmill.pipeline.common.errors import RowError
from earmill.pipeline.planning.shards import item_seconds
from earmill.pipeline.sources import Item, Source, open_source
from earmill.pipeline.sources.base import Fetched
from earmill.pipeline.sources.durations import header_seconds
from earmill.pipeline.sources.fetch import MEMORY_BYTES
from earmill.pipeline.sources.span_reads import can_seek
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.spans import SpansSpec

# Recordings below this many spans stay whole; so the last span of others has half a span or more.
LEAST_SPANS = 1.5


def planned_source(spec: JobSpec) -> Source:
    """The source of a job as it is planned: with spans where the job asks for them."""
    source = open_source(spec.source)
    return source if spec.audio.spans is None else SpannedSource(source, spec.audio.spans)


class SpannedSource:
    """A source whose long recordings are listed in spans.

    Attributes:
        in_order: Long recordings of the last listing that stay whole.

    Args:
        source: The source. spans: How long they are.
    """

    def __init__(self, source: Source, spans: SpansSpec) -> None:
        self._source, self._span_s = source, spans.seconds
        self.in_order = 0

    def items(self) -> Iterator[Item]:
        self.in_order = 0
        for item in self._source.items():
            yield from self._spans_of(item)

    def columns(self) -> Columns:
        return self._source.columns()

    def skipped(self) -> Mapping[str, int]:
        return self._source.skipped()

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        return self._source.fetch(items)

    def describe(self) -> dict[str, Any]:
        return self._source.describe()

    def keep(self, kept: Any) -> None:
        """As of the source, where it has that."""
        if hasattr(self._source, "keep"):
            self._source.keep(kept)

    def _spans_of(self, item: Item) -> Iterator[Item]:
        known = self._with_length(item)
        if item_seconds(known) < LEAST_SPANS * self._span_s:
            yield item
        elif self._can_cut(known):
            yield from cut_into(known, self._span_s)
        else:
            self.in_order += 1
            yield item

    def _can_cut(self, item: Item) -> bool:
        starts_whole = float(item.start_s or 0.0).is_integer()
        is_known = item.seconds is not None and not item.estimated
        return is_known and starts_whole and can_seek(item.uri) and item.block is None

    def _with_length(self, item: Item) -> Item:
        """The item with the length that its header says, where the listing has guessed it.

        Asked of large objects only: of others a span would be fetched whole.
        """
        is_large = (item.size or 0) > MEMORY_BYTES
        if not (item.estimated and is_large and can_seek(item.uri) and item.block is None):
            return item
        # Asked for as a span, so that it is read by ranges.
        (_, stream), *_ = self._source.fetch([replace(item, start_s=item.start_s or 0.0)])
        if isinstance(stream, RowError):
            return item  # told when it is extracted
        with stream:
            whole_s = header_seconds(stream, item.size or 0)
        if whole_s is None:
            return item
        end_s = whole_s if item.end_s is None else item.end_s
        return replace(item, seconds=max(0.0, end_s - (item.start_s or 0.0)), estimated=False)


def cut_into(item: Item, span_s: int) -> Iterator[Item]:
    """The spans of a row of known length; the last one ends where the row does."""
    start_s, seconds = item.start_s or 0.0, item_seconds(item)
    count = max(1, math.floor(seconds / span_s + 0.5))
    for number in range(count):
        is_last = number == count - 1
        begin_s = start_s + number * span_s
        yield replace(
            item,
            row_id=f"{item.row_id}#span{number + 1}of{count}",
            start_s=begin_s,
            end_s=item.end_s if is_last else begin_s + span_s,
            seconds=seconds - number * span_s if is_last else float(span_s),
            part_of=(start_s, item.end_s),
        )
