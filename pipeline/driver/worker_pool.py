"""Table of the driver's workers: their states, their calls in flight, their replacement. The worker
of a `WorkerSlot` may die and be replaced; the slot stays. If all nodes of the workers are gone, the
workers stay: Ray starts its actors on the next node, which an autoscaler may start."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from earmill.pipeline.common.errors import DeviceError, SpecError
from earmill.pipeline.driver import events
from earmill.pipeline.driver.executors import Workers
from earmill.pipeline.driver.placement import Node, Placement, place_workers
from earmill.pipeline.driver.shard_ledger import ShardLedger
from earmill.pipeline.spec.job import RunSpec
from earmill.pipeline.worker.messages import CONCURRENT_SHARDS, Outcome, WorkerInfo

WARMING, READY, DEAD = "warming", "ready", "dead"
WORK = ("run", "probe")


@dataclass(eq=False, slots=True)
class WorkerCall:
    kind: str  # One of warm_up, run, probe and status.
    slot: WorkerSlot
    ref: Any  # The executor's object for the call.
    payload: Any = None  # The scheduler's object for the call.
    head_since: float = 0.0  # Time when the call became the oldest of its slot.
    shared_worker: bool = False  # Lost with another call in flight, so blame is uncertain.
    generation: int = 0  # Number of the worker in the slot.


@dataclass(eq=False, slots=True)
class WorkerSlot:
    index: int
    worker: Any = None
    state: str = WARMING
    info: WorkerInfo | None = None
    work: list[WorkerCall] = field(default_factory=list)  # Runs and probes in flight, oldest first.
    warming_since: float = 0.0  # When the worker was last started.
    retry_s: float | None = None  # When to ask for warm-up again.
    seconds_in_flight: float = 0.0
    generation: int = 0  # How often a worker was started here.
    asked: bool = False  # A status call is in flight.
    failures: int = 0  # Warm-ups in a row that failed.
    failing_since: float = 0.0  # When the first of these failed.
    waits_for: str = ""  # `source` or `output` if it waited for that when last asked.
    came_s: float = 0.0  # When its cores came to the run, by the pool's clock.
    left_s: float = math.inf  # When its cores left the run.

    def under_way(self, seconds: float) -> None:
        """Note the audio that the worker has extracted in unpublished shards, in seconds. The
        worker drops a shard before the driver knows, so the number never falls until `ended`."""
        self.seconds_in_flight = max(self.seconds_in_flight, seconds)

    def ended(self, seconds: float) -> None:
        self.seconds_in_flight = max(0.0, self.seconds_in_flight - seconds)

    @property
    def takes(self) -> int:
        """Shards that the worker takes at a time, as far as it is known."""
        return CONCURRENT_SHARDS if self.info is None else self.info.shards

    @property
    def room(self) -> int:
        return self.takes - len(self.work) if self.state == READY else 0

    @property
    def idle(self) -> bool:
        return self.state == READY and not self.work


class WorkerPool:
    def __init__(
        self, workers: Workers, size: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if size < 1:
            raise ValueError(f"expected at least one worker, got {size}")
        self.workers = workers
        self.now = clock
        self._calls: dict[Any, WorkerCall] = {}
        self.slots = [WorkerSlot(index) for index in range(size)]

    def start(self) -> None:
        for slot in self.slots:
            self._start(slot)

    def submit(self, slot: WorkerSlot, kind: str, *args: Any, payload: Any = None) -> WorkerCall:
        ref = self.workers.call(slot.worker, kind, *args)
        call = WorkerCall(kind, slot, ref, payload, self.now(), generation=slot.generation)
        self._calls[ref] = call
        if kind in WORK:
            slot.work.append(call)
        elif kind == "status":
            slot.asked = True
        return call

    def wait(
        self,
        timeout_s: float,
        heads_up: Callable[[Sequence[WorkerCall]], None] = lambda calls: None,
    ) -> Iterator[tuple[WorkerCall, Outcome]]:
        """Yield calls that ended, with results; `heads_up` gets all of them before the first."""
        if not self._calls:
            time.sleep(timeout_s)
            return
        ended = list(self.workers.ended(self._calls.keys(), timeout_s))
        heads_up([self._calls[ref] for ref, _ in ended if ref in self._calls])
        for ref, result in ended:
            call = self._calls.pop(ref, None)
            if call is None:
                # The slot was replaced while an earlier result of this round was handled.
                continue
            slot = call.slot
            if call.kind == "status":
                slot.asked = False
            elif call in slot.work:
                was_head = slot.work[0] is call
                slot.work.remove(call)
                if was_head and slot.work:
                    slot.work[0].head_since = self.now()
            yield call, result

    def restart(self, slot: WorkerSlot) -> None:
        slot.state, slot.info, slot.seconds_in_flight, slot.waits_for = WARMING, None, 0.0, ""
        slot.warming_since = self.now()
        slot.generation += 1
        self.warm_up(slot)

    def warm_up(self, slot: WorkerSlot) -> None:
        slot.retry_s = None
        self.submit(slot, "warm_up")

    def replace(self, slot: WorkerSlot) -> list[WorkerCall]:
        lost = self._forget(slot)
        self.workers.kill(slot.worker)
        self._start(slot)
        return lost

    def retire(self, slot: WorkerSlot) -> list[WorkerCall]:
        lost = self._forget(slot)
        slot.state, slot.retry_s, slot.seconds_in_flight = DEAD, None, 0.0
        self.workers.kill(slot.worker)
        return lost

    def grow(self) -> WorkerSlot:
        slot = WorkerSlot(len(self.slots), came_s=self.now())
        self.slots.append(slot)
        self._start(slot)
        return slot

    def close(self) -> None:
        for slot in self.slots:
            if slot.worker is not None and slot.state != DEAD:
                self.retire(slot)

    def _start(self, slot: WorkerSlot) -> None:
        slot.worker = self.workers.start(slot.index)
        self.restart(slot)

    def _forget(self, slot: WorkerSlot) -> list[WorkerCall]:
        for ref in [ref for ref, call in self._calls.items() if call.slot is slot]:
            del self._calls[ref]
        lost, slot.work, slot.asked = slot.work, [], False
        return lost


ID_DIGITS = 8  # Digits of a node's id in messages.


class WorkerPlacements:
    """The places of a run's workers, by the index of their slots, as a cluster's nodes come and
    go."""

    def __init__(self, places: Sequence[Placement], run: RunSpec, sink: events.Sink) -> None:
        self.places = list(places)
        self._run, self._sink = run, sink
        self._last: Sequence[Node] | None = None

    def follow(self, pool: WorkerPool, ledger: ShardLedger, view: Sequence[Node] | None) -> None:
        """Start and give up workers as the cluster has changed. `view` is the last view of the
        cluster, None if no node comes or goes."""
        if view is None or view is self._last:
            return
        self._last = view
        there = {node.node_id for node in view}
        living = [slot for slot in pool.slots if slot.state != DEAD]
        lost = [slot for slot in living if self.places[slot.index].node_id not in there]
        if not ledger.nothing_waits:
            for place in self._new_places(view, len(living) - len(lost), ledger.unsettled):
                self.places.append(place)
                self._say(pool.grow(), "has joined: it works there")
        if len(lost) < sum(slot.state != DEAD for slot in pool.slots):
            for slot in lost:
                slot.left_s = pool.now()
                for call in pool.retire(slot):
                    ledger.put_back(call.payload.work)
                self._say(slot, "is gone: given up")

    def _new_places(self, view: Sequence[Node], stay: int, shards: int) -> list[Placement]:
        """Return places on nodes that have fewer workers than they would be given now."""
        room = min(shards, self._run.workers or shards) - stay
        if room <= 0 or not view:
            return []
        try:
            wanted = place_workers(view, self._run, at_most=shards)
        except (DeviceError, SpecError):
            return []  # these nodes cannot hold the job
        # Places of workers that were given up stay taken: they are not tried again.
        taken = Counter(place.node_id for place in self.places)
        found = []
        for place in wanted:
            if taken[place.node_id]:
                taken[place.node_id] -= 1
            else:
                found.append(place)
        return found[:room]

    def _say(self, slot: WorkerSlot, text: str) -> None:
        node_id = self.places[slot.index].node_id
        self._sink(events.Note(f"worker {slot.index}: node {node_id[:ID_DIGITS]} {text}"))
