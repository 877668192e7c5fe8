"""`earmill watch`: show the progress of a job from its plan and commits, until it is finished. It
asks no driver and writes nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from earmill.jobs.commands import options
from earmill.jobs.console import process
from earmill.jobs.console.job_texts import progress_line, progress_remarks
from earmill.jobs.console.terminal import console, say, say_json
from earmill.pipeline.common.errors import EarmillError, OutputError
from earmill.pipeline.common.retries import patient
from earmill.pipeline.storage.retrying import store_errors

if TYPE_CHECKING:
    from rich.live import Live

    from earmill.jobs.report.live import LivePage
    from earmill.pipeline.dataset.watch import JobProgress, JobWatch
    from earmill.pipeline.storage.layout import Layout

# Largest share of the time that is spent on a look; listing many commits takes seconds.
LOOKING = 0.1
SAME_LINE_EVERY_S = 60.0  # Seconds between equal lines if standard output is no terminal.
BAR_WIDTH = 24
Looks = Iterator[tuple["JobProgress", str]]  # Progress, and the error of a failed look.
Show = Callable[["JobProgress"], None]


def watch(
    uri: options.DatasetUri,
    once: Annotated[bool, typer.Option("--once", help="Show the progress once and end.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for a job to begin if there is none yet.")
    ] = False,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="Seconds between looks, at least.")
    ] = 5.0,
    page: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Also serve a page with the progress, on 127.0.0.1 or at HOST, until Ctrl-C; 0 is "
            "a free port.",
        ),
    ] = None,
    as_json: options.AsJson = False,
    storage_options: options.StorageOptions = None,
) -> None:
    """Show the progress of a job from its commits, until it is finished.

    Exit codes: 0 finished, or any state with --once; 2 no job there.
    """
    from earmill.pipeline.dataset.watch import JobWatch
    from earmill.pipeline.storage.layout import Layout

    if page is not None and once:
        raise typer.BadParameter("--page goes on until Ctrl-C: leave --once out")
    layout = Layout.open(uri, storage_options)
    job = JobWatch(layout)
    looks = _looks(layout, job, once=once, wait=wait, every=every, goes_on=page is not None)
    with ExitStack() as inside:
        inside.enter_context(patient())
        show: Show = _Lines(as_json)
        if not as_json and sys.stdout.isatty():
            from rich.live import Live

            live = inside.enter_context(Live(console=console(), auto_refresh=False))
            show = partial(_draw, live)
        if page is not None:
            from earmill.jobs.report.live import LivePage

            _serve(LivePage(layout, job, every), looks, show, page)
            return
        for progress, _ in looks:
            show(progress)
            if once or progress.state == "finished":
                return


def _serve(page: LivePage, looks: Looks, show: Show, place: str) -> None:
    """Also serve the page until Ctrl-C. A failed look is shown, and the next look follows."""
    from earmill.jobs.report.server import PageServer, parse_place

    try:
        where = parse_place(place)
    except ValueError as error:
        raise typer.BadParameter(f"--page: {error}") from error
    with PageServer(where, page.waiting()) as server:
        try:
            say(f"{server.url} shows it; Ctrl-C ends it", file=sys.stderr)
            if not server.is_private:
                warning = "anybody who reaches this address sees the page: it has no password"
                say(warning, file=sys.stderr)
            state = ""
            for progress, trouble in looks:
                server.show(page.of(progress, trouble))
                if not state == progress.state == "finished":
                    show(progress)
                state = progress.state
        except KeyboardInterrupt:
            say("the page is closed", file=sys.stderr)
            if process.exit_code() != process.INTERRUPTED:  # only Ctrl-C closes the page
                raise


def _looks(
    layout: Layout, job: JobWatch, *, once: bool, wait: bool, every: float, goes_on: bool
) -> Looks:
    """Yield the progress at every look, or the error of a look if watching `goes_on` after it."""
    # A single look reads all commit records.
    look = partial(job.look, sys.maxsize) if once else job.look
    progress, trouble = None, ""
    while True:
        began_s = time.monotonic()
        try:
            with store_errors(layout.url()):
                progress, trouble = look() or progress, ""
        except EarmillError as error:
            if progress is None or not goes_on:
                raise
            trouble = f"this look failed, the next may not: {error}"
        if progress is not None:
            yield progress, trouble
        elif not wait:
            raise OutputError(
                f"{layout.url()}: no job has begun here, found no dataset.json; give the "
                "output.uri of a job, or --wait until it has listed its source"
            )
        took_s = time.monotonic() - began_s
        # Commit records that are unread are read without a pause.
        is_behind = progress is not None and progress.unread
        time.sleep(0.0 if is_behind else max(every, took_s / LOOKING))


class _Lines:
    """One line a look if something changed; with JSON one line a look."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._shown: tuple[object, ...] = ()
        self._shown_s = 0.0

    def __call__(self, progress: JobProgress) -> None:
        if self._as_json:
            values = {"event": "watch", **asdict(progress)}
            values["audio_hours_per_s"] = progress.audio_hours_per_s
            say_json({k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()})
            return
        new = (progress.shards_done, progress.rows_bad, progress.state, progress.unread)
        due = time.monotonic() - self._shown_s >= SAME_LINE_EVERY_S
        if new != self._shown or due:
            self._shown, self._shown_s = new, time.monotonic()
            say(f"{progress.name}: {progress_line(progress)}")
            for remark in progress_remarks(progress):
                say(remark)


def _draw(live: Live, progress: JobProgress) -> None:
    """Draw a bar that stays in place, with the figures beside it."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    shown = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=1.0, completed=progress.share_done, width=BAR_WIDTH)
    shown.add_row(bar, Text(f"{progress.name}: {progress_line(progress)}"))
    for remark in progress_remarks(progress):
        shown.add_row("", Text(remark, style="yellow"))
    live.update(shown, refresh=True)
