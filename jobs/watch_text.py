"""One look at a job in words, for terminals and pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from earmill.pipeline.common.text import LEAST, audio, bytes_text, duration, figure, quantity

if TYPE_CHECKING:
    from earmill.pipeline.dataset.watch import JobProgress


def line(found: JobProgress) -> str:
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


def remarks(found: JobProgress) -> list[str]:
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
