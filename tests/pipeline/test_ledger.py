"""The driver's books under every order of accidents, simulated: nothing is lost, nothing is blamed.

A simulated worker runs what the ledger assigns, one shard beside another, and dies at random as
well as of guilty rows. Whatever happens each shard must end done, with exactly the guilty rows in
quarantine.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import events
from pipeline.ledger import Assignment, Committed, Ledger
from pipeline.messages import Lost, Outcome
from tests.pipeline.runners import shard

DONE = Outcome(ok=True)


class World:
    """Commits, and a worker that takes up to two assignments at a time."""

    def __init__(self, shards: int, rows: int, guilty: set[str], max_attempts: int) -> None:
        self.guilty = guilty
        self.commits: dict[str, dict[str, str]] = {}
        self.said: list[events.Event] = []
        ids = [[f"{s}-{r}" for r in range(rows)] for s in range(shards)]
        planned = [shard(f"{s:05d}", *rows) for s, rows in enumerate(ids)]
        self.ledger = Ledger(
            planned, self.committed, max_attempts=max_attempts, sink=self.said.append
        )

    def committed(self, shard_id: str) -> Committed | None:
        bad = self.commits.get(shard_id)
        return None if bad is None else Committed(rows_ok=0, rows_bad=len(bad), nbytes=0)

    def take(self) -> list[Assignment]:
        """What a worker gets: one assignment, and one beside it unless either wants to be alone."""
        taken: list[Assignment] = []
        while len(taken) < 2 and not any(one.alone for one in taken):
            assignment = self.ledger.next(idle=not taken)
            if assignment is None:
                break
            assignment.work.copies += 1
            taken.append(assignment)
        return taken

    def kills(self, one: Assignment) -> bool:
        items = one.work.shard.items if one.probe is None else one.probe
        spared = one.work.order().guilty if one.probe is None else {}
        return any(item.row_id in self.guilty and item.row_id not in spared for item in items)

    def end(self, one: Assignment, outcome: Outcome | Lost, *, certain: bool) -> None:
        one.work.copies -= 1
        if one.probe is not None:
            self.ledger.probe_ended(one.work, outcome)
        else:
            self.ledger.shard_ended(one.work, outcome, certain=certain)

    def work(self, accident: bool, after_commit: bool) -> None:
        """One round of the worker; an accident kills it, before or after it committed."""
        taken = self.take()
        dies = accident or any(self.kills(one) for one in taken)
        for one in taken:
            if one.probe is None and not self.kills(one) and (not dies or after_commit):
                self.commits[one.work.shard_id] = dict(one.work.guilty)
        for one in taken:
            self.end(one, Lost("died") if dies else DONE, certain=len(taken) == 1)


class UnluckyOnce(World):
    """Dies once more by accident when every row of a shard has been blamed."""

    had_it = False

    def kills(self, one: Assignment) -> bool:
        if (
            not self.had_it
            and one.probe is None
            and len(one.work.guilty) == len(one.work.shard.items)
        ):
            self.had_it = True
            return True
        return super().kills(one)


def test_an_accident_after_every_row_was_blamed_does_not_cost_the_shard() -> None:
    world = UnluckyOnce(1, 2, {"0-0", "0-1"}, max_attempts=1)
    for _ in range(40):
        world.work(accident=False, after_commit=False)
    assert world.had_it and world.ledger.result.failed == {}
    assert set(world.commits["00000"]) == {"0-0", "0-1"}


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    shards=st.integers(1, 6),
    rows=st.integers(1, 9),
    max_attempts=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_every_shard_is_done_and_only_guilty_rows_are_blamed(
    data: st.DataObject, shards: int, rows: int, max_attempts: int, seed: int
) -> None:
    every = [f"{s}-{r}" for s in range(shards) for r in range(rows)]
    guilty = data.draw(st.sets(st.sampled_from(every), max_size=3))
    world, rng = World(shards, rows, guilty, max_attempts), random.Random(seed)
    # Accidents are rare enough that no innocent row dies alone twice in a row.
    last_accident = -9
    for turn in range(3000):
        if world.ledger.all_settled:
            break
        accident = turn - last_accident > 8 and rng.random() < 0.1
        last_accident = turn if accident else last_accident
        world.work(accident, after_commit=rng.random() < 0.3)
    result = world.ledger.result
    assert set(result.done) == {f"{s:05d}" for s in range(shards)} and result.failed == {}
    blamed = {row for bad in world.commits.values() for row in bad}
    assert blamed == guilty
    assert {e.row_id for e in world.said if isinstance(e, events.RowGuilty)} == guilty
    done = [e.shard_id for e in world.said if isinstance(e, events.ShardDone)]
    assert sorted(done) == sorted(set(done)) == sorted(result.done)


def test_suspects_and_probes_wait_for_the_good_shards() -> None:
    world = World(3, 2, {"0-0"}, max_attempts=1)
    world.work(False, False)
    # Shards 0 and 1 were on the worker when it died: 2 comes first, and they run alone after it.
    order = []
    while not world.ledger.all_settled:
        taken = world.take()
        order.append([(one.work.shard_id, one.alone, one.probe is not None) for one in taken])
        for one in taken:
            dies = world.kills(one)
            if not dies and one.probe is None:
                world.commits[one.work.shard_id] = dict(one.work.guilty)
            world.end(one, Lost("died") if dies else DONE, certain=True)
    assert order[0] == [("00002", False, False)]
    assert order[1:3] == [[("00000", True, False)], [("00001", True, False)]]
    assert all(len(taken) == 1 and taken[0][:2] == ("00000", True) for taken in order[3:])


def test_a_loss_in_company_counts_against_neither() -> None:
    world = World(2, 1, set(), max_attempts=1)
    world.work(True, False)
    assert not any(isinstance(event, events.BisectStarted) for event in world.said)
    world.work(False, False)
    world.work(False, False)
    assert set(world.ledger.result.done) == {"00000", "00001"}


def test_a_shard_put_back_is_not_charged() -> None:
    world = World(2, 1, set(), max_attempts=1)
    first, second = world.take()
    second.work.copies -= 1
    world.ledger.put_back(second.work)
    assert second.work.failures == 0
    world.commits[first.work.shard_id] = {}
    world.end(first, DONE, certain=True)
    assert world.ledger.next(idle=False) == Assignment(second.work)


def test_a_second_copy_ends_a_shard_once() -> None:
    world = World(1, 1, set(), max_attempts=3)
    (one,) = world.take()
    one.work.copies += 1
    world.commits["00000"] = {}
    world.end(one, DONE, certain=True)
    world.end(one, Lost("killed later"), certain=True)
    assert list(world.ledger.result.done) == ["00000"] and world.ledger.all_settled
    assert len([e for e in world.said if isinstance(e, events.ShardDone)]) == 1


def test_success_without_a_commit_record_is_a_failure() -> None:
    world = World(1, 1, set(), max_attempts=2)
    (one,) = world.take()
    world.end(one, DONE, certain=True)
    (retry,) = [event for event in world.said if isinstance(event, events.ShardRetry)]
    assert "commit record is missing" in retry.reason


@pytest.mark.parametrize("permanent", [True, False])
def test_failures_to_write_are_not_blamed_on_rows(permanent: bool) -> None:
    world = World(1, 3, set(), max_attempts=2)
    outcome = Outcome(ok=False, stage="publish", message="no space", permanent=permanent)
    rounds = 0
    while not world.ledger.all_settled:
        (one,) = world.take()
        world.end(one, outcome, certain=True)
        rounds += 1
    assert rounds == (1 if permanent else 2)
    assert world.ledger.result.failed == {"00000": "no space"}
    assert bool(world.ledger.result.fatal) == permanent
    assert not any(isinstance(event, events.BisectStarted) for event in world.said)


def test_attempts_and_guilty_rows_travel_with_the_order() -> None:
    world = World(1, 4, {"0-2"}, max_attempts=1)
    attempts = set()
    while not world.ledger.all_settled:
        (one,) = world.take()
        order = one.work.order()
        if one.probe is None:
            attempts.add(order.attempt)
            last = order
        dies = world.kills(one)
        if not dies and one.probe is None:
            world.commits["00000"] = dict(order.guilty)
        world.end(one, Lost("died") if dies else DONE, certain=True)
    assert last.guilty == {"0-2": "died"} and last.attempts == 2
    assert len(attempts) == 2 and all(len(attempt) == 8 for attempt in attempts)
