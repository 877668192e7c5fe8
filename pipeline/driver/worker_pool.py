"""The driver's table of workers: who is warm, what each has in flight, and how to replace one.

A `WorkerSlot` is a place for a worker; the worker behind it may die and be replaced, the slot stays. The
executor's `Workers` start processes and carry calls; deciding what a loss means is the scheduler's
business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from earmill.pipeline.worker.messages import CONCURRENT_SHARDS, Lost, Outcome, WorkerInfo

if TYPE_CHECKING:
    from earmill.pipeline.driver.executors.base import Workers

WARMING, READY, DEAD = "warming", "ready", "dead"
WORK = ("run", "probe")


@dataclass(eq=False, slots=True)
class WorkerCall:
    """One remote call in flight.

    Args:
        kind: warm_up, run, probe or status. payload: What the scheduler wants to remember.
    Attributes:
        head_since: When it became the oldest work of its slot; deadlines count from here.
        shared_worker: Another call was in flight when the worker was lost, so blame is uncertain.
        generation: Which of the slot's workers it was sent to.
    """

    kind: str
    slot: WorkerSlot
    ref: Any
    payload: Any = None
    head_since: float = 0.0
    shared_worker: bool = False
    generation: int = 0


@dataclass(eq=False, slots=True)
class WorkerSlot:
    """A place for one worker.

    Attributes:
        work: Run and probe calls in flight, oldest first; at most as many as the worker takes.
        warming_since: When the worker was last started. retry_s: When to ask for warm-up again.
        generation: How often a worker was started here; a call belongs to that of its time.
        asked: A status call is in flight.
        failures: Warm-ups in a row that failed, the first one at `failing_since`.
        waits_for: What the worker was waiting for when last asked: `source`, `output`, or nothing.
        came_s, left_s: From when until when its cores belonged to the run, by the pool's clock.
    """

    index: int
    worker: Any = None
    state: str = WARMING
    info: WorkerInfo | None = None
    work: list[WorkerCall] = field(default_factory=list)
    warming_since: float = 0.0
    retry_s: float | None = None
    seconds_in_flight: float = 0.0
    generation: int = 0
    asked: bool = False
    failures: int = 0
    failing_since: float = 0.0
    waits_for: str = ""
    came_s: float = 0.0
    left_s: float = math.inf

    def under_way(self, seconds: float) -> None:
        """The worker says how much audio it is through with in shards not published yet.

        It forgets a shard when it has published it, before this side hears of that: the figure
        never falls until `ended` takes the shard out, so progress does not go backwards.
        """
        self.seconds_in_flight = max(self.seconds_in_flight, seconds)

    def ended(self, seconds: float) -> None:
        """A shard of so much audio is no longer in flight."""
        self.seconds_in_flight = max(0.0, self.seconds_in_flight - seconds)

    @property
    def room(self) -> int:
        """How many more shards this worker may be sent."""
        takes = CONCURRENT_SHARDS if self.info is None else self.info.shards
        return takes - len(self.work) if self.state == READY else 0

    @property
    def idle(self) -> bool:
        """Warm and without work."""
        return self.state == READY and not self.work


class WorkerPool:
    """All slots of one run.

    Args:
        workers: Starts, calls and kills them.
        size: Number of slots.
        clock: Monotonic seconds; a test may pass its own.
    """

    def __init__(
        self,
        workers: Workers,
        size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if size < 1:
            raise ValueError(f"expected at least one worker, got {size}")
        self.workers = workers
        self._clock = clock
        self._calls: dict[Any, WorkerCall] = {}
        self.slots = [WorkerSlot(index) for index in range(size)]

    def start(self) -> None:
        """Start every worker and ask each to warm up."""
        for slot in self.slots:
            self._start(slot)

    def submit(self, slot: WorkerSlot, kind: str, *args: Any, payload: Any = None) -> WorkerCall:
        """Send one call to the slot's worker."""
        ref = self.workers.call(slot.worker, kind, *args)
        call = WorkerCall(
            kind, slot, ref, payload, head_since=self._clock(), generation=slot.generation
        )
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
    ) -> Iterator[tuple[WorkerCall, Outcome | Lost]]:
        """Calls that ended, with their results; returns after `timeout_s` at the latest.

        Args:
            heads_up: Told of all of them before the first one.
        """
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
            self._leave(call)
            yield call, result

    def restart(self, slot: WorkerSlot) -> None:
        """The worker's process died and is started again; we warm it up again."""
        slot.state, slot.info, slot.seconds_in_flight = WARMING, None, 0.0
        slot.waits_for = ""
        slot.warming_since = self._clock()
        slot.generation += 1
        self.warm_up(slot)

    def warm_up(self, slot: WorkerSlot) -> None:
        """Ask the worker to get ready."""
        slot.retry_s = None
        self.submit(slot, "warm_up")

    def replace(self, slot: WorkerSlot) -> list[WorkerCall]:
        """Kill the slot's worker and start a new one; the calls it took with it are returned."""
        lost = self._forget(slot)
        self.workers.kill(slot.worker)
        self._start(slot)
        return lost

    def retire(self, slot: WorkerSlot) -> list[WorkerCall]:
        """Give the slot up; the calls it took with it are returned."""
        lost = self._forget(slot)
        slot.state, slot.retry_s, slot.seconds_in_flight = DEAD, None, 0.0
        self.workers.kill(slot.worker)
        return lost

    def grow(self) -> WorkerSlot:
        """One more slot, whose worker is started and asked to warm up."""
        slot = WorkerSlot(len(self.slots), came_s=self._clock())
        self.slots.append(slot)
        self._start(slot)
        return slot

    def leave(self, slot: WorkerSlot) -> list[WorkerCall]:
        """As `retire`, and its cores are no longer there either."""
        slot.left_s = self._clock()
        return self.retire(slot)

    def close(self) -> None:
        """Kill all workers."""
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

    def _leave(self, call: WorkerCall) -> None:
        slot = call.slot
        if call.kind == "status":
            slot.asked = False
        if call not in slot.work:
            return
        was_head = slot.work[0] is call
        slot.work.remove(call)
        if was_head and slot.work:
            slot.work[0].head_since = self._clock()
