"""Totals of a run, summed from its events: progress for people, and the numbers behind metrics.
Progress and time left are in planned audio seconds; hours and speed in decoded audio seconds."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from earmill.pipeline.common.monitoring import DRIVER, Counts, counts
from earmill.pipeline.driver import events

RATE_AFTER_S = 0.5  # Below this much work the rate says nothing.
# Events come every second. A longer pause means that the process was stopped; it is not counted.
STOPPED_S = 30.0


class RunTotals:
    """Running totals of one run; `planned_s` is the planned audio of all shards, in seconds."""

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
        before, self._last_event = self._last_event, self._clock()
        if self._work_began is not None and self._last_event - before > STOPPED_S:
            self._work_began += self._last_event - before
        match event:
            case events.JobStarted():
                self.job, self.planned_s = event.job, event.seconds_total
                self._planned_before_s = self._planned_done_s = event.seconds_done
                self._audio_before_s = self._audio_done_s = event.audio_s_done
                self.rows_ok, self.rows_bad = event.rows_ok, event.rows_bad
                self.rows_total = event.rows_total
            case events.WorkersReady():
                self._work_began = self._clock()
            case events.InFlight():
                self._in_flight_s = event.seconds
            case events.ShardDone():
                self._planned_done_s += event.seconds
                self._audio_done_s += event.audio_s
                self._in_flight_s = max(0.0, self._in_flight_s - event.seconds)
                self.rows_ok += event.rows_ok
                self.rows_bad += event.rows_bad

    @property
    def working(self) -> bool:
        return self._work_began is not None

    @property
    def done_s(self) -> float:
        """Planned audio that is done or extracted, in seconds."""
        return min(self._planned_done_s + self._in_flight_s, self.planned_s)

    @property
    def audio_s(self) -> float:
        """Audio of good rows as decoded, in seconds; earlier runs included."""
        return self._audio_done_s + self._in_flight_s

    @property
    def left_audio_s(self) -> float:
        return self.planned_s - self.done_s

    @property
    def share(self) -> float:
        return self.done_s / self.planned_s if self.planned_s else 1.0

    @property
    def times_real_time(self) -> float | None:
        """Decoded audio seconds per second since the workers were ready; None while unknown."""
        return self._rate(self.audio_s - self._audio_before_s)

    @property
    def left_s(self) -> float | None:
        rate = self._rate(self.done_s - self._planned_before_s)
        return None if rate is None else self.left_audio_s / rate

    def _rate(self, gained_s: float) -> float | None:
        worked_s = 0.0 if self._work_began is None else self._clock() - self._work_began
        return gained_s / worked_s if worked_s >= RATE_AFTER_S and gained_s > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON progress record; `audio_s_left` and `audio_s_total` are estimates."""
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


# Upper ends of buckets, in seconds: a local disk commits in 1 ms, a store that throttles in 100 s.
COMMIT_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SHARD_BUCKETS_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)
COMMIT_STAGE = "commit"


class Histogram:
    """Durations in buckets with these upper ends, in seconds; a last bucket has no end."""

    def __init__(self, ends_s: Sequence[float]) -> None:
        self.ends_s, self.counts, self.sum_s = tuple(ends_s), [0] * (len(ends_s) + 1), 0.0

    def add(self, seconds: float) -> None:
        seconds = max(0.0, seconds)
        self.counts[bisect_left(self.ends_s, seconds)] += 1
        self.sum_s += seconds


class RunMetrics:
    """Sums up the events of a run; `tally` and `shards` are of the whole job. A worker process
    reports its counts since it began, so the last reports of all processes are added."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self.lock = threading.Lock()
        self.tally, self._now = RunTotals(clock), now
        self.started: events.JobStarted | None = None
        self.finished: events.JobFinished | None = None
        self.rows, self.quarantined, self.attempts = (Counter[str]() for _ in range(3))
        self.retries = Counter[tuple[str, str]]()
        self.stages_s: dict[str, tuple[int, float]] = {}
        self.audio_s, self.nbytes = 0.0, 0
        self.last_commit_s: float | None = None
        self.pool = events.PoolState({}, {})
        self.commits, self.shard_times = Histogram(COMMIT_BUCKETS_S), Histogram(SHARD_BUCKETS_S)
        self._of_workers: dict[tuple[int, int], events.WorkerSays] = {}
        self._shards_done = Counter[str]()
        self._here = counts.snapshot()
        self._driver_before_s = time.process_time()

    def cpu_s(self) -> dict[str, float]:
        found = Counter[str]()
        for said in self._of_workers.values():
            found.update(said.cpu_s)
        return {**found, DRIVER: time.process_time() - self._driver_before_s}

    def counted(self) -> Counts:
        retries, samples, padding, waiting = Counter[tuple[str, str]](self.retries), 0, 0, 0
        living = {slot: generation for slot, generation in sorted(self._of_workers)}
        for (slot, generation), said in self._of_workers.items():
            retries.update(said.counts.retries)
            samples, padding = samples + said.counts.samples, padding + said.counts.padding
            waiting += said.counts.queue_bytes if living[slot] == generation else 0
        here = Counter[tuple[str, str]](counts.snapshot().retries)
        here.subtract(self._here.retries)
        retries.update(here)
        return Counts({key: n for key, n in retries.items() if n}, samples, padding, waiting)

    def shards(self) -> dict[str, int]:
        """Return state to shards of the whole job; `done` includes earlier runs."""
        started = self.started
        if started is None:
            return {}
        found = {"done": started.shards_done + self._shards_done["done"]}
        found["failed"] = self._shards_done["failed"]
        for name in ("waiting", "suspect", "searched", "in_flight"):
            found[name] = self.pool.shards.get(name, 0)
        return {"pending": max(0, started.shards_total - sum(found.values())), **found}

    def __call__(self, event: events.Event) -> None:
        with self.lock:
            self.tally.take(event)
            self._take(event)

    def _take(self, event: events.Event) -> None:
        match event:
            case events.JobStarted():
                self.started = event
            case events.JobFinished():
                self.finished = event
                self.pool = events.PoolState({}, {})
            case events.PoolState():
                self.pool = event
            case events.WorkerSays():
                key = (event.worker, event.generation)
                before = self._of_workers.get(key, event)
                # Answers of a process may overtake each other; the later one has the larger sum.
                if sum(event.cpu_s.values()) >= sum(before.cpu_s.values()):
                    self._of_workers[key] = event
            case events.ShardDone():
                self._shards_done["done"] += 1
                self.rows["ok"] += event.rows_ok
                self.rows["quarantined"] += event.rows_bad
                self.quarantined.update(event.bad_by_class)
                self.audio_s += event.audio_s
                self.nbytes += event.nbytes
                self.last_commit_s = self._now()
            case events.ShardFailed():
                self._shards_done["failed"] += 1
            case events.ShardRetry() | events.ShardWaits():
                self.retries["shard", event.cause or "other"] += 1
            case events.WorkerLost():
                self.retries["worker", "lost"] += 1
            case events.ShardAttempt():
                self._attempt(event)

    def _attempt(self, event: events.ShardAttempt) -> None:
        notes = event.notes
        won = notes is not None and notes.won
        self.attempts["failed" if event.error else "done" if won else "lost_race"] += 1
        if event.error or notes is None:
            return
        for stage, (began_s, ended_s) in notes.stages.items():
            times, total_s = self.stages_s.get(stage, (0, 0.0))
            self.stages_s[stage] = (times + 1, total_s + max(0.0, ended_s - began_s))
        if notes.won and COMMIT_STAGE in notes.stages:
            began_s, ended_s = notes.stages[COMMIT_STAGE]
            self.commits.add(ended_s - began_s)
            first_s = min(began for began, _ in notes.stages.values())
            self.shard_times.add(ended_s - first_s)
