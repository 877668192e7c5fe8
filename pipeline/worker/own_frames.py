"""What is read around a planned span, and which of the frames made of it are its own.

read      |--- lead ---|======= span =======|- tail -|
frames    | dropped    | kept, from 0 on    | dropped
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.pipeline.sources.base import Item
from earmill.pipeline.spec.spans import TAIL_S
from earmill.pipeline.worker.feature_values import Made

if TYPE_CHECKING:
    from amtcore.features.stream_info import StreamInfo


@dataclass(frozen=True)
class Margins:
    """What is read around a row.

    Args:
        lead_s, tail_s: Whole seconds before and after it.
        own_s: Seconds of the row; None where it ends what it is a part of, and keeps all to there.
    """

    lead_s: int = 0
    tail_s: int = 0
    own_s: int | None = None

    @property
    def both_s(self) -> tuple[int, int]:
        """Lead and tail."""
        return self.lead_s, self.tail_s


def margins_of(item: Item, warm_up_s: int) -> Margins | None:
    """What is read around a planned span; None for any other row.

    Args:
        warm_up_s: What the models take, see `spec.spans`.
    """
    if item.part_of is None or item.start_s is None:
        return None
    whole_start_s, whole_end_s = item.part_of
    lead_s = min(warm_up_s, round(item.start_s - whole_start_s))
    if item.end_s is None or item.end_s == whole_end_s:
        return Margins(lead_s)
    return Margins(lead_s, TAIL_S, round(item.end_s - item.start_s))


class OwnFrames:
    """Takes what models make of a span and what is around it, and lets through the span's own.

    Args:
        margins: What is around it. streams: Of all models.
    """

    def __init__(self, margins: Margins, streams: Iterable[StreamInfo]) -> None:
        own_s, self._ends = margins.own_s, dict[str, tuple[int, int | None]]()
        for info in streams:
            rate_hz, stop = info.frame_rate_hz, None
            if own_s is not None:
                stop = round((margins.lead_s + own_s) * rate_hz)
            self._ends[info.name] = round(margins.lead_s * rate_hz), stop
        self._seen = dict.fromkeys(self._ends, 0)

    def take(self, made: Made) -> dict[str, Any]:
        """Of the next stretch of some streams, what is the span's own; errors pass as they are."""
        return {name: self._own(name, values) for name, values in made.items()}

    def check(self) -> None:
        """Raise where a model has made fewer frames than the span has."""
        for name, (_, stop) in self._ends.items():
            if stop is not None and self._seen[name] < stop:
                raise RuntimeError(
                    f"stream {name}: expected {stop} frames of a span and its warm-up, got "
                    f"{self._seen[name]}: the model looks ahead by more than {TAIL_S} s and must "
                    "not state memory_s"
                )

    def _own(self, name: str, values: Any) -> Any:
        first, stop = self._ends[name]
        seen = self._seen[name]
        if isinstance(values, np.ndarray):
            self._seen[name] += len(values)
            end = None if stop is None else max(0, stop - seen)
            return values[max(0, first - seen) : end]
        if isinstance(values, Exception):
            self._seen[name] = first if stop is None else stop
            return values
        self._seen[name] += values.n_frames
        return _events_between(values, first, stop)


def own_frames(made: Made, margins: Margins | None, streams: Iterable[StreamInfo]) -> Made:
    """Of what models made of a whole clip, what is the row's; all of it without margins."""
    if margins is None:
        return made
    own = OwnFrames(margins, streams)
    kept = own.take(made)
    own.check()
    return kept


def _events_between(events: Any, first: int, stop: int | None) -> Any:
    """Events of steps from `first` up to `stop`, counted from `first`."""
    begin, last = max(first, events.first_frame), events.first_frame + events.n_frames
    if stop is not None:
        begin, last = min(begin, stop), min(last, stop)
    last = max(begin, last)
    low, high = np.searchsorted(events.frame, (begin, last))
    return replace(
        events,
        frame=events.frame[low:high] - first,
        channel=events.channel[low:high],
        count=events.count[low:high],
        first_frame=begin - first,
        n_frames=last - begin,
    )
