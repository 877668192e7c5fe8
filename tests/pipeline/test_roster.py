"""Nodes that come and go: scripted looks at a cluster, no processes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from earmill.pipeline.driver import events
from earmill.pipeline.driver.placement import Node, place_workers
from earmill.pipeline.driver.shard_ledger import Assignment, ShardLedger
from earmill.pipeline.driver.worker_pool import (
    DEAD,
    READY,
    WorkerCall,
    WorkerPlacements,
    WorkerPool,
    WorkerSlot,
)
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.spec.job import RunSpec
from tests.pipeline.fake_workers import FakeWorkers
from tests.pipeline.runners import shard


def node(name: str, cpus: int = 2, gpus: int = 0) -> Node:
    return Node(name, cpus=cpus, gpus=gpus)


class Run:
    """A pool on nodes that the test names, all of its workers warm."""

    def __init__(self, nodes: Sequence[Node], shards: int = 40, **run: object) -> None:
        spec = RunSpec.model_validate({"device": "cpu"} | run)
        self.said: list[str] = []
        self.workers = FakeWorkers()
        self.view: tuple[Node, ...] | None = None
        self.all: list[Shard] = [shard(f"{i:05d}", "ok") for i in range(shards)]
        self.ledger = ShardLedger(self.all, lambda _: None, max_attempts=3)
        places = place_workers(list(nodes), spec, at_most=shards)
        self.roster = WorkerPlacements(places, spec, self._hear)
        self.pool = WorkerPool(self.workers, len(places))
        self.pool.start()
        self.warm()

    def _hear(self, event: events.Event) -> None:
        assert isinstance(event, events.Note)
        self.said.append(event.text)

    def warm(self) -> None:
        for slot in self.pool.slots:
            if slot.state != DEAD:
                slot.state = READY

    def sees(self, *nodes: Node) -> None:
        """The cluster's next look."""
        self.view = nodes
        self.follow()

    def follow(self) -> None:
        self.roster.follow(self.pool, self.ledger, self.view)

    def send(self, slot: WorkerSlot) -> WorkerCall:
        assignment = self.ledger.next(idle=True)
        assert assignment is not None
        assignment.work.copies += 1
        return self.pool.submit(slot, "run", payload=assignment)

    @property
    def at(self) -> Counter[str]:
        """Workers by node."""
        living = [slot.index for slot in self.pool.slots if slot.state != DEAD]
        return Counter(self.roster.places[index].node_id for index in living)


A, B, C = node("a"), node("b"), node("c")


def test_machines_that_neither_come_nor_go_are_left_alone() -> None:
    run = Run([A])
    run.follow()
    assert run.at == {"a": 1} and run.said == [] and run.workers.killed == []


def test_a_node_that_joins_gets_a_worker_with_its_own_cores() -> None:
    run = Run([A])
    run.sees(A, node("b", cpus=7))
    assert run.at == {"a": 1, "b": 1}
    assert run.roster.places[1].threads == 7
    assert run.pool.slots[1].came_s > 0.0
    run.sees(A, node("b", cpus=7))
    assert run.at == {"a": 1, "b": 1}, "seen again it is no new node"
    assert run.said == ["worker 1: node b has joined: it works there"]


def test_no_more_workers_than_shards_are_left_or_the_job_asks_for() -> None:
    few = Run([A], shards=2)
    few.sees(A, B, C)
    assert few.at.total() == 2
    asked = Run([A], workers=2)
    assert asked.at == {"a": 2}
    asked.sees(A, B)
    assert asked.at == {"a": 2}
    at_the_end = Run([A], shards=2)
    for slot in at_the_end.pool.slots:
        at_the_end.send(slot), at_the_end.send(slot)
    at_the_end.sees(A, B)
    assert at_the_end.at == {"a": 1}, "all that is left is in flight"


def test_workers_of_a_node_that_is_gone_are_placed_on_the_others() -> None:
    run = Run([A, B], workers=4)
    assert run.at == {"a": 2, "b": 2}
    run.sees(A)
    assert run.at == {"a": 4}
    assert len(run.workers.killed) == 2


def test_what_a_gone_node_had_goes_back_and_is_charged_to_nobody() -> None:
    run = Run([A, B])
    gone = run.pool.slots[1]
    call = run.send(gone)
    assert isinstance(call.payload, Assignment)
    run.sees(A)
    assert gone.state == DEAD and gone.left_s < math.inf and run.workers.killed
    work = call.payload.work
    assert (work.attempts, work.failures, work.copies) == (0, 0, 0)
    again = run.ledger.next(idle=True)
    assert again is not None and again.work is work
    assert run.said == ["worker 1: node b is gone: given up"]


def test_the_last_workers_stay_although_their_node_is_gone() -> None:
    run = Run([A])
    run.sees()
    assert run.pool.slots[0].state == READY, "it waits for whatever node comes next"
    assert run.said == []
    run.sees(C)
    assert run.at == {"c": 1} and run.pool.slots[0].state == DEAD


def test_a_node_where_a_worker_was_given_up_is_not_tried_again() -> None:
    run = Run([A])
    run.sees(A, B)
    run.sees(A)
    assert run.pool.slots[1].state == DEAD
    run.sees(A, B)
    assert run.at == {"a": 1}


def test_nodes_that_cannot_hold_the_job_change_nothing() -> None:
    run = Run([node("a", gpus=1)], device="cuda")
    run.sees(node("a", gpus=1), B)
    assert run.at == {"a": 1}
    run.sees(node("a", gpus=1), B, node("c", gpus=2))
    assert run.at == {"a": 1, "c": 2}
