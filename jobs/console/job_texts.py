"""A job in words: its events, totals and cost, and one look at its progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from earmill.jobs.console.terminal import ERROR, INFO, WARNING
from earmill.pipeline.common.text import LEAST, audio, bytes_text, duration, figure, quantity
from earmill.pipeline.driver import events
from earmill.pipeline.driver.tally import Tally

if TYPE_CHECKING:
    from earmill.pipeline.dataset.watch import JobProgress

# Of a second of audio; what costs less is not told.
LEAST_MS = 0.005
# Kinds of events that are warnings in a log.
LOG_WARNINGS = frozenset(
    {
        "source_changed",
        "shard_retry",
        "shard_waits",
        "worker_lost",
        "bisect_started",
        "culprit_found",
        "row_quarantined",
        "draining",
    }
)


def totals(tally: Tally) -> str:
    """The totals in one line."""
    done_audio = audio(tally.audio_s)
    if tally.left_audio_s > 0:
        done_audio += f" of about {audio(tally.audio_s + tally.left_audio_s)}"
    parts = [f"{done_audio} audio ({100 * tally.share:.0f} %)"]
    rate, left_s = tally.times_real_time, tally.left_s
    if rate is not None:
        parts.append(f"{figure(rate)} x real time")
    parts.append(f"{tally.rows_ok:,} rows ok, {tally.rows_bad:,} quarantined")
    if left_s is not None and left_s > 0:
        parts.append(f"about {audio(tally.left_audio_s)} audio left, about {duration(left_s)}")
    return ", ".join(parts)


def short_totals(tally: Tally, width: int) -> str:
    """As much of the totals as fits beside a bar, the share done and the time left first."""
    rate, left_s = tally.times_real_time, tally.left_s
    by_importance = [f"{100 * tally.share:.0f} %"]
    if left_s is not None and left_s > 0:
        by_importance.append(f"about {duration(left_s)} left")
    if tally.rows_bad:
        by_importance.append(f"{tally.rows_bad:,} quarantined")
    if rate is not None:
        by_importance.append(f"{figure(rate)} x real time")
    by_importance += [f"{tally.rows_ok:,} rows ok", f"{audio(tally.audio_s)} audio"]
    line = by_importance[0]
    for part in by_importance[1:]:
        if len(line) + len(part) + 2 > width:
            break
        line += f", {part}"
    return line


def news(event: events.Event) -> str | None:
    """One line for an event worth telling by itself; None for the rest."""
    match event:
        case events.Step():
            return f"{event.text} ..."
        case events.Note() | events.SourceChanged():
            return event.text
        case events.JobStarted():
            done = f", {event.shards_done:,} already committed" if event.shards_done else ""
            rows, shards = quantity(event.rows_total, "row"), quantity(event.shards_total, "shard")
            about = f"about {audio(event.seconds_total)} audio"
            return f"{event.job}: {rows}, {about} in {shards}{done} -> {event.output}"
        case events.WorkersReady():
            who = "worker" if event.workers == 1 else f"first of {event.workers} workers"
            return (
                f"{who} ready after {event.start_s:.1f} s "
                f"({event.device}, {quantity(event.threads, 'thread')})"
            )
        case events.ShardRetry():
            return f"shard {event.shard_id}: attempt {event.attempt} failed: {event.reason}"
        case events.ShardWaits():
            pause = duration(event.pause_s)
            return f"shard {event.shard_id} waits: {event.reason}; next try in {pause}"
        case events.ShardFailed():
            return f"shard {event.shard_id} given up: {event.reason}"
        case events.WorkerLost():
            return f"worker {event.worker} lost: {event.reason}; starting it again"
        case events.BisectStarted():
            return f"shard {event.shard_id}: searching {quantity(event.rows, 'row')} for the cause"
        case events.CulpritFound():
            return f"shard {event.shard_id}: row {event.row_id!r} quarantined: {event.reason}"
        case events.Draining():
            return f"{event.reason}: finishing {quantity(event.in_flight, 'shard')} in flight"
        case events.JobFinished():
            return event.message
    return None


def text_of(event: events.Event) -> str:
    """Return an event for people; empty where it has only figures."""
    if (told := news(event)) is not None:
        return told
    if isinstance(event, events.ShardDone):
        return f"shard {event.shard_id} is committed"
    if isinstance(event, events.RowQuarantined):
        return f"row {event.row_id!r} quarantined: {event.error_class}: {event.message}"
    return ""


def level_of(event: events.Event) -> str:
    """Return `info`, `warning` or `error`."""
    failed = isinstance(event, events.JobFinished) and event.exit_code
    if failed or event.kind == "shard_failed":
        return ERROR
    return WARNING if event.kind in LOG_WARNINGS else INFO


def cost(event: events.Event) -> str | None:
    """What the audio of a run has cost, the dearest first; None while it is not over."""
    if not isinstance(event, events.JobFinished) or not (event.cpu_s and event.seconds):
        return None
    by_ms = sorted(((1000 * s / event.seconds, part) for part, s in event.cpu_s.items()))[::-1]
    parts = ", ".join(f"{part} {ms:.2f}" for ms, part in by_ms if ms >= LEAST_MS)
    return f"CPU milliseconds per second of audio: {parts}"


def progress_line(found: JobProgress) -> str:
    """One look in one line."""
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
        parts.append(f"{figure(found.rows_per_s)} rows/s")
    if found.times_real_time is not None:
        hours = found.audio_hours_per_s or 0.0
        speed = f"{figure(found.times_real_time)} x real time"
        parts.append(speed if hours < LEAST else f"{figure(hours)} audio hours/s ({speed})")
    if found.workers:
        parts.append(quantity(found.workers, "worker"))
    if found.last_commit_age_s is not None:
        parts.append(f"last commit {duration(found.last_commit_age_s)} ago")
    if found.eta_s is not None:
        parts.append(f"about {duration(found.eta_s)} left")
    return ", ".join(parts)


def progress_remarks(found: JobProgress) -> list[str]:
    """What a person should know of this look beside the figures."""
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
        still = "yet" if age is None else f"for {duration(age)}"
        unusual = f"after {duration(found.quiet_after_s)} that is unusual"
        told.append(
            f"nothing was committed {still}, {unusual}: "
            "look whether a driver is running; `earmill extract` with --resume goes on"
        )
    if found.unreadable:
        told.append(f"{found.unreadable:,} commit records cannot be read: run `earmill verify`")
    return told
