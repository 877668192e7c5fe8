"""`earmill watch`: how far a job is, from its plan and commits alone; ends when it is finished.

It asks no driver and writes nothing, so it works from any machine that can read the output, for any
number of drivers and for none: then it says how far the last one came.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from earmill.jobs.commands.options import AsJson, DatasetUri, StorageOptions, parse_storage_options
from earmill.jobs.terminal import console, say, say_json

if TYPE_CHECKING:
    from earmill.pipeline.dataset.watch import JobProgress

EVERY_S = 5.0
# A listing of many commits takes seconds: no more than this part of the time goes into looking.
LOOKING = 0.1
# Lines without a terminal: unchanged ones so often.
SAME_LINE_EVERY_S = 60.0
BAR_WIDTH = 24


def watch(
    uri: DatasetUri,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for a job to begin where there is none yet.")
    ] = False,
    every: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.1, help="How often to look, at most."),
    ] = EVERY_S,
    as_json: AsJson = False,
    storage_options: StorageOptions = None,
) -> None:
    """Show how far a job is, from its commits; ends when it is finished.

    Exit codes: 0 also where it is not finished, with --once; 2 no job there.
    """
    from earmill.pipeline.dataset.watch import JobWatch, wait_for_job
    from earmill.pipeline.storage.layout import Layout
    from earmill.pipeline.storage.store_calls import patient
    from earmill.pipeline.storage.store_errors import store_errors

    layout = Layout.open(uri, parse_storage_options(storage_options))
    job, show = JobWatch(layout), _Lines() if as_json or not sys.stdout.isatty() else _Bar()
    show.as_json = as_json
    try:
        with store_errors(layout.url()), patient():
            found = wait_for_job(job, layout.url(), pause_s=every, wait=wait)
            while True:
                began_s = time.monotonic()
                while once and found.unread and (more := job.look()) is not None:
                    found = more
                show(found, last=once or found.state == "finished")
                if once or found.state == "finished":
                    return
                took_s = time.monotonic() - began_s
                time.sleep(0.0 if found.unread else max(every, took_s / LOOKING))
                found = job.look() or found
    finally:
        show.close()


def fields(found: JobProgress) -> dict[str, Any]:
    """One look as JSON has it."""
    values = {"event": "watch", **asdict(found), "audio_hours_per_s": found.audio_hours_per_s}
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}


def line(found: JobProgress) -> str:
    """One look in one line."""
    from earmill.jobs.progress import audio, bytes_text

    reasons = ", ".join(f"{name} {count:,}" for name, count in found.bad_by_class.items())
    parts = [
        f"{100 * found.share_done:.1f} %",
        f"{found.shards_done:,} of {found.shards_total:,} shards",
        f"{found.rows_done:,} of {found.rows_total:,} rows",
        f"{found.rows_bad:,} quarantined" + (f" ({reasons})" if reasons else ""),
        f"{audio(found.audio_s_done)} audio",
        bytes_text(found.nbytes),
    ]
    if found.rows_per_s is not None:
        parts.append(f"{found.rows_per_s:.1f} rows/s")
    if found.times_real_time is not None:
        hours = found.audio_hours_per_s or 0.0
        parts.append(f"{hours:.3g} audio hours/s ({found.times_real_time:,.0f} x real time)")
    if found.workers:
        parts.append(f"{found.workers:,} worker{'' if found.workers == 1 else 's'}")
    if found.last_commit_age_s is not None:
        parts.append(f"last commit {audio(found.last_commit_age_s)} ago")
    if found.eta_s is not None:
        parts.append(f"about {audio(found.eta_s)} left")
    return ", ".join(parts)


def remarks(found: JobProgress) -> list[str]:
    """What a person should know of this look beside the figures."""
    from earmill.jobs.progress import audio

    told = []
    if found.state == "finished":
        told.append("finished: all shards are committed and the index is written")
    elif found.state == "closing":
        told.append(
            "all shards are committed, the index is not written yet; where no driver is left, "
            "`earmill extract` with --finish writes it"
        )
    elif found.state == "quiet":
        age = found.last_commit_age_s
        still = "yet" if age is None else f"for {audio(age)}"
        told.append(
            f"nothing was committed {still}, after {audio(found.quiet_after_s)} that is unusual: "
            "look whether a driver is running; `earmill extract` with --resume goes on"
        )
    if found.unreadable:
        told.append(f"{found.unreadable:,} commit records cannot be read: run `earmill verify`")
    return told


class _Lines:
    """A line a look, where something changed; JSON always."""

    as_json = False

    def __init__(self) -> None:
        self._told: tuple[object, ...] = ()
        self._told_at = 0.0

    def __call__(self, found: JobProgress, last: bool) -> None:
        if self.as_json:
            say_json(fields(found))
            return
        new = (found.shards_done, found.rows_bad, found.state, found.unread)
        due = time.monotonic() - self._told_at >= SAME_LINE_EVERY_S
        if new != self._told or due or last:
            self._told, self._told_at = new, time.monotonic()
            say(f"{found.name}: {line(found)}")
            for remark in remarks(found):
                say(remark)

    def close(self) -> None:
        """Nothing is held open."""


class _Bar(_Lines):
    """A bar that stays in place, with the figures below it."""

    def __init__(self) -> None:
        from rich.live import Live

        super().__init__()
        self._live = Live(console=console(), auto_refresh=False)
        self._live.start()

    def __call__(self, found: JobProgress, last: bool) -> None:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        shown = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=1.0, completed=found.share_done, width=BAR_WIDTH)
        shown.add_row(bar, Text(f"{found.name}: {line(found)}"))
        for remark in remarks(found):
            shown.add_row("", Text(remark, style="yellow"))
        self._live.update(shown, refresh=True)

    def close(self) -> None:
        self._live.stop()
