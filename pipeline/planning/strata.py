"""Rows to try before a job runs: drawn at random from each stratum of its plan.

A stratum is what is alike before anything was read: the file's extension, its bytes a second of
audio in powers of two, which follow coding, rate and channels, and whether it is long enough to be
streamed. One pass over the plan draws the rows, and adds up the seconds of each shard by stratum.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from earmill.pipeline.planning.plan import Plan, Shard, item_seconds
from earmill.pipeline.sources.base import Item

# Strata beyond so many, the smallest ones, are tried as one.
MOST_STRATA = 12
OTHER = "other"
# Of each stratum, so that there is a spread.
LEAST_ROWS = 4
_EXTENSION = re.compile(r"\.[0-9A-Za-z]{1,5}")


@dataclass(frozen=True)
class Stratum:
    """Rows that are alike.

    Args:
        name: Extension, bytes a second, `long` where rows are streamed.
        rows: Of the plan. seconds: Planned audio.
        drawn: Those to try, in random order.
        is_long: They are streamed one by one.
    """

    name: str
    rows: int
    seconds: float
    drawn: tuple[Item, ...]
    is_long: bool = False


@dataclass(frozen=True)
class Strata:
    """A plan by strata.

    Args:
        all: Those with the most audio first, of rows that are computed.
        by_shard: Of each shard in order, planned seconds by name of stratum.
        copies: The same of shards whose rows are copies of equal ones, which are not tried.
    """

    all: tuple[Stratum, ...]
    by_shard: tuple[dict[str, float], ...]
    copies: tuple[dict[str, float], ...] = ()

    @property
    def rows(self) -> int:
        """That are computed."""
        return sum(stratum.rows for stratum in self.all)

    @property
    def shards(self) -> int:
        """All of the plan."""
        return len(self.by_shard) + len(self.copies)


@dataclass
class _Found:
    rows: int = 0
    seconds: float = 0.0
    held: list[Item] = field(default_factory=list)
    is_long: bool = False


def draw(plan: Plan, rows: int, seed: int, *, long_s: float) -> Strata:
    """Draw rows of every stratum, in proportion to its audio.

    Args:
        rows: About how many in all; no stratum gets fewer than `LEAST_ROWS` if it has them.
        seed: The same one draws the same rows.
        long_s: Rows above this are streamed.
    """
    if rows < 1:
        raise ValueError(f"expected at least 1 row to try, got {rows}")
    rng = random.Random(seed)
    found: dict[str, _Found] = {}
    by_shard = []
    for shard in plan.computed:
        for item in shard.items:
            is_long = item_seconds(item) > long_s
            stratum = found.setdefault(_name(item, long_s), _Found(is_long=is_long))
            _hold(stratum, item, max(rows, LEAST_ROWS), rng)
        by_shard.append(_seconds_of(shard, long_s))
    kept = _merged(found)
    total_s = sum(stratum.seconds for stratum in kept.values())
    strata = []
    for name, one in sorted(kept.items(), key=lambda entry: -entry[1].seconds):
        rng.shuffle(one.held)
        share = one.seconds / total_s if total_s else 1 / len(kept)
        wanted = max(LEAST_ROWS, round(rows * share))
        strata.append(Stratum(name, one.rows, one.seconds, tuple(one.held[:wanted]), one.is_long))
    renamed = tuple(_renamed(seconds, kept) for seconds in by_shard)
    copies = tuple(_renamed(_seconds_of(shard, long_s), kept) for shard in plan.copies)
    return Strata(tuple(strata), renamed, copies)


def _name(item: Item, long_s: float) -> str:
    return stratum_name(item, is_long=item_seconds(item) > long_s)


def _seconds_of(shard: Shard, long_s: float) -> dict[str, float]:
    """Planned seconds of a shard by stratum."""
    found: dict[str, float] = {}
    for item in shard.items:
        name = _name(item, long_s)
        found[name] = found.get(name, 0.0) + item_seconds(item)
    return found


def stratum_name(item: Item, *, is_long: bool) -> str:
    """`.flac, 16-33 kB/s`: what rows that are alike have in common."""
    match = _EXTENSION.fullmatch(PurePosixPath(item.uri).suffix)
    parts = [match[0].lower() if match else "no extension"]
    seconds = item_seconds(item)
    if item.seconds and item.size and not item.estimated and item.start_s is item.end_s is None:
        power = math.floor(math.log2(item.size / seconds))
        parts.append(f"{2**power / 1000:.0f}-{2 ** (power + 1) / 1000:.0f} kB/s")
    if is_long:
        parts.append("long")
    return ", ".join(parts)


def groups(stratum: Stratum, rows_of_a_group: int) -> Iterator[Sequence[Item]]:
    """Drawn rows to be tried together, in the plan's order; long ones go alone.

    Never fewer groups than two where there are two rows: their difference is the spread.
    """
    size = 1 if stratum.is_long else min(rows_of_a_group, math.ceil(len(stratum.drawn) / 2))
    for first in range(0, len(stratum.drawn), max(1, size)):
        some = stratum.drawn[first : first + size]
        yield sorted(some, key=lambda item: (item.position, item.uri))


def _hold(stratum: _Found, item: Item, most: int, rng: random.Random) -> None:
    """Take a row into the reservoir with the chance that every row of the stratum has."""
    stratum.rows += 1
    stratum.seconds += item_seconds(item)
    if len(stratum.held) < most:
        stratum.held.append(item)
        return
    place = rng.randrange(stratum.rows)
    if place < most:
        stratum.held[place] = item


def _merged(found: dict[str, _Found]) -> dict[str, _Found]:
    """The largest strata by themselves, the others as one."""
    if len(found) <= MOST_STRATA:
        return found
    ordered = sorted(found.items(), key=lambda entry: -entry[1].seconds)
    kept = dict(ordered[: MOST_STRATA - 1])
    rest = [one for _, one in ordered[MOST_STRATA - 1 :]]
    kept[OTHER] = _Found(
        rows=sum(one.rows for one in rest),
        seconds=sum(one.seconds for one in rest),
        # As many of each as it has audio would be few of most: these are small already.
        held=[item for one in rest for item in one.held[:LEAST_ROWS]],
        is_long=any(one.is_long for one in rest),
    )
    return kept


def _renamed(seconds_of: dict[str, float], kept: dict[str, _Found]) -> dict[str, float]:
    renamed: dict[str, float] = {}
    for name, seconds in seconds_of.items():
        known = name if name in kept else OTHER
        renamed[known] = renamed.get(known, 0.0) + seconds
    return renamed
