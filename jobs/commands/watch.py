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
from earmill.jobs.console import process
from earmill.jobs.console.terminal import console, say, say_json

if TYPE_CHECKING:
    from earmill.pipeline.dataset.watch import JobProgress, JobWatch
    from earmill.pipeline.storage.layout import Layout

EVERY_S = 5.0
# A listing of many commits takes seconds: no more than this part of the time goes into looking.
LOOKING = 0.1
# Lines without a terminal: unchanged ones so often.
SAME_LINE_EVERY_S = 60.0
BAR_WIDTH = 24


Page = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        help="Also serve a page that shows it, here on 127.0.0.1 or at a host; 0 is a free port. "
        "Goes on until Ctrl-C.",
    ),
]


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
    page: Page = None,
    as_json: AsJson = False,
    storage_options: StorageOptions = None,
) -> None:
    """Show how far a job is, from its commits; ends when it is finished.

    Exit codes: 0 also where it is not finished, with --once; 2 no job there.
    """
    from earmill.pipeline.dataset.watch import JobWatch
    from earmill.pipeline.storage.layout import Layout

    if page is not None and once:
        raise typer.BadParameter("--page goes on until Ctrl-C: leave --once out")
    layout = Layout.open(uri, parse_storage_options(storage_options))
    job, show = JobWatch(layout), _Lines() if as_json or not sys.stdout.isatty() else _Bar()
    show.as_json = as_json
    try:
        if page is None:
            _watch(layout, job, show, once=once, wait=wait, every=every)
        else:
            _serve(layout, job, show, page, wait=wait, every=every)
    finally:
        show.close()


def _watch(
    layout: Layout, job: JobWatch, show: _Lines, *, once: bool, wait: bool, every: float
) -> None:
    """On the terminal, until the job is finished."""
    from earmill.pipeline.dataset.watch import wait_for_job
    from earmill.pipeline.storage.store_calls import patient
    from earmill.pipeline.storage.store_errors import store_errors

    with store_errors(layout.url()), patient():
        found = wait_for_job(job, layout.url(), pause_s=every, wait=wait)
        while True:
            began_s = time.monotonic()
            while once and found.unread and (more := job.look()) is not None:
                found = more
            show(found, last=once or found.state == "finished")
            if once or found.state == "finished":
                return
            _pause(found, every, time.monotonic() - began_s)
            found = job.look() or found


def _pause(found: JobProgress, every: float, took_s: float) -> None:
    """Until the next look; none while records are left to be read."""
    time.sleep(0.0 if found.unread else max(every, took_s / LOOKING))


def _serve(
    layout: Layout, job: JobWatch, show: _Lines, place: str, *, wait: bool, every: float
) -> None:
    """On a page too, until Ctrl-C; an output that is away for a while ends nothing."""
    from earmill.jobs.report.live import LivePage
    from earmill.jobs.report.server import PageServer, parse_place
    from earmill.pipeline.common.errors import EarmillError
    from earmill.pipeline.dataset.watch import wait_for_job
    from earmill.pipeline.storage.store_calls import patient
    from earmill.pipeline.storage.store_errors import store_errors

    try:
        where = parse_place(place)
    except ValueError as error:
        raise typer.BadParameter(f"--page: {error}") from error
    pages = LivePage(layout, job, every)
    with PageServer(where, pages.waiting()) as server, patient():
        try:
            say(f"{server.url} shows it; Ctrl-C ends it", file=sys.stderr)
            if not server.is_private:
                warning = "whoever reaches this address sees the page: it has no password"
                say(warning, file=sys.stderr)
            with store_errors(layout.url()):
                found = wait_for_job(job, layout.url(), pause_s=every, wait=wait)
            trouble, told = "", ""
            while True:
                began_s = time.monotonic()
                server.show(pages.of(found, trouble))
                if not told == found.state == "finished":
                    show(found, last=found.state == "finished")
                told = found.state
                _pause(found, every, time.monotonic() - began_s)
                try:
                    with store_errors(layout.url()):
                        found, trouble = job.look() or found, ""
                except EarmillError as error:
                    trouble = f"this look failed, the next may not: {error}"
        except KeyboardInterrupt:
            say("the page is closed", file=sys.stderr)
            if process.exit_code() != process.INTERRUPTED:  # Ctrl-C is how the page is to be closed
                raise


def fields(found: JobProgress) -> dict[str, Any]:
    """One look as JSON has it."""
    values = {"event": "watch", **asdict(found), "audio_hours_per_s": found.audio_hours_per_s}
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()}


class _Lines:
    """A line a look, where something changed; JSON always."""

    as_json = False

    def __init__(self) -> None:
        self._told: tuple[object, ...] = ()
        self._told_at = 0.0

    def __call__(self, found: JobProgress, last: bool) -> None:
        from earmill.jobs.console.job_texts import progress_line, progress_remarks

        if self.as_json:
            say_json(fields(found))
            return
        new = (found.shards_done, found.rows_bad, found.state, found.unread)
        due = time.monotonic() - self._told_at >= SAME_LINE_EVERY_S
        if new != self._told or due or last:
            self._told, self._told_at = new, time.monotonic()
            say(f"{found.name}: {progress_line(found)}")
            for remark in progress_remarks(found):
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

        from earmill.jobs.console.job_texts import progress_line, progress_remarks

        shown = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=1.0, completed=found.share_done, width=BAR_WIDTH)
        shown.add_row(bar, Text(f"{found.name}: {progress_line(found)}"))
        for remark in progress_remarks(found):
            shown.add_row("", Text(remark, style="yellow"))
        self._live.update(shown, refresh=True)

    def close(self) -> None:
        self._live.stop()
