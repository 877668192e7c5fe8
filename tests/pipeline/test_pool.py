"""Deadlines and the table of workers: a scripted Ray, no processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, WorkerCrashedError

import earmill.pipeline.driver.pool as pool_module
from earmill.pipeline.driver.deadlines import (
    BASE_S,
    HUNG_FACTOR,
    OVER_MEDIAN,
    RATES_NEEDED,
    WALL_PER_AUDIO_S,
    Deadlines,
)
from earmill.pipeline.driver.pool import DEAD, READY, WARMING, Pool, Slot
from earmill.pipeline.worker.messages import CONCURRENT_SHARDS, Lost, Outcome

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
        assert deadlines.hung_s(audio_s) == HUNG_FACTOR * limit

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
        assert (deadlines.limit_s(audio_s), deadlines.hung_s(0.0)) == (fixed_s, 2 * fixed_s)


@dataclass(eq=False)
class Ref:
    """A call that a worker was sent."""

    actor: Actor
    kind: str
    args: tuple[Any, ...]


@dataclass(eq=False)
class Actor:
    """A worker that answers when the test says so."""

    index: int

    def __getattr__(self, kind: str) -> Any:
        actor = self

        class Method:
            def remote(self, *args: Any) -> Ref:
                return Ref(actor, kind, args)

        return Method()


@dataclass
class FakeRay:
    """`ray.wait`, `get` and `kill`: answers lie ready in `answers`."""

    answers: dict[Ref, Any] = field(default_factory=dict)
    killed: list[Actor] = field(default_factory=list)

    def wait(self, refs: list[Ref], *, num_returns: int, timeout: float) -> Any:
        ready = [ref for ref in refs if ref in self.answers][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: Ref) -> Any:
        answer = self.answers[ref]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self, actor: Actor, *, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(pool_module, "ray", fake)
    return fake


def started(size: int = 1) -> tuple[Pool, list[Actor]]:
    actors: list[Actor] = []

    def spawn(index: int) -> Actor:
        actors.append(Actor(index))
        return actors[-1]

    pool = Pool(spawn, size, clock=Clock())
    pool.start()
    return pool, actors


def answers(pool: Pool, ray: FakeRay, kind: str, answer: Any) -> list[Any]:
    """What the pool makes of this answer to every call of this kind."""
    ray.answers |= {ref: answer for ref in pool._calls if ref.kind == kind}
    return [result for _, result in pool.wait(0.0)]


DONE = Outcome(ok=True)


class TestPool:
    def test_a_start_warms_every_worker_up(self, ray: FakeRay) -> None:
        pool, actors = started(3)
        assert [actor.index for actor in actors] == [0, 1, 2]
        assert [slot.state for slot in pool.slots] == [WARMING] * 3
        assert all(slot.room == 0 and not slot.idle for slot in pool.slots)
        assert answers(pool, ray, "warm_up", DONE) == [DONE] * 3
        assert list(pool.wait(0.0)) == []

    def test_at_least_one(self) -> None:
        with pytest.raises(ValueError, match="expected at least one worker, got 0"):
            Pool(Actor, 0)

    def test_room_is_what_is_not_in_flight(self, ray: FakeRay) -> None:
        pool, _ = started()
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

    def test_a_deadline_counts_from_when_a_call_became_the_oldest(self, ray: FakeRay) -> None:
        pool, _ = started()
        (slot,) = pool.slots
        first, second = (pool.submit(slot, "run", n) for n in range(2))
        before = second.head_since
        ray.answers = {first.ref: DONE}
        assert [call for call, _ in pool.wait(0.0)] == [first]
        assert slot.work == [second]
        assert second.head_since > before
        third = pool.submit(slot, "run", 2)
        began = second.head_since
        ray.answers = {third.ref: DONE}
        list(pool.wait(0.0))
        assert second.head_since == began, "a younger call that ends changes nothing"

    def test_a_restart_is_another_generation(self, ray: FakeRay) -> None:
        pool, _ = started()
        (slot,) = pool.slots
        call = pool.submit(slot, "run", 0)
        slot.state, slot.seconds_in_flight, slot.waits_for = READY, 60.0, "source"
        warming = slot.warming_since
        pool.restart(slot)
        assert slot.generation == call.generation + 1
        assert (slot.state, slot.seconds_in_flight, slot.waits_for) == (WARMING, 0.0, "")
        assert slot.warming_since > warming
        assert pool.submit(slot, "run", 1).generation == slot.generation

    def test_a_replaced_worker_takes_its_calls_with_it(self, ray: FakeRay) -> None:
        pool, actors = started(2)
        slot, other = pool.slots
        calls = [pool.submit(slot, "run", n) for n in range(2)]
        pool.submit(slot, "status")
        kept = pool.submit(other, "run", 9)
        assert pool.replace(slot) == calls
        assert ray.killed == [actors[0]]
        assert (slot.actor, slot.work, slot.asked, slot.state) == (actors[2], [], False, WARMING)
        ray.answers = {call.ref: DONE for call in (*calls, kept)}
        assert [call for call, _ in pool.wait(0.0)] == [kept], "nobody hears of the lost ones"

    def test_a_slot_replaced_while_results_are_handled(self, ray: FakeRay) -> None:
        """Both calls are ready in one round; after the first the scheduler replaces the worker."""
        pool, _ = started()
        (slot,) = pool.slots
        calls = [pool.submit(slot, "run", n) for n in range(2)]
        ray.answers = {call.ref: DONE for call in calls}
        handled = []
        for call, _ in pool.wait(0.0):
            handled.append(call)
            pool.replace(slot)
        assert handled == calls[:1]

    def test_closing_kills_each_living_worker_once(self, ray: FakeRay) -> None:
        pool, actors = started(3)
        pool.retire(pool.slots[1])
        assert pool.slots[1].state == DEAD
        pool.close()
        pool.close()
        assert sorted(actor.index for actor in ray.killed) == [0, 1, 2]
        assert len(ray.killed) == len(actors)

    @pytest.mark.parametrize(
        ("error", "expected"),
        [
            (ActorUnavailableError("gone", None), Lost("the worker process died", restarting=True)),
            (ActorDiedError(), "the worker process died: "),
            (WorkerCrashedError(), "WorkerCrashedError: "),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_a_lost_worker_is_no_exception(
        self, ray: FakeRay, error: Exception, expected: Lost | str
    ) -> None:
        pool, _ = started()
        pool.submit(pool.slots[0], "run", 0)
        (result,) = answers(pool, ray, "run", error)
        assert isinstance(result, Lost)
        if isinstance(expected, Lost):
            assert result == expected
        else:
            assert not result.restarting
            assert result.reason.startswith(expected)
            assert "\n" not in result.reason

    def test_a_call_that_never_reached_the_worker_s_guard(self, ray: FakeRay) -> None:
        """The process lives: the rows are to blame, not the worker."""
        pool, _ = started()
        pool.submit(pool.slots[0], "run", 0)
        cause = ModuleNotFoundError("No module named 'nowhere'")
        error = RayTaskError("run", "traceback\nover lines", cause)
        (result,) = answers(pool, ray, "run", error)
        assert isinstance(result, Outcome)
        assert (result.ok, result.stage) == (False, "rows")
        assert result.message == "ModuleNotFoundError: No module named 'nowhere'"


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e4)), max_size=30))
def test_audio_in_flight_is_never_negative_and_never_forgotten(
    steps: list[tuple[bool, float]],
) -> None:
    """A worker's report only raises the figure; a shard that ends lowers it by its audio."""
    slot = Slot(0)
    for ended, amount in steps:
        before = slot.seconds_in_flight
        (slot.ended if ended else slot.under_way)(amount)
        if ended:
            assert slot.seconds_in_flight == max(0.0, before - amount)
        else:
            assert slot.seconds_in_flight == max(before, amount)
