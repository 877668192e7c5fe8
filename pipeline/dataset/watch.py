"""Progress of a job, from its plan and commits alone: no driver is asked, and none needs to run.

Every look lists the commits and reads the records that it has not read before. If many are new (the
first look), they are read in pieces; until then their rows are the plan's. Times are those at which
workers committed, by their own clocks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from statistics import median_low

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.monitoring import PARTS
from earmill.pipeline.dataset.commit_record import (
    BAD_BY_CLASS,
    CommitRecord,
    bad_rows,
    newest_generations,
    read_commit,
    reading_pool,
)
from earmill.pipeline.dataset.description import DatasetFile, read_dataset
from earmill.pipeline.dataset.snapshot import read_current, read_snapshot
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.storage.layout import Layout


@dataclass(frozen=True, slots=True)
class ShardFacts:
    created_s: float  # Time of the commit, seconds since 1970, by the worker's clock.
    rows_ok: int
    rows_bad: int
    audio_s: float  # Audio of good rows.
    nbytes: int
    took_s: float  # Wall time of the shard's parts.
    worker: tuple[str, int]  # Host and process id.
    device: str  # Kind and name.
    cpu_s: tuple[float, ...]  # As `monitoring.PARTS`; empty in records of earlier releases.
    bad_by_class: dict[str, int]
    quarantine: str | None  # Path of the table of quarantined rows.


def shard_facts(layout: Layout, record: CommitRecord) -> ShardFacts:
    """Return the facts of one record. Its quarantine table is read if an earlier release did not
    count reasons. A `record.info` of another form raises KeyError, TypeError, ValueError or
    AttributeError."""
    info = record.info
    worker, device = info.get("worker", {}), info.get("device", {})
    if isinstance(worker, str):
        worker = {"host": worker}
    if not isinstance(device, str):
        named = (device.get("device"), device.get("name"))
        device = ": ".join(str(text) for text in named if text)
    cpu_s = info.get("cpu_s") or {}
    reasons = info.get(BAD_BY_CLASS)
    if record.rows_bad and reasons is None:
        reasons = Counter(bad_rows(layout, record)["error_class"].to_pylist())
    return ShardFacts(
        created_s=datetime.fromisoformat(info["created"]).timestamp(),
        rows_ok=record.rows_ok,
        rows_bad=record.rows_bad,
        audio_s=record.seconds,
        nbytes=record.nbytes,
        took_s=float(sum(info.get("timings_s", {}).values())),
        worker=(str(worker.get("host")), int(worker.get("pid", 0))),
        device=device,
        cpu_s=tuple(float(cpu_s.get(part, 0.0)) for part in PARTS) if cpu_s else (),
        bad_by_class=dict(reasons or {}),
        quarantine=record.path("quarantine"),
    )


def count_reasons(facts: Iterable[ShardFacts]) -> dict[str, int]:
    found = Counter[str]()
    for one in facts:
        found.update(one.bad_by_class)
    return dict(found.most_common())


# Rates are averaged over this time, s, and over this number of commits where commits are rarer.
WINDOW_S, WINDOW_COMMITS = 300.0, 10
# A longer pause between commits is no part of the work: the job was stopped.
LONGEST_GAP_S = 3600.0
# A gap of more than this many usual gaps, and usual times of a shard, is a pause.
PAUSE_GAPS = 3.0
# A job is quiet after this time, s, this number of usual gaps and of usual shards.
QUIET_S, QUIET_GAPS, QUIET_SHARDS = 120.0, 10.0, 3.0
READ_AT_ONCE = 2000  # Records that one look reads at most.


@dataclass(frozen=True)
class JobProgress:
    name: str
    uri: str
    plan_id: str
    # running, quiet (nothing was committed for long), closing (all shards are committed, the index
    # is not written) or finished.
    state: str
    shards_done: int
    shards_total: int
    rows_done: int  # Planned rows of committed shards.
    rows_total: int
    rows_ok: int  # Rows of the records that were read; `rows_bad` too.
    rows_bad: int
    audio_s_done: float  # Audio of good rows; planned for records that are not read.
    audio_s_total: float
    nbytes: int
    share_done: float
    bad_by_class: dict[str, int] = field(default_factory=dict)
    workers: int = 0  # Processes that committed lately.
    rows_per_s: float | None = None  # Rates are of the last commits; None while unknown.
    times_real_time: float | None = None
    eta_s: float | None = None  # Seconds left; None while unknown, and while the job is quiet.
    last_commit_age_s: float | None = None
    quiet_after_s: float = QUIET_S  # The job is called quiet at this age of the last commit.
    unread: int = 0  # Commit records that are not read yet.
    unreadable: int = 0

    @property
    def audio_hours_per_s(self) -> float | None:
        return None if self.times_real_time is None else self.times_real_time / 3600


class JobWatch:
    """Repeated looks at a job; `now` returns seconds since 1970."""

    def __init__(self, layout: Layout, now: Callable[[], float] = time.time) -> None:
        self._layout, self._now = layout, now
        self._dataset: DatasetFile | None = None
        self._planned: dict[str, tuple[int, float]] = {}
        self._seen: dict[tuple[str, int], ShardFacts | None] = {}
        self._newest: dict[str, int] = {}

    def look(self, most: int = READ_AT_ONCE) -> JobProgress | None:
        """Return how far the job is, or None before it begins. Reads `most` new records at most."""
        dataset = read_dataset(self._layout)
        if dataset is None:
            return None
        if self._dataset is None or dataset.plan_id != self._dataset.plan_id:
            plan = Plan.read(self._layout, dataset.plan_id)
            self._planned = {shard.shard_id: (shard.rows, shard.seconds) for shard in plan.shards}
        self._dataset = dataset
        there = newest_generations(self._layout)
        self._newest = {shard: n for shard, n in there.items() if shard in self._planned}
        unread = [entry for entry in self._newest.items() if entry not in self._seen]
        entries = unread[::-1][:most]  # the last ones say how fast it goes now
        with reading_pool(self._layout, len(entries)) as pool:
            self._seen |= zip(entries, pool.map(self._one, entries), strict=True)
        return self._progress(dataset)

    @property
    def facts(self) -> dict[str, ShardFacts]:
        """Return the facts of the current records that were read, by shard."""
        found = ((shard, self._seen.get((shard, n))) for shard, n in self._newest.items())
        return {shard: one for shard, one in found if one is not None}

    def _one(self, entry: tuple[str, int]) -> ShardFacts | None:
        try:
            record = read_commit(self._layout, *entry)
            return None if record is None else shard_facts(self._layout, record)
        except (CommitError, KeyError, ValueError, TypeError, AttributeError):
            return None

    def _progress(self, dataset: DatasetFile) -> JobProgress:
        newest = self._newest
        records = {s: self._seen[s, n] for s, n in newest.items() if (s, n) in self._seen}
        read = [seen for seen in records.values() if seen is not None]
        planned_s = sum(seconds for _, seconds in self._planned.values())
        through_s = sum(self._planned[shard][1] for shard in newest)
        done = len(newest) == len(self._planned)
        pace = _Pace.of(read, self._now())
        created = dataset.created if dataset.change is None else dataset.change.created
        began_s = datetime.fromisoformat(created).timestamp()
        age_s = max(0.0, self._now() - (pace.last_s or began_s))
        if done:
            state = "finished" if self._is_closed(dataset) else "closing"
        else:
            state = "quiet" if age_s > pace.quiet_s else "running"
        lately = pace if state == "running" else _Pace()
        unread_s = sum(self._planned[s][1] for s in newest if s not in records)
        left_s = lately.times_real_time and (planned_s - through_s) / lately.times_real_time
        return JobProgress(
            name=dataset.name,
            uri=self._layout.url(),
            plan_id=dataset.plan_id,
            state=state,
            shards_done=len(newest),
            shards_total=len(self._planned),
            rows_done=sum(self._planned[shard][0] for shard in newest),
            rows_total=sum(rows for rows, _ in self._planned.values()),
            rows_ok=sum(seen.rows_ok for seen in read),
            rows_bad=sum(seen.rows_bad for seen in read),
            audio_s_done=sum(seen.audio_s for seen in read) + unread_s,
            audio_s_total=planned_s,
            nbytes=sum(seen.nbytes for seen in read),
            share_done=through_s / planned_s if planned_s else float(done),
            bad_by_class=count_reasons(read),
            workers=lately.workers,
            rows_per_s=lately.rows_per_s,
            times_real_time=lately.times_real_time,
            eta_s=left_s,
            last_commit_age_s=None if pace.last_s is None else age_s,
            quiet_after_s=pace.quiet_s,
            unread=len(newest) - len(records),
            unreadable=len(records) - len(read),
        )

    def _is_closed(self, dataset: DatasetFile) -> bool:
        if (current := read_current(self._layout)) is None:
            return False
        snapshot = read_snapshot(self._layout, current)
        is_of_it = snapshot.dataset.path == dataset.path
        return is_of_it and snapshot.commits.keys() == self._planned.keys()


@dataclass(frozen=True, slots=True)
class _Pace:
    """The pace of the last commits; `quiet_s` seconds without a commit are usual."""

    last_s: float | None = None
    rows_per_s: float | None = None
    times_real_time: float | None = None
    workers: int = 0
    quiet_s: float = QUIET_S

    @classmethod
    def of(cls, seen: list[ShardFacts], now_s: float) -> _Pace:
        latest: list[ShardFacts] = []
        for one in sorted(seen, key=lambda one: one.created_s, reverse=True):
            if latest and latest[-1].created_s - one.created_s > LONGEST_GAP_S:
                break
            if len(latest) > WINDOW_COMMITS and latest[0].created_s - one.created_s > WINDOW_S:
                break
            latest.append(one)
        if not latest:
            return cls()
        last_s = latest[0].created_s
        # A gap far above the usual gap and the usual time of a shard is a pause, and counts as a
        # usual gap.
        gaps = [one.created_s - before.created_s for one, before in pairwise(latest)]
        usual_s = median_low(gaps) if gaps else 0.0
        most_s = PAUSE_GAPS * max(usual_s, median_low(one.took_s for one in latest))
        worked_s = sum(gap if gap <= most_s else usual_s for gap in gaps)
        # The first commit is left out, because its work began before the window.
        counted = latest[:-1]
        gap_s = worked_s / max(1, len(counted))
        quiet_s = max(QUIET_S, QUIET_GAPS * gap_s, QUIET_SHARDS * max(one.took_s for one in latest))
        # A commit is due a gap after the last one: only from then on is time lost.
        span_s = worked_s + max(0.0, now_s - gap_s - last_s)
        if not counted or span_s <= 0:
            return cls(last_s, workers=1, quiet_s=quiet_s)
        return cls(
            last_s,
            rows_per_s=sum(one.rows_ok + one.rows_bad for one in counted) / span_s,
            times_real_time=sum(one.audio_s for one in counted) / span_s or None,
            workers=len({one.worker for one in latest}),
            quiet_s=quiet_s,
        )
