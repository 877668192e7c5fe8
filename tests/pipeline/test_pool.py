"""Deadlines and the table of workers: scripted workers, no processes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import ray as ray_package
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, WorkerCrashedError

from earmill.pipeline.driver.executors.ray import RayWorkers
from earmill.pipeline.driver.scheduler import (
    BASE_S,
    HUNG_FACTOR,
    OVER_MEDIAN,
    RATES_NEEDED,
    WALL_PER_AUDIO_S,
    Deadlines,
)
from earmill.pipeline.driver.worker_pool import DEAD, READY, WARMING, WorkerPool, WorkerSlot
from earmill.pipeline.worker.messages import CONCURRENT_SHARDS, LostCall, Outcome
from tests.pipeline.fake_workers import Clock, FakeWorkers, Worker

seconds = st.floats(0.1, 1e5)


class TestDeadlines:
    @given(st.lists(st.tuples(seconds, seconds), min_size=RATES_NEEDED, max_size=12), seconds)
    def test_the_limit_follows_the_median_rate(
        self, shards: list[tuple[float, float]], audio_s: float
    ) -> None:
        """Half of the shards seen may be arbitrarily slow without moving it beyond the others."""
        deadlines = Deadlines()
        for wall_s, shard_s in shards:
            deadlines.learn(wall_s, shard_s)
        rates = sorted(wall_s / shard_s for wall_s, shard_s in shards)
        low, high = rates[(len(rates) - 1) // 2], rates[len(rates) // 2]
        limit = deadlines.limit_s(audio_s)
        assert BASE_S + OVER_MEDIAN * low * audio_s <= limit * (1 + 1e-12)
        assert limit <= (BASE_S + OVER_MEDIAN * high * audio_s) * (1 + 1e-12)
        assert deadlines.hung_s(audio_s, 3) == HUNG_FACTOR * limit

    @given(st.lists(st.tuples(seconds, seconds), max_size=RATES_NEEDED - 1), seconds)
    def test_two_rates_prove_nothing(
        self, shards: list[tuple[float, float]], audio_s: float
    ) -> None:
        deadlines = Deadlines()
        for wall_s, shard_s in shards:
            deadlines.learn(wall_s, shard_s)
        assert deadlines.limit_s(audio_s) == BASE_S + WALL_PER_AUDIO_S * audio_s

    def test_a_shard_without_audio_teaches_nothing(self) -> None:
        deadlines = Deadlines()
        for _ in range(5):
            deadlines.learn(100.0, 0.0)
        assert deadlines.limit_s(1.0) == BASE_S + WALL_PER_AUDIO_S

    @given(seconds, seconds, seconds)
    def test_a_fixed_limit_is_not_moved(
        self, fixed_s: float, wall_s: float, audio_s: float
    ) -> None:
        deadlines = Deadlines(fixed_s)
        for _ in range(RATES_NEEDED):
            deadlines.learn(wall_s, audio_s)
        assert (deadlines.limit_s(audio_s), deadlines.hung_s(0.0, 3)) == (fixed_s, 2 * fixed_s)

    def test_rows_have_a_limit_of_their_own_which_only_shortens(self) -> None:
        deadlines = Deadlines(fixed_s=100.0, row_s=30.0)
        assert [deadlines.hung_s(1.0, rows) for rows in (1, 4, 10)] == [30.0, 120.0, 200.0]
        assert deadlines.limit_s(1.0) == 100.0


@pytest.fixture
def workers() -> FakeWorkers:
    return FakeWorkers()


def started(workers: FakeWorkers, size: int = 1) -> tuple[WorkerPool, list[Worker]]:
    pool = WorkerPool(workers, size, clock=Clock())
    pool.start()
    return pool, workers.started


def answers(pool: WorkerPool, workers: FakeWorkers, kind: str, answer: Any) -> list[Any]:
    """What the pool makes of this answer to every call of this kind."""
    workers.answers |= {ref: answer for ref in pool._calls if ref.kind == kind}
    return [result for _, result in pool.wait(0.0)]


DONE = Outcome(ok=True)


class TestPool:
    def test_a_start_warms_every_worker_up(self, workers: FakeWorkers) -> None:
        pool, actors = started(workers, 3)
        assert [worker.index for worker in actors] == [0, 1, 2]
        assert [slot.state for slot in pool.slots] == [WARMING] * 3
        assert all(slot.room == 0 and not slot.idle for slot in pool.slots)
        assert answers(pool, workers, "warm_up", DONE) == [DONE] * 3
        assert list(pool.wait(0.0)) == []

    def test_at_least_one(self) -> None:
        with pytest.raises(ValueError, match="expected at least one worker, got 0"):
            WorkerPool(FakeWorkers(), 0)

    def test_room_is_what_is_not_in_flight(self, workers: FakeWorkers) -> None:
        pool, _ = started(workers)
        (slot,) = pool.slots
        slot.state = READY
        for sent in range(CONCURRENT_SHARDS):
            assert slot.room == CONCURRENT_SHARDS - sent
            assert slot.idle == (sent == 0)
            pool.submit(slot, "run", sent, payload=f"shard {sent}")
        assert slot.room == 0
        pool.submit(slot, "status")
        assert slot.asked
        assert len(slot.work) == CONCURRENT_SHARDS, "a question is no work"

    def test_a_deadline_counts_from_when_a_call_became_the_oldest(
        self, workers: FakeWorkers
    ) -> None:
        pool, _ = started(workers)
        (slot,) = pool.slots
        first, second = (pool.submit(slot, "run", n) for n in range(2))
        before = second.head_since
        workers.answers = {first.ref: DONE}
        assert [call for call, _ in pool.wait(0.0)] == [first]
        assert slot.work == [second]
        assert second.head_since > before
        third = pool.submit(slot, "run", 2)
        began = second.head_since
        workers.answers = {third.ref: DONE}
        list(pool.wait(0.0))
        assert second.head_since == began, "a younger call that ends changes nothing"

    def test_a_restart_is_another_generation(self, workers: FakeWorkers) -> None:
        pool, _ = started(workers)
        (slot,) = pool.slots
        call = pool.submit(slot, "run", 0)
        slot.state, slot.seconds_in_flight, slot.waits_for = READY, 60.0, "source"
        warming = slot.warming_since
        pool.restart(slot)
        assert slot.generation == call.generation + 1
        assert (slot.state, slot.seconds_in_flight, slot.waits_for) == (WARMING, 0.0, "")
        assert slot.warming_since > warming
        assert pool.submit(slot, "run", 1).generation == slot.generation

    def test_a_replaced_worker_takes_its_calls_with_it(self, workers: FakeWorkers) -> None:
        pool, actors = started(workers, 2)
        slot, other = pool.slots
        calls = [pool.submit(slot, "run", n) for n in range(2)]
        pool.submit(slot, "status")
        kept = pool.submit(other, "run", 9)
        assert pool.replace(slot) == calls
        assert workers.killed == [actors[0]]
        assert (slot.worker, slot.work, slot.asked, slot.state) == (actors[2], [], False, WARMING)
        workers.answers = {call.ref: DONE for call in (*calls, kept)}
        assert [call for call, _ in pool.wait(0.0)] == [kept], "nobody hears of the lost ones"

    def test_a_slot_replaced_while_results_are_handled(self, workers: FakeWorkers) -> None:
        """Both calls are ready in one round; after the first the scheduler replaces the worker."""
        pool, _ = started(workers)
        (slot,) = pool.slots
        calls = [pool.submit(slot, "run", n) for n in range(2)]
        workers.answers = {call.ref: DONE for call in calls}
        handled = []
        for call, _ in pool.wait(0.0):
            handled.append(call)
            pool.replace(slot)
        assert handled == calls[:1]

    def test_closing_kills_each_living_worker_once(self, workers: FakeWorkers) -> None:
        pool, actors = started(workers, 3)
        pool.retire(pool.slots[1])
        assert pool.slots[1].state == DEAD
        pool.close()
        pool.close()
        assert sorted(actor.index for actor in workers.killed) == [0, 1, 2]
        assert len(workers.killed) == len(actors)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ActorUnavailableError("gone", None), LostCall("the worker process died", restarting=True)),
        (ActorDiedError(), "the worker process died: "),
        (WorkerCrashedError(), "WorkerCrashedError: "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_lost_actor_is_no_exception(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: LostCall | str
) -> None:
    result = answer_of_ray(monkeypatch, error)
    assert isinstance(result, LostCall)
    if isinstance(expected, LostCall):
        assert result == expected
    else:
        assert not result.restarting
        assert result.message.startswith(expected)
        assert "\n" not in result.message


def test_a_call_that_never_reached_the_actor_s_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process lives: the rows are to blame, not the worker."""
    cause = ModuleNotFoundError("No module named 'nowhere'")
    result = answer_of_ray(monkeypatch, RayTaskError("run", "traceback\nover lines", cause))
    assert isinstance(result, Outcome)
    assert (result.ok, result.stage) == (False, "rows")
    assert result.message == "ModuleNotFoundError: No module named 'nowhere'"


def answer_of_ray(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Outcome:
    """What becomes of a call that Ray answers with this error."""
    monkeypatch.setattr(ray_package, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray_package, "get", mock.Mock(side_effect=error))
    ((ref, result),) = RayWorkers(mock.Mock()).ended(["ref"], 0.0)
    assert ref == "ref"
    return result


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e4)), max_size=30))
def test_audio_in_flight_is_never_negative_and_never_forgotten(
    steps: list[tuple[bool, float]],
) -> None:
    """A worker's report only raises the figure; a shard that ends lowers it by its audio."""
    slot = WorkerSlot(0)
    for ended, amount in steps:
        before = slot.seconds_in_flight
        (slot.ended if ended else slot.under_way)(amount)
        if ended:
            assert slot.seconds_in_flight == max(0.0, before - amount)
        else:
            assert slot.seconds_in_flight == max(before, amount)
