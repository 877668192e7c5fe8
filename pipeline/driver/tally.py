"""Running totals of a run, out of its events.

Progress and time left are counted in the plan's audio seconds, never in rows or shards: rows differ
in length, and audio is what costs. Hours and speed are those of audio that was decoded and went
through the models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from earmill.pipeline.driver import events

# Below this much work the rate says nothing.
RATE_AFTER_S = 0.5
# Events come every second. After so long without one the process was stopped: no time of the work.
STOPPED_S = 30.0


class Tally:
    """Running totals of one run.

    Args:
        clock: Monotonic seconds.
    Attributes:
        audio_s: Audio of good rows, as decoded; committed shards of earlier runs included.
        planned_s: Estimated audio of all shards, `done_s` of those that are through.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._work_began: float | None = None
        self._last_event = clock()
        self._planned_before_s = self._audio_before_s = 0.0
        self._planned_done_s = self._audio_done_s = 0.0
        self._in_flight_s = 0.0
        self.job = ""
        self.planned_s = 0.0
        self.rows_ok = self.rows_bad = self.rows_total = 0

    def take(self, event: events.Event) -> None:
        """Update the totals."""
        before, self._last_event = self._last_event, self._clock()
        if self._work_began is not None and self._last_event - before > STOPPED_S:
            self._work_began += self._last_event - before
        if isinstance(event, events.JobStarted):
            self.job, self.planned_s = event.job, event.seconds_total
            self._planned_before_s = self._planned_done_s = event.seconds_done
            self._audio_before_s = self._audio_done_s = event.audio_s_done
            self.rows_ok, self.rows_bad = event.rows_ok, event.rows_bad
            self.rows_total = event.rows_total
        elif isinstance(event, events.WorkersReady):
            self._work_began = self._clock()
        elif isinstance(event, events.InFlight):
            self._in_flight_s = event.seconds
        elif isinstance(event, events.ShardDone):
            self._planned_done_s += event.seconds
            self._audio_done_s += event.audio_s
            self._in_flight_s = max(0.0, self._in_flight_s - event.seconds)
            self.rows_ok += event.rows_ok
            self.rows_bad += event.rows_bad

    @property
    def working(self) -> bool:
        """The workers are ready."""
        return self._work_began is not None

    @property
    def done_s(self) -> float:
        """Planned audio that is through."""
        return min(self._planned_done_s + self._in_flight_s, self.planned_s)

    @property
    def audio_s(self) -> float:
        return self._audio_done_s + self._in_flight_s

    @property
    def left_audio_s(self) -> float:
        """Audio that is left, as planned: an estimate."""
        return self.planned_s - self.done_s

    @property
    def share(self) -> float:
        """How much is done, 0 to 1."""
        return self.done_s / self.planned_s if self.planned_s else 1.0

    @property
    def times_real_time(self) -> float | None:
        """Decoded audio seconds per second since the workers were ready; None while unknown."""
        return self._rate(self.audio_s - self._audio_before_s)

    @property
    def left_s(self) -> float | None:
        """Seconds of waiting that are left at this rate; None while unknown."""
        rate = self._rate(self.done_s - self._planned_before_s)
        return None if rate is None else self.left_audio_s / rate

    def _rate(self, gained_s: float) -> float | None:
        worked_s = 0.0 if self._work_began is None else self._clock() - self._work_began
        return gained_s / worked_s if worked_s >= RATE_AFTER_S and gained_s > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """The totals as a JSON progress record; `audio_s_left` and `audio_s_total` are estimates
        while shards are left."""
        rate, left_s = self.times_real_time, self.left_s
        return {
            "event": "progress",
            "share_done": round(self.share, 4),
            "audio_s_done": round(self.audio_s, 3),
            "audio_s_total": round(self.audio_s + self.left_audio_s, 3),
            "audio_s_left": round(self.left_audio_s, 3),
            "times_real_time": None if rate is None else round(rate, 2),
            "eta_s": None if left_s is None else round(left_s, 1),
            "rows_ok": self.rows_ok,
            "rows_bad": self.rows_bad,
            "rows_total": self.rows_total,
        }
