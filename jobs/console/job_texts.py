"""Text about a job: its estimate, its events, totals and cost, and its progress by commits."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from earmill.jobs.console.terminal import ERROR, INFO, WARNING, print_facts
from earmill.pipeline.common.text import LEAST, audio, bytes_text, duration, figure, quantity
from earmill.pipeline.driver import events
from earmill.pipeline.driver.run_totals import RunTotals

if TYPE_CHECKING:
    from earmill.pipeline.dataset.watch import JobProgress

LEAST_MS = 0.005  # Parts of the CPU time below this, in ms per second of audio, are left out.
# Kinds of events that are warnings in a log.
LOG_WARNINGS = (
    *("source_changed", "shard_retry", "shard_waits", "worker_lost", "bisect_started"),
    *("culprit_found", "row_quarantined", "draining"),
)


def totals(tally: RunTotals) -> str:
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


def short_totals(tally: RunTotals, width: int) -> str:
    rate, left_s = tally.times_real_time, tally.left_s
    by_importance = [f"{100 * tally.share:.0f} %"]
    if left_s is not None and left_s > 0:
        by_importance.append(f"about {duration(left_s)} left")
    if tally.rows_bad:
        by_importance.append(f"{tally.rows_bad:,} quarantined")
    if rate is not None:
        by_importance.append(f"{figure(rate)} x real time")
    by_importance += [f"{tally.rows_ok:,} rows ok", f"{audio(tally.audio_s)} audio"]
    lines = [*accumulate(by_importance, "{}, {}".format)]
    return max((line for line in lines if len(line) <= width), key=len, default=lines[0])


def news(event: events.Event) -> str | None:
    """Return one line for an event that people should see; None for other events."""
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
    """Return the text of an event; empty if the event has only figures."""
    if (line := news(event)) is not None:
        return line
    if isinstance(event, events.ShardDone):
        return f"shard {event.shard_id} is committed"
    if isinstance(event, events.RowQuarantined):
        return f"row {event.row_id!r} quarantined: {event.error_class}: {event.message}"
    return ""


def level_of(event: events.Event) -> str:
    failed = isinstance(event, events.JobFinished) and event.exit_code
    if failed or event.kind == "shard_failed":
        return ERROR
    return WARNING if event.kind in LOG_WARNINGS else INFO


def cost(event: events.Event) -> str | None:
    """Return the CPU time per second of audio by part, largest first; None before the end."""
    if not isinstance(event, events.JobFinished) or not (event.cpu_s and event.seconds):
        return None
    by_ms = sorted(((1000 * s / event.seconds, part) for part, s in event.cpu_s.items()))[::-1]
    parts = ", ".join(f"{part} {ms:.2f}" for ms, part in by_ms if ms >= LEAST_MS)
    return f"CPU milliseconds per second of audio: {parts}"


def progress_line(progress: JobProgress) -> str:
    reasons = ", ".join(f"{name} {count:,}" for name, count in progress.bad_by_class.items())
    parts = [
        f"{100 * progress.share_done:.1f} %",
        f"{progress.shards_done:,} of {progress.shards_total:,} shards",
        f"{progress.rows_done:,} of {progress.rows_total:,} rows",
        f"{progress.rows_bad:,} quarantined" + (f" ({reasons})" if reasons else ""),
        f"{audio(progress.audio_s_done)} audio",
        bytes_text(progress.nbytes),
    ]
    if progress.rows_per_s is not None:
        parts.append(f"{figure(progress.rows_per_s)} rows/s")
    if progress.times_real_time is not None:
        hours = progress.audio_hours_per_s or 0.0
        speed = f"{figure(progress.times_real_time)} x real time"
        parts.append(speed if hours < LEAST else f"{figure(hours)} audio hours/s ({speed})")
    if progress.workers:
        parts.append(quantity(progress.workers, "worker"))
    if progress.last_commit_age_s is not None:
        parts.append(f"last commit {duration(progress.last_commit_age_s)} ago")
    if progress.eta_s is not None:
        parts.append(f"about {duration(progress.eta_s)} left")
    return ", ".join(parts)


def progress_remarks(progress: JobProgress) -> list[str]:
    """Return sentences about the state of a job that its figures do not show."""
    remarks = []
    if progress.state == "finished":
        remarks.append("finished: all shards are committed and the index is written")
    elif progress.state == "closing":
        remarks.append(
            "all shards are committed, the index is not written yet; where no driver is left, "
            "`earmill extract` with --finish writes it"
        )
    elif progress.state == "quiet":
        age_s = progress.last_commit_age_s
        still = "yet" if age_s is None else f"for {duration(age_s)}"
        remarks.append(
            f"nothing was committed {still}, after {duration(progress.quiet_after_s)} that is "
            "unusual: look whether a driver is running; `earmill extract` with --resume goes on"
        )
    if progress.unreadable:
        unreadable = f"{progress.unreadable:,} commit records cannot be read"
        remarks.append(f"{unreadable}: run `earmill verify`")
    return remarks


def rounded_up(seconds: float) -> str:
    """Round a duration up to two digits: 22 s, 1.7 min, 13 min, 2.5 h."""
    units = (("s", 1.0), ("min", 60.0), ("h", 3600.0))
    unit, size = next((each for each in units if seconds / each[1] < 99), units[-1])
    n = seconds / size
    step = 0.1 if n < 10 and unit != "s" else 1.0
    return f"{max(step, math.ceil(round(n / step, 6)) * step):.3g} {unit}"


def print_estimate(result: dict[str, Any]) -> None:
    from earmill.pipeline.formats.stream_layout import layout_of

    bytes_out = ", ".join(f"{bytes_text(n)} {fmt}" for fmt, n in result["bytes_out"].items())
    rows = {
        "rows": f"{result['rows']:,}",
        "audio": f"about {audio(result['hours'] * 3600)}",
        "shards": f"{result['shards']:,}",
        "bytes in": bytes_text(result["bytes_in"]),
        "bytes out": f"{bytes_out} before compression",
        "objects": f"{result['objects']:,}",
        "output": result["output"],
    }
    if sample := result["sample"]:

        def text(name: str, unit: Callable[[float], str]) -> str:
            low, expected, high = (unit(sample[name][end]) for end in ("low", "expected", "high"))
            return expected if low == high else f"{expected} ({low} to {high})"

        workers = quantity(sample["workers"], "worker")
        bad = ", ".join(f"{count:,} {reason}" for reason, count in sample["bad"].items())
        rows |= {
            "time": f"{text('time_s', rounded_up)} here, with {workers} of "
            f"{quantity(sample['threads'], 'thread')}",
            "CPU": text("cpu_s", duration),
            "stored": text("stored_bytes", bytes_text),
            "sample": f"{quantity(sample['rows'], 'row')} in {rounded_up(sample['took_s'])}, seed "
            f"{sample['seed']}; in quarantine: {bad or 'none'}",
        }
    facts = [*rows.items(), *(("note", note) for note in result["notes"])]
    for s in result["streams"]:
        layout = layout_of(s)
        shape = f"{s['width']} {layout.columns_are} {layout.rate_text}, {s['model']}"
        facts.append((f"stream {s['name']}", shape))
    print_facts(f"plan {result['plan_id']} of {result['job']}", facts)
