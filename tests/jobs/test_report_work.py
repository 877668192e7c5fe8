"""The work over time: nothing is lost between commits and figures, and pauses are no work."""

from __future__ import annotations

import numpy as np
import pytest

from earmill.jobs.report.plots import Plot
from earmill.jobs.report.work import MOST_BINS, mean_speed, work_of
from earmill.pipeline.common.monitoring import PARTS
from earmill.pipeline.dataset.watch import ShardFacts

NOON_S = 1_777_636_800.0


def shard(at_s: float, *, audio_s: float = 60.0, took_s: float = 10.0, pid: int = 1) -> ShardFacts:
    """Committed so long after noon."""
    cpu_s = tuple({"model": 6.0, "decode": 2.0}.get(part, 0.0) for part in PARTS)
    return ShardFacts(
        created_s=NOON_S + at_s,
        rows_ok=5,
        rows_bad=1,
        audio_s=audio_s,
        nbytes=1000,
        took_s=took_s,
        worker=("node", pid),
        device="cpu: test",
        cpu_s=cpu_s,
        bad_by_class={"truncated": 1},
        quarantine=None,
    )


def area(plot: Plot | None, length_s: float) -> float:
    """Of all columns: their height in the axis' unit times their width in seconds."""
    assert plot is not None
    top = plot.y_ticks[-1]
    unit = float(top.text) / top.at
    return sum(box.height * unit * box.width / 100 * length_s for box in plot.boxes)


@pytest.mark.parametrize("took_s", [0.0, 3.0, 10.0, 500.0])
def test_the_columns_hold_all_audio_and_all_cpu_time(took_s: float) -> None:
    facts = [shard(7.0 * k, took_s=took_s) for k in range(40)]
    length_s = 7.0 * 39 + took_s
    work = work_of(facts)
    assert area(work["throughput"], length_s) == pytest.approx(40 * 60.0)
    assert area(work["cpu"], length_s) == pytest.approx(40 * 8.0)
    assert mean_speed(facts) == pytest.approx(40 * 60.0 / length_s)
    assert work["throughput"] is not None and len(work["throughput"].boxes) <= MOST_BINS + 1


def test_work_is_drawn_where_it_was_done() -> None:
    work = work_of([shard(10.0, audio_s=100.0), shard(20.0, audio_s=300.0)])
    assert work["throughput"] is not None
    heights = [box.height for box in work["throughput"].boxes]
    assert np.allclose(heights[: len(heights) // 2], 100 / 3)
    assert np.allclose(heights[len(heights) // 2 :], 100)


def test_a_day_without_work_is_a_mark_and_no_work() -> None:
    facts = [shard(10.0), shard(20.0), shard(90_000.0), shard(90_010.0)]
    work = work_of(facts)
    assert mean_speed(facts) == pytest.approx(4 * 60.0 / 40.0)
    assert work["throughput"] is not None
    (mark,) = work["throughput"].marks
    assert mark.at == pytest.approx(50.0) and mark.text == "pause of 25 h"
    assert "without one pause of more than 60 min" in work["time_note"]


def test_parts_and_workers_add_up() -> None:
    work = work_of([shard(10.0), shard(20.0, pid=2), shard(30.0, pid=2)])
    parts = {part["part"]: part for part in work["parts"]}
    assert parts["model"]["seconds"] == "18.0" and parts["model"]["share"] == "75.0 %"
    assert parts["model"]["per_audio"] == "100" and parts["decode"]["share"] == "25.0 %"
    assert [(line["name"], line["shards"], line["rows"]) for line in work["workers"]] == [
        ("node, process 2", 2, 12),
        ("node, process 1", 1, 6),
    ]
    assert work["workers"][0]["speed"] == "6"  # 120 s of audio in 20 s


def test_nothing_committed_is_no_work() -> None:
    work = work_of([])
    assert work["throughput"] is None and work["cpu"] is None and not work["workers"]
    alone = work_of([shard(10.0, took_s=0.0)])
    assert alone["throughput"] is None and len(alone["workers"]) == 1


def test_times_out_of_all_bounds_are_drawn() -> None:
    odd = [shard(-NOON_S - 6e10), shard(1e13), shard(10.0, took_s=-5.0)]
    work = work_of(odd)
    assert work["throughput"] is not None and "unknown" in work["time_note"]
