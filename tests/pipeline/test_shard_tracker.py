"""The driver's books under every order of accidents, simulated: nothing is lost, nothing is blamed.

A simulated worker runs what the ledger assigns, one shard beside another, and dies at random as
well as of culprits. Whatever happens each shard must end done, with exactly the culprits in
quarantine.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.dataset.commit_record import Committed
from earmill.pipeline.driver import events
from earmill.pipeline.driver.shard_ledger import Assignment, ShardLedger, ShardWork
from earmill.pipeline.worker.messages import LostCall, Outcome
from tests.pipeline.outages import Clock
from tests.pipeline.runners import shard
from tests.short import drawn

DONE = Outcome(ok=True)


def away(kind: str = "source") -> Outcome:
    return Outcome(ok=False, stage="rows", message="503", outage=kind)


class World:
    """Commits, and a worker that takes up to two assignments at a time."""

    def __init__(self, shards: int, rows: int, culprits: set[str], max_attempts: int) -> None:
        self.culprits = culprits
        self.commits: dict[str, dict[str, str]] = {}
        self.said: list[events.Event] = []
        ids = [[f"{s}-{r}" for r in range(rows)] for s in range(shards)]
        planned = [shard(f"{s:05d}", *rows) for s, rows in enumerate(ids)]
        self.clock = Clock()
        self.ledger = ShardLedger(
            planned,
            self.committed,
            max_attempts=max_attempts,
            sink=self.said.append,
            breaker=self.clock.breaker(),
        )

    def committed(self, shard_id: str) -> Committed | None:
        bad = self.commits.get(shard_id)
        if bad is None:
            return None
        return Committed(rows_ok=1, rows_bad=len(bad), nbytes=0, seconds=0.0)

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
        spared = one.work.order().culprits if one.probe is None else {}
        return any(item.row_id in self.culprits and item.row_id not in spared for item in items)

    def end(self, one: Assignment, outcome: Outcome, *, certain: bool) -> None:
        one.work.copies -= 1
        if one.probe is not None:
            self.ledger.probe_ended(one.work, outcome)
        else:
            self.ledger.shard_ended(one.work, outcome, certain=certain)

    def work(self, accident: bool, after_commit: bool, outage: str = "") -> None:
        """One round of the worker; an accident kills it, before or after it committed.

        Args:
            outage: Its kind; the worker lives, and comes to know nothing of any row.
        """
        taken = self.take()
        self.clock.sleep(1.0)
        if outage:
            for one in taken:
                lost = LostCall("killed while it waited", outage=outage)
                self.end(one, lost if accident else away(outage), certain=True)
            return
        dies = accident or any(self.kills(one) for one in taken)
        for one in taken:
            if one.probe is None and not self.kills(one) and (not dies or after_commit):
                self.commits[one.work.shard_id] = dict(one.work.culprits)
        for one in taken:
            self.end(one, LostCall("died") if dies else DONE, certain=len(taken) == 1)


class UnluckyOnce(World):
    """Dies once more by accident when every row of a shard has been blamed."""

    had_it = False

    def kills(self, one: Assignment) -> bool:
        if (
            not self.had_it
            and one.probe is None
            and len(one.work.culprits) == len(one.work.shard.items)
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


@drawn(150)
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
    culprits = data.draw(st.sets(st.sampled_from(every), max_size=3))
    world, rng = World(shards, rows, culprits, max_attempts), random.Random(seed)
    # Accidents are rare enough that no innocent row dies alone twice in a row, and outages end
    # before it is enough.
    last_accident, away_until = -9, -1.0
    for turn in range(3000):
        if world.ledger.all_settled:
            break
        accident = turn - last_accident > 8 and rng.random() < 0.1
        last_accident = turn if accident else last_accident
        if rng.random() < 0.02 and world.clock() > away_until + 120.0:
            away_until = world.clock() + rng.uniform(1.0, 80.0)
        kind = rng.choice(["source", "output", "machine"]) if world.clock() < away_until else ""
        world.work(accident, after_commit=rng.random() < 0.3, outage=kind)
    result = world.ledger.result
    assert set(result.done) == {f"{s:05d}" for s in range(shards)} and result.failed == {}
    assert result.fatal == ""
    blamed = {row for bad in world.commits.values() for row in bad}
    assert blamed == culprits
    assert {e.row_id for e in world.said if isinstance(e, events.CulpritFound)} == culprits
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
                world.commits[one.work.shard_id] = dict(one.work.culprits)
            world.end(one, LostCall("died") if dies else DONE, certain=True)
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
    world.end(one, LostCall("killed later"), certain=True)
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
            world.commits["00000"] = dict(order.culprits)
        world.end(one, LostCall("died") if dies else DONE, certain=True)
    assert last.culprits == {"0-2": "died"} and last.attempts == 2
    assert len(attempts) == 2 and all(len(attempt) == 8 for attempt in attempts)


@drawn(60)
@given(
    data=st.data(),
    shards=st.integers(1, 5),
    rows=st.integers(1, 4),
    good_rounds=st.integers(0, 6),
    kind=st.sampled_from(["source", "missing", "output", "machine"]),
)
def test_a_lasting_outage_ends_the_run_and_blames_nobody(
    data: st.DataObject, shards: int, rows: int, good_rounds: int, kind: str
) -> None:
    every = [f"{s}-{r}" for s in range(shards) for r in range(rows)]
    culprits = data.draw(st.sets(st.sampled_from(every), max_size=2))
    world = World(shards, rows, culprits, max_attempts=2)
    for _ in range(good_rounds):
        world.work(False, False)
    if world.ledger.all_settled:
        return
    blamed = len([event for event in world.said if isinstance(event, events.CulpritFound)])
    for _ in range(600):
        if world.ledger.result.fatal:
            break
        world.work(data.draw(st.booleans()), False, outage=kind)
    result = world.ledger.result
    assert "attempts in a row" in result.fatal and result.failed == {}
    assert len([event for event in world.said if isinstance(event, events.CulpritFound)]) == blamed


def test_a_shard_that_waits_lets_the_others_go_first_and_is_tried_until_it_is_done() -> None:
    world = World(4, 1, set(), max_attempts=1)
    tried: list[str] = []
    for turn in range(400):
        if world.ledger.all_settled:
            break
        world.clock.sleep(1.0)
        one = world.ledger.next(idle=True)
        if one is None:
            continue
        one.work.copies += 1
        tried.append(one.work.shard_id)
        if one.work.shard_id == "00000" and turn < 30:
            world.end(one, away(), certain=True)
        else:
            world.commits[one.work.shard_id] = {}
            world.end(one, DONE, certain=True)
    assert tried[:4] == ["00000", "00001", "00002", "00003"] and set(tried[4:]) == {"00000"}
    assert set(world.ledger.result.done) == {f"0000{s}" for s in range(4)}


def test_during_an_outage_one_shard_at_a_time_is_tried_after_growing_pauses() -> None:
    world, tries = World(6, 1, set(), max_attempts=1), []
    for _ in range(300):
        if world.ledger.result.fatal:
            break
        world.clock.sleep(1.0)
        one = world.ledger.next(idle=True)
        if one is None:
            continue
        tries.append(world.clock())
        one.work.copies += 1
        if len(tries) > 1:
            assert world.ledger.next(idle=False, busy=True) is None
        world.end(one, away(), certain=True)
    assert [after - before for before, after in pairwise(tries)] == [5.0, 10.0, 20.0, 40.0, 60.0]
    assert "the source cannot be read: 503 (6 attempts in a row over 135 s)" in (
        world.ledger.result.fatal
    )


def test_a_second_copy_that_meets_an_outage_leaves_its_shard_to_the_first() -> None:
    world = World(1, 1, set(), max_attempts=3)
    (one,) = world.take()
    one.work.copies += 1
    world.end(one, away(), certain=True)
    assert world.ledger.nothing_waits
    world.commits["00000"] = {}
    world.end(one, DONE, certain=True)
    assert list(world.ledger.result.done) == ["00000"]


def test_rows_of_whole_shards_travel_as_witnesses() -> None:
    world = World(3, 2, {"0-0"}, max_attempts=1)
    while not world.ledger.all_settled:
        world.work(False, False)
    # The shard with a row in quarantine vouches for nothing.
    rows = [item.row_id for item in world.ledger.witnesses]
    assert sorted(rows) == ["1-0", "2-0"]
    work = ShardWork(shard("00009", "a"))
    assert work.order(world.ledger.witnesses).witnesses == tuple(world.ledger.witnesses)


@pytest.mark.parametrize("permanent", [True, False])
def test_a_probe_that_cannot_write_blames_no_row(permanent: bool) -> None:
    world = World(shards=1, rows=4, culprits=set(), max_attempts=1)
    one = world.ledger.next(idle=True)
    assert one is not None
    world.ledger.shard_ended(one.work, LostCall("died"))
    full = Outcome(ok=False, stage="publish", message="no room", permanent=permanent)
    probes = 0
    while not world.ledger.all_settled:
        probe = world.ledger.next(idle=True)
        assert probe is not None and probe.probe is not None
        probes += 1
        world.ledger.probe_ended(probe.work, full)
    assert probes == (1 if permanent else 3)
    assert not one.work.culprits and "no room" in world.ledger.result.failed[one.work.shard_id]
    assert bool(world.ledger.result.fatal) == permanent
