"""The last word of a run: what is done, what is not, and the exit code that says so.

0: every row of the plan is accounted for and few enough are in quarantine. 3: the same, but too
many are. 1: shards are missing, because they failed or because the run was asked to stop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from earmill.pipeline.common.text import duration, figure
from earmill.pipeline.dataset.row_index import STATUS_BAD
from earmill.pipeline.dataset.snapshot import current_index
from earmill.pipeline.driver.events import JobFinished
from earmill.pipeline.driver.shard_tracker import Committed, Result
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout

EXIT_DONE, EXIT_FAILED, EXIT_TOO_MANY_BAD = 0, 1, 3
RESUME = "run the same command with --resume to go on"


def summarise(
    result: Result,
    *,
    before: Sequence[Committed],
    shards: int,
    layout: Layout,
    max_bad_fraction: float,
    skipped: str = "",
    closed: bool = False,
) -> JobFinished:
    """The closing event.

    Args:
        result: What this run did. before: Commits of earlier runs. shards: Shards of the plan.
        layout: The output; its index tells why rows are bad, once there is one.
        max_bad_fraction: Quarantined rows allowed, as a fraction of all rows.
        skipped: What the listing left out, in words.
        closed: The run made the snapshot that counts: of copied rows alone, for one.
    """
    records = [*before, *result.done.values()]
    ok, bad = sum(r.rows_ok for r in records), sum(r.rows_bad for r in records)
    complete = len(records) == shards
    is_left = not complete and bool(result.left_to_others) and not _went_wrong(result)
    too_many = complete and bad > max_bad_fraction * (ok + bad)
    by_class = _bad_by_class(layout) if complete and bad else {}
    if complete:
        status = "done" if result.done or closed else "nothing_to_do"
        message = _complete_message(result, layout, ok, bad, by_class, closed)
        message += f"; {skipped}" if skipped else ""
        if too_many:
            message += (
                f"; {bad / (ok + bad):.1%} of the rows are in quarantine, more than "
                f"run.max_bad_fraction {max_bad_fraction:.1%} allows: see `earmill inspect` with "
                "--quarantine for why"
            )
    else:
        status = "failed" if result.fatal or result.failed else "stopped"
        status = "left" if is_left else status
        message = _incomplete_message(result, len(records), shards)
    if complete:
        exit_code = EXIT_TOO_MANY_BAD if too_many else EXIT_DONE
    else:
        exit_code = EXIT_DONE if is_left else EXIT_FAILED
    return JobFinished(
        status=status,
        exit_code=exit_code,
        message=message,
        output=layout.url(),
        shards=len(records),
        shards_failed=len(result.failed),
        rows_ok=ok,
        rows_bad=bad,
        seconds=round(result.seconds, 3),
        wall_s=round(result.worked_s, 3),
        times_real_time=round(result.seconds / result.worked_s, 2) if result.worked_s else 0.0,
        bad_by_class=by_class,
        cpu_s=dict(result.cpu_s),
    )


def _went_wrong(result: Result) -> bool:
    return bool(result.fatal or result.failed or result.stopped)


def _complete_message(
    result: Result, layout: Layout, ok: int, bad: int, by_class: dict[str, int], closed: bool
) -> str:
    reasons = ", ".join(f"{name} {count}" for name, count in by_class.items())
    rows = f"{ok:,} rows ok, {bad:,} quarantined" + (f" ({reasons})" if reasons else "")
    if not result.done and closed:
        return f"done: {rows}, no audio had to be computed -> {layout.url()}"
    if not result.done:
        return f"nothing to do, all shards are committed: {rows} -> {layout.url()}"
    # Audio that went through the models; a run that only found bad rows has no speed.
    speed = result.seconds / result.worked_s if result.worked_s else 0.0
    took = f" in {duration(result.worked_s)} ({figure(speed)} x real time)" if speed else ""
    return f"done: {rows}, {result.seconds:,.0f} s audio{took} -> {layout.url()}"


def _incomplete_message(result: Result, committed: int, shards: int) -> str:
    if result.fatal:
        why = f"failed: {result.fatal}"
    elif result.failed:
        shard_id, reason = next(iter(result.failed.items()))
        more = f" (and {len(result.failed) - 1} more)" if len(result.failed) > 1 else ""
        why = f"failed: shard {shard_id}: {reason}{more}"
    elif result.left_to_others and not result.stopped:
        return (
            f"nothing left to do here: {committed:,} of {shards:,} shards are committed, other "
            "drivers have the rest; the last one writes the index, or `earmill extract` with "
            "--finish"
        )
    else:
        why = "stopped"
    return f"{why}; {committed:,} of {shards:,} shards are committed: {RESUME}"


def _bad_by_class(layout: Layout) -> dict[str, int]:
    """Quarantined rows by reason, most frequent first, from the index that counts."""
    name = current_index(layout)
    if name is None:
        return {}
    table = read_table(layout, name, ["status", "error_class"])
    rows = zip(table["status"].to_pylist(), table["error_class"].to_pylist(), strict=True)
    return dict(Counter(reason for status, reason in rows if status == STATUS_BAD).most_common())
