"""The page of a job that is watched, made anew at every look from what its commits say."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from earmill.jobs.report.corpus import Figure
from earmill.jobs.report.page import live_page
from earmill.jobs.report.plots import TIMES, hours_text, percent
from earmill.jobs.report.quarantine import MOST_EXAMPLES, quarantine, shown_bad_row
from earmill.jobs.report.work import stamp, work_of
from earmill.jobs.watch_text import remarks
from earmill.pipeline.common.errors import EarmillError
from earmill.pipeline.common.text import bytes_text, duration, figure, quantity
from earmill.pipeline.dataset.watch import JobProgress, JobWatch, ShardFacts
from earmill.pipeline.storage.arrow_tables import read_table
from earmill.pipeline.storage.layout import Layout

# Tables of quarantined rows that one look reads.
TABLES_AT_ONCE = 20
# How coarse the share done is told to who listens to the page instead of seeing it.
TOLD_STEP = 10


class LivePage:
    """Pages of one job.

    Args:
        layout: Its output. job: That looks at it. every_s: How often the page asks for the next.
    """

    def __init__(self, layout: Layout, job: JobWatch, every_s: float) -> None:
        self._job, self._bad = job, _BadRows(layout)
        self._common = {"place": layout.url(), "every": max(1.0, every_s)}

    def waiting(self) -> str:
        """Before a job has begun."""
        return live_page(
            {
                **self._common,
                "name": "waiting for a job",
                "state": "waiting",
                "looked": stamp(time.time()),
                "remarks": ["No job has begun here yet: this page shows it as soon as it has."],
                "share": 0.0,
                "told": "waiting for a job to begin",
                "figures": [],
                "work": None,
                "quarantine": None,
            }
        )

    def of(self, found: JobProgress, trouble: str = "") -> str:
        """At one look.

        Args:
            trouble: Why this look failed; the figures are then those of the one before.
        """
        facts = self._job.facts
        self._bad.look(facts)
        told = TOLD_STEP * int(100 * found.share_done / TOLD_STEP)
        values: dict[str, Any] = {
            **self._common,
            "name": found.name,
            "state": found.state,
            "looked": stamp(time.time()),
            "remarks": [_sentence(said) for said in (trouble, *remarks(found)) if said],
            "share": found.share_done,
            "told": f"{found.state}, {told} % done",
            "figures": _figures(found),
            "work": work_of(list(facts.values())),
            "quarantine": quarantine(found.bad_by_class, self._bad.rows),
        }
        return live_page(values)


def _figures(found: JobProgress) -> list[Figure]:
    done = found.rows_ok + found.rows_bad
    speed = found.times_real_time
    rows_per_s = found.rows_per_s
    age_s = found.last_commit_age_s
    workers = quantity(found.workers, "worker")
    return [
        Figure("rows", f"{found.rows_done:,}", f"of {found.rows_total:,}"),
        Figure("shards", f"{found.shards_done:,}", f"of {found.shards_total:,}"),
        Figure(
            "quarantined",
            f"{found.rows_bad:,}",
            percent(found.rows_bad / done) if done else "none",
        ),
        Figure(
            "audio",
            hours_text(found.audio_s_done),
            f"of about {hours_text(found.audio_s_total)}",
        ),
        Figure("stored", bytes_text(found.nbytes)),
        Figure(
            "speed",
            f"{figure(speed)} {TIMES}" if speed else "unknown",
            f"{figure(rows_per_s)} rows/s, {workers}" if rows_per_s else "of real time",
        ),
        Figure("left", "none" if found.share_done >= 1 else _about(found.eta_s)),
        Figure(
            "last commit",
            "none" if age_s is None else duration(age_s),
            "" if age_s is None else "ago",
        ),
    ]


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _about(seconds: float | None) -> str:
    return "unknown" if seconds is None else duration(seconds)


class _BadRows:
    """Some quarantined rows of each reason, read once from the tables that commits name."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._read: set[str] = set()
        self._kept = Counter[str]()
        self.rows: list[dict[str, Any]] = []

    def look(self, facts: Mapping[str, ShardFacts]) -> None:
        """Read tables that are new and have rows of a reason that has few examples yet."""
        wanted = [
            (shard, one.quarantine)
            for shard, one in facts.items()
            if one.quarantine is not None
            and one.quarantine not in self._read
            and any(self._kept[reason] < MOST_EXAMPLES for reason in one.bad_by_class)
        ]
        for shard, path in wanted[:TABLES_AT_ONCE]:
            self._read.add(path)
            try:
                table = read_table(self._layout, path)
            except (EarmillError, OSError, ValueError):  # verify says more
                continue
            for row in table.to_pylist():
                if self._kept[row["error_class"]] < MOST_EXAMPLES:
                    self._kept[row["error_class"]] += 1
                    self.rows.append(shown_bad_row(row, shard))
