"""The page of a watched job, made from its commits at every look."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from earmill.jobs.console.job_texts import progress_remarks
from earmill.jobs.report.corpus import MOST_EXAMPLES, quarantine, read_bad_rows
from earmill.jobs.report.page import page
from earmill.jobs.report.plots import TIMES, hours_text, percent
from earmill.jobs.report.work import stamp, work_of
from earmill.pipeline.common.errors import EarmillError
from earmill.pipeline.common.text import bytes_text, duration, figure, quantity
from earmill.pipeline.dataset.watch import JobProgress, JobWatch, ShardFacts
from earmill.pipeline.storage.layout import Layout

TABLES_AT_ONCE = 20  # Most tables of quarantined rows that one look reads.
TOLD_STEP = 10  # Steps of the share done in the text for screen readers, in percent.


class LivePage:
    """Makes the pages of one job; a page asks for the next one after `every_s` seconds."""

    def __init__(self, layout: Layout, job: JobWatch, every_s: float) -> None:
        self._layout, self._job = layout, job
        self._common = {"place": layout.url(), "every": max(1.0, every_s)}
        # Some quarantined rows of each reason; each table of a commit is read once.
        self._bad: list[dict[str, Any]] = []
        self._read: set[str] = set()

    def waiting(self) -> str:
        values = {
            "name": "waiting for a job",
            "state": "waiting",
            "looked": stamp(time.time()),
            "remarks": ["No job has begun here yet: this page shows it as soon as it has."],
            "share": 0.0,
            "told": "waiting for a job to begin",
        }
        return page("live.html", self._common | values)

    def of(self, progress: JobProgress, trouble: str = "") -> str:
        """Return the page of one look; `trouble` says why it failed, and the figures are older."""
        facts = self._job.facts
        self._read_bad_rows(facts)
        percent_done = TOLD_STEP * int(100 * progress.share_done / TOLD_STEP)
        remarks = [text for text in (trouble, *progress_remarks(progress)) if text]
        values = {
            "name": progress.name,
            "state": progress.state,
            "looked": stamp(time.time()),
            "remarks": [f"{text[:1].upper()}{text[1:]}." for text in remarks],
            "share": progress.share_done,
            "told": f"{progress.state}, {percent_done} % done",
            "figures": _figures(progress),
            "work": work_of(list(facts.values())),
            "quarantine": quarantine(progress.bad_by_class, self._bad),
        }
        return page("live.html", self._common | values)

    def _read_bad_rows(self, facts: Mapping[str, ShardFacts]) -> None:
        """Read new tables with rows of a reason that has few examples yet."""
        kept = Counter(row["error_class"] for row in self._bad)
        wanted = [
            (shard, one.quarantine)
            for shard, one in facts.items()
            if one.quarantine is not None
            and one.quarantine not in self._read
            and any(kept[reason] < MOST_EXAMPLES for reason in one.bad_by_class)
        ]
        for shard, path in wanted[:TABLES_AT_ONCE]:
            self._read.add(path)
            with suppress(EarmillError, OSError, ValueError):  # `earmill verify` reports it
                for row in read_bad_rows(self._layout, shard, path):
                    if kept[row["error_class"]] < MOST_EXAMPLES:
                        kept[row["error_class"]] += 1
                        self._bad.append(row)


def _figures(progress: JobProgress) -> list[tuple[str, str, str]]:
    done, bad = progress.rows_ok + progress.rows_bad, progress.rows_bad
    audio_total = f"of about {hours_text(progress.audio_s_total)}"
    speed, speed_note = "unknown", "of real time"
    if progress.times_real_time:
        speed = f"{figure(progress.times_real_time)} {TIMES}"
    if progress.rows_per_s:
        workers = quantity(progress.workers, "worker")
        speed_note = f"{figure(progress.rows_per_s)} rows/s, {workers}"
    left = "unknown" if progress.eta_s is None else duration(progress.eta_s)
    age_s = progress.last_commit_age_s
    last, ago = ("none", "") if age_s is None else (duration(age_s), "ago")
    return [
        ("rows", f"{progress.rows_done:,}", f"of {progress.rows_total:,}"),
        ("shards", f"{progress.shards_done:,}", f"of {progress.shards_total:,}"),
        ("quarantined", f"{bad:,}", percent(bad / done) if done else "none"),
        ("audio", hours_text(progress.audio_s_done), audio_total),
        ("stored", bytes_text(progress.nbytes), ""),
        ("speed", speed, speed_note),
        ("left", "none" if progress.share_done >= 1 else left, ""),
        ("last commit", last, ago),
    ]
