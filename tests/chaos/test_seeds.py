"""Runs under faults that a seed draws: each ends with the undisturbed rows, values and files.

`make chaos` runs as many seeds as wanted; here are some of them, and a short one for every day.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos.conftest import Reference
from tests.chaos.many import SHARDS, disturb
from tests.chaos.schedule import draw, draw_short
from tests.chaos.world import world

pytestmark = pytest.mark.chaos

SEEDS = (2, 7, 9)


def test_a_seed_draws_the_same_schedule_again_and_others_draw_others() -> None:
    first = [draw(seed, SHARDS) for seed in range(50)]
    assert first == [draw(seed, SHARDS) for seed in range(50)]
    assert len({one.describe() for one in first}) > 45
    drawn = {fault.what for one in first for fault in one.processes}
    assert drawn == {
        f"{verb} {target}"
        for verb in ("kill", "freeze")
        for target in ("driver", "worker", "server")
    } | {"kill raylet"}
    assert any(one.disk_shards is not None for one in first)


@pytest.mark.long  # one kill and one preemption are in test_shared_output
def test_a_short_run_is_killed_twice_and_ends_as_if_undisturbed(
    tmp_path: Path, reference: Reference
) -> None:
    schedule = draw_short(3, reference.clips)
    with world(tmp_path / "world", (reference.corpus, reference.output)) as where:
        outcome = disturb(where, schedule, tmp_path / "run")
    assert outcome.problems == [] and outcome.starts == [-signal.SIGKILL]
    # Both kills, the commits that were held up, and most of what else the store did.
    assert outcome.met == outcome.drawn, schedule.describe()


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_a_disturbed_run_ends_with_the_undisturbed_result(tmp_path: Path, seed: int) -> None:
    with world(tmp_path / "world") as where:
        outcome = disturb(where, draw(seed, SHARDS), tmp_path / "run")
    assert outcome.problems == [] and outcome.met > 0
