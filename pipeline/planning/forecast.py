"""From rows that were tried to the whole plan: time, CPU hours, bytes, each with a range.

    cost of a stratum       = planned seconds * (sum of its groups' cost / sum of their seconds)
    cost of the job         = sum over strata + cost of an empty shard * shards
    a copy of an equal row  = what its stratum takes to encode, check, hash and commit
    a shard on a worker     = the largest of: its CPU time over the worker's cores; what is done by
                              one thread, writing or streaming a long row; what fetching takes
    time                    = start + the busiest worker's shards + writing of the last one
                              + copies, by two threads + end

A range is the expected value, less and plus what the groups of rows differ by; that of times is a
tenth wide at least, as two runs of one job on one machine differ.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from earmill.pipeline.common.cpu_time import in_order
from earmill.pipeline.planning.strata import Strata

# Of the cores of a worker that has work, what its driver, Ray and waiting leave.
BUSY = 0.95
# CPU time of driver and Ray, over the workers'.
OTHERS_CPU = 0.02
# From the last commit on: index, cards, workers and Ray end; and for each shard.
END_S, END_PER_SHARD_S = 0.7, 0.003
# Two runs of one job differ by so much; the width of a stratum of which one group was tried.
RUNS_DIFFER, UNKNOWN_SPREAD = 0.1, 0.15
BYTES_DIFFER = 0.005
# A worker's shards that are under way at a time; threads that copy rows of equal files.
SHARDS, COPIERS = 2, 2


@dataclass(frozen=True)
class Range:
    """A figure that is not known: what is expected, and between what it is likely to be."""

    low: float
    expected: float
    high: float

    def times(self, factor: float) -> Range:
        """The same in another unit."""
        return Range(self.low * factor, self.expected * factor, self.high * factor)

    def plus(self, exact: float) -> Range:
        """With something added that is known."""
        return Range(self.low + exact, self.expected + exact, self.high + exact)

    def at_least(self, share: float) -> Range:
        """No narrower than this share of the expected on each side."""
        wide = share * self.expected
        return Range(
            max(0.0, min(self.low, self.expected - wide)),
            self.expected,
            max(self.high, self.expected + wide),
        )


@dataclass(frozen=True)
class Group:
    """Rows of one stratum that were tried together.

    Args:
        stratum: Its name. rows: Tried. bad: Of them in quarantine, by reason.
        planned_s: Audio that the plan expects in what was tried. audio_s: That came out.
        cpu_s: CPU seconds by part, see `common.cpu_time`.
        publish_cpu_s: Of them those of encoding, checking, hashing and committing.
        process_s, publish_s, fetch_s: Wall seconds; the last are among the first.
        nbytes: Stored. kinds: Container, rate, channels of its rows, in words.
    """

    stratum: str
    rows: int
    bad: dict[str, int]
    planned_s: float
    audio_s: float
    cpu_s: dict[str, float]
    publish_cpu_s: float
    process_s: float
    publish_s: float
    fetch_s: float
    nbytes: int
    kinds: tuple[str, ...] = ()

    @property
    def all_cpu_s(self) -> float:
        """CPU seconds of all parts."""
        return sum(self.cpu_s.values())


@dataclass(frozen=True)
class EmptyShard:
    """What a shard costs that holds next to nothing: stored bytes, CPU seconds by part, and wall
    seconds.

    Args:
        quarantine: Bytes that its first bad row adds. only_bad: Bytes where it has no other rows.
    """

    nbytes: float
    by_part: dict[str, float]
    wall_s: float
    quarantine: float = 0.0
    only_bad: float = 0.0

    def left_of(self, group: Group) -> float:
        """Stored bytes of a group beyond those that every shard has."""
        if not group.audio_s:
            return group.nbytes - self.only_bad
        return group.nbytes - self.nbytes - (self.quarantine if group.bad else 0.0)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of all parts."""
        return sum(self.by_part.values())


@dataclass(frozen=True)
class Sampled:
    """What was tried.

    Args:
        groups: In the order in which they were. empty: A shard of nothing.
        seed: Drew the rows. took_s: Wall seconds.
        threads: Of a worker, with which it was tried. device: cpu or the GPU's backend.
        first_s, warm_s: Until the models were checked the first time in this process, and until
            they were warm after that; the former is None where something had been imported before.
    """

    groups: tuple[Group, ...]
    empty: EmptyShard
    seed: int
    took_s: float
    threads: int
    device: str
    first_s: float | None
    warm_s: float

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)

    @property
    def bad(self) -> dict[str, int]:
        """Rows that failed, by reason, the most frequent first."""
        found: dict[str, int] = {}
        for group in self.groups:
            for reason, count in group.bad.items():
                found[reason] = found.get(reason, 0) + count
        return dict(sorted(found.items(), key=lambda entry: -entry[1]))


@dataclass(frozen=True)
class Crew:
    """Who works.

    Args:
        workers: Processes. threads: Of each. cores: Of the machine that they share.
    """

    workers: int
    threads: int
    cores: int

    @property
    def cores_each(self) -> float:
        """Cores that a worker has."""
        return min(self.threads, self.cores / self.workers)


@dataclass(frozen=True)
class Forecast:
    """What the whole plan is expected to take.

    Args:
        work_s: Wall seconds from the first warm worker to the end. cpu_s: CPU seconds.
        stored_bytes: Of all files that commits name. bad_share: Of rows, in quarantine.
        parts: Expected CPU seconds of the workers by part.
        bound_by: What most of the time is spent on: cores, fetching, writing, or long rows.
    """

    work_s: Range
    cpu_s: Range
    stored_bytes: Range
    bad_share: Range
    parts: dict[str, float] = field(default_factory=dict)
    bound_by: str = "cores"


def forecast(strata: Strata, sampled: Sampled, crew: Crew) -> Forecast:
    """Reckon with the plan what was seen of the sample.

    Raises:
        ValueError: No group has any audio.
    """
    tried = _Tried(strata, sampled)
    shards, empty = strata.shards, sampled.empty
    computed = tried.total(lambda g: g.all_cpu_s - empty.cpu_s)
    copied = tried.total(lambda g: g.publish_cpu_s - empty.cpu_s, tried.copied)
    cpu = computed.plus(copied.expected + shards * empty.cpu_s).at_least(RUNS_DIFFER)
    bad_share = _bad_share(strata, sampled)
    beside = empty.quarantine * shards_with_bad(strata, bad_share.expected)
    stored = tried.total(empty.left_of, tried.all).plus(shards * empty.nbytes + beside)
    work_s, bound_by = _work(strata, sampled, crew, tried)
    work_s += _copying_s(strata, sampled, crew, tried)
    relative = work_s / cpu.expected if cpu.expected else 0.0
    return Forecast(
        work_s=cpu.times(relative),
        cpu_s=cpu.times(1 + OTHERS_CPU),
        stored_bytes=stored.at_least(BYTES_DIFFER),
        bad_share=bad_share,
        parts={
            part: tried.total(partial(_of_part, part, empty)).expected + len(strata.by_shard) * each
            for part, each in in_order(_parts(sampled)).items()
        },
        bound_by=bound_by,
    )


class _Tried:
    """Groups by stratum; what was not reached takes after the rest."""

    def __init__(self, strata: Strata, sampled: Sampled) -> None:
        self.computed = {stratum.name: stratum.seconds for stratum in strata.all}
        self.copied: dict[str, float] = {}
        for seconds_of in strata.copies:
            _add(self.copied, seconds_of)
        self.all = dict(self.computed)
        _add(self.all, self.copied)
        drawn = {stratum.name: len(stratum.drawn) for stratum in strata.all}
        rows = {stratum.name: stratum.rows for stratum in strata.all}
        self._groups: dict[str, list[Group]] = {name: [] for name in self.computed}
        for group in sampled.groups:
            self._groups[group.stratum].append(group)
        self._all = [group for group in sampled.groups if group.planned_s > 0]
        if not any(group.audio_s for group in self._all):
            raise ValueError("expected audio in the rows that were tried, got none")
        self._left = {
            name: max(0.0, 1 - sum(g.rows for g in self._groups[name]) / rows[name])
            for name in drawn
        }

    def rate(self, name: str, cost: Callable[[Group], float]) -> float:
        """Cost of a planned second of a stratum."""
        some = self._of(name)
        return sum(map(cost, some)) / sum(group.planned_s for group in some)

    def total(
        self, cost: Callable[[Group], float], seconds: Mapping[str, float] | None = None
    ) -> Range:
        """Cost of planned seconds by stratum, those that are computed if not said, empty shards
        aside."""
        expected = variance = 0.0
        degrees = 0
        for name, planned_s in (self.computed if seconds is None else seconds).items():
            some, rate = self._of(name), self.rate(name, cost)
            tried_s = sum(group.planned_s for group in some)
            expected += rate * planned_s
            if len(some) > 1:
                squares = sum((cost(g) - rate * g.planned_s) ** 2 for g in some)
                spread = math.sqrt(squares * len(some) / (len(some) - 1)) / tried_s
                degrees += len(some) - 1
            else:
                spread = UNKNOWN_SPREAD * abs(rate)
            variance += (spread * planned_s) ** 2 * self._left.get(name, 1.0)
        # Student's t at 95 %, near enough.
        wide = (2 + 4 / max(1, degrees)) * math.sqrt(variance)
        return Range(max(0.0, expected - wide), expected, expected + wide)

    def _of(self, name: str) -> Sequence[Group]:
        # A copy may have an extension that no computed row has.
        some = self._groups.get(name, [])
        return [group for group in some if group.planned_s > 0] or self._all


def _work(strata: Strata, sampled: Sampled, crew: Crew, tried: _Tried) -> tuple[float, str]:
    """Wall seconds of the work, and what they are spent on."""
    cores = crew.cores_each * BUSY
    long = {stratum.name for stratum in strata.all if stratum.is_long}
    empty = sampled.empty
    bounds: dict[str, Callable[[Group], float]] = {
        "cores": lambda g: (g.all_cpu_s - empty.cpu_s) / cores,
        # Two shards are under way: while one is written the other is processed.
        "writing": lambda g: (g.process_s + g.publish_s - empty.wall_s) / SHARDS,
        "fetching": lambda g: g.fetch_s / SHARDS,
        "long rows": lambda g: g.process_s if g.stratum in long else 0.0,
    }
    rates, spent = {}, dict.fromkeys(bounds, 0.0)
    for stratum in strata.all:
        of_bounds = {what: tried.rate(stratum.name, cost) for what, cost in bounds.items()}
        largest = max(of_bounds, key=lambda what: of_bounds[what])
        rates[stratum.name] = of_bounds[largest]
        spent[largest] += of_bounds[largest] * stratum.seconds
    of_empty = max(empty.cpu_s / cores, empty.wall_s / SHARDS)
    free_at = [0.0] * crew.workers
    for seconds_of in strata.by_shard:
        step = of_empty + sum(rates[name] * s for name, s in seconds_of.items())
        heapq.heappush(free_at, heapq.heappop(free_at) + step)
    shards = len(strata.by_shard)
    # Nothing is computed beside the last shard's writing, which few threads do.
    alone = tried.total(
        lambda g: (g.publish_s - empty.wall_s) - (g.publish_cpu_s - empty.cpu_s) / cores
    )
    last_s = max(0.0, alone.expected / shards + empty.wall_s - empty.cpu_s / cores)
    return max(free_at) + last_s, max(spent, key=lambda what: spent[what])


def _copying_s(strata: Strata, sampled: Sampled, crew: Crew, tried: _Tried) -> float:
    """Wall seconds in which the driver publishes copies, once all else is committed."""
    shards, empty = len(strata.copies), sampled.empty
    writing = tried.total(lambda g: g.publish_s - empty.wall_s, tried.copied).expected
    cpu = tried.total(lambda g: g.publish_cpu_s - empty.cpu_s, tried.copied).expected
    by_threads = (writing + shards * empty.wall_s) / COPIERS
    return max(by_threads, (cpu + shards * empty.cpu_s) / (crew.cores * BUSY))


def shards_with_bad(strata: Strata, share: float) -> float:
    """Shards with a bad row, were this share of all rows bad, one as likely as another."""
    shards = strata.shards
    per_shard = strata.rows / len(strata.by_shard)
    return float(shards * (1 - (1 - min(1.0, share)) ** per_shard))


def _bad_share(strata: Strata, sampled: Sampled) -> Range:
    """Rows that will be in quarantine, as a share of all; Wilson's interval of the sample."""
    rows = strata.rows
    share = 0.0
    for stratum in strata.all:
        some = [group for group in sampled.groups if group.stratum == stratum.name]
        n = sum(group.rows for group in some)
        if n:
            share += sum(sum(g.bad.values()) for g in some) / n * stratum.rows / rows
    n, z2 = sampled.rows, 4.0
    if n >= rows:
        return Range(share, share, share)
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    wide = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return Range(max(0.0, min(share, middle - wide)), share, max(share, middle + wide))


def _parts(sampled: Sampled) -> dict[str, float]:
    """Every part that was seen, with what it costs in an empty shard."""
    seen = {part: 0.0 for group in sampled.groups for part in group.cpu_s}
    return {**seen, **sampled.empty.by_part}


def _add(to: dict[str, float], seconds_of: Mapping[str, float]) -> None:
    for name, seconds in seconds_of.items():
        to[name] = to.get(name, 0.0) + seconds


def _of_part(part: str, empty: EmptyShard, group: Group) -> float:
    return group.cpu_s.get(part, 0.0) - empty.by_part.get(part, 0.0)
