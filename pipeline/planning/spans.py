"""Long recordings of a source, cut into the spans that a job asks for; see `spec.spans`.

A recording is cut if its length is known, its container can be sought in, and its source reads
parts of files: otherwise each span would read the file from its start. A planned span names the
whole recording, so that its worker can read the seconds around the span.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

from earmill.pipeline.audio.channels import BINAURAL, EARS
from earmill.pipeline.audio.time_span import END_SLACK_S
from earmill.pipeline.common.errors import RowError, SourceError
from earmill.pipeline.planning.shards import item_seconds
from earmill.pipeline.planning.variants import with_variants
from earmill.pipeline.sources import Item, Source, open_source
from earmill.pipeline.sources.base import ChangedRows
from earmill.pipeline.sources.durations import header_seconds
from earmill.pipeline.sources.fetch import MEMORY_BYTES, can_seek, check_arrived
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.spans import SPAN_ID, SpansSpec
from earmill.pipeline.storage.backend import is_local

# Recordings below this many spans stay whole, so that a last span has at least half the length.
LEAST_SPANS = 1.5


def planned_source(spec: JobSpec) -> Source:
    """Return the source of a job, whose listing has the rows that the job plans."""
    source = open_source(spec.source, spec.audio.array_rate_hz)
    spans, variants = spec.audio.spans, spec.audio.variants
    if variants is not None:
        ears = EARS if spec.audio.channels == BINAURAL else 1
        in_child = spec.run.decode_in_child
        change = partial(with_variants, variants=variants, ears=ears, in_child=in_child)
        return cast(Source, ChangedRows(source, change))
    if spans is None:
        return source
    return cast(Source, SpannedSource(source, spans, spec.audio.limits().span_tolerance_s))


class SpannedSource:
    """A source whose long recordings are listed in spans. Rows may end `tolerance_s` behind their
    file."""

    def __init__(self, source: Source, spans: SpansSpec, tolerance_s: float = END_SLACK_S) -> None:
        self._source, self._span_s = source, spans.seconds
        # The file may end before the last span, so the row's end does not tell the number of spans.
        self._end_is_open = tolerance_s >= spans.seconds / 2
        # Opens the object of a row for reading by ranges, or returns None; see docs/extending.md.
        self._open_ranged = getattr(source, "open_ranged", None)
        self.in_order = 0  # long recordings of the last listing that stay whole

    def items(self) -> Iterator[Item]:
        self.in_order = 0
        for item in self._source.items():
            if SPAN_ID.fullmatch(item.row_id):
                raise SourceError(
                    f"row {item.row_id!r} has the form of a span's id, `<id>#span<k>of<n>`, in a "
                    "job with audio.spans; give the row another id, or leave audio.spans out"
                )
            known = self._measured(item)
            if known is not None and self._is_long(known):
                yield from cut_into(known, self._span_s)
                continue
            self.in_order += known is None and self._is_long(item)
            yield item

    # A listing without durations could not be cut.
    listing = items

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def _is_long(self, item: Item) -> bool:
        return item_seconds(item) >= LEAST_SPANS * self._span_s

    def _measured(self, item: Item) -> Item | None:
        """Return the row with its true length; None if it cannot be cut."""
        if item.end_s is not None and self._end_is_open:
            return None
        starts_whole = float(item.start_s or 0.0).is_integer()
        if self._open_ranged is None or not starts_whole or not can_seek(item.uri):
            return None
        is_large = not is_local(item.uri) and (item.size or 0) > MEMORY_BYTES
        if not is_large or not (item.estimated or self._is_long(item)):
            # Smaller objects are not opened: they are fetched whole for each span.
            return None if item.estimated or item.seconds is None else item
        stream = self._open_ranged(item)
        if stream is None:
            return None
        with stream:
            if not item.estimated:
                return item
            whole_s = header_seconds(stream, item.size or 0)
            try:
                # A header that did not arrive looks like a header without a length.
                check_arrived(stream, item.uri)
            except RowError:
                return None  # extraction will report it
        if whole_s is None:
            return None
        end_s = whole_s if item.end_s is None else item.end_s
        return replace(item, seconds=max(0.0, end_s - (item.start_s or 0.0)), estimated=False)


def cut_into(item: Item, span_s: int) -> Iterator[Item]:
    """Yield the spans of a row of known length; the last span ends with the row."""
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
