"""Table of the driver's workers: their states, their calls in flight, their replacement.

A `WorkerSlot` is a place for a worker: its worker may die and be replaced, and the slot stays. The
executor's `Workers` start processes and carry calls. The scheduler decides what a loss means.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from earmill.pipeline.worker.messages import CONCURRENT_SHARDS, LostCall, Outcome, WorkerInfo

if TYPE_CHECKING:
    from earmill.pipeline.driver.executors import Workers

WARMING, READY, DEAD = "warming", "ready", "dead"
WORK = ("run", "probe")


@dataclass(eq=False, slots=True)
class WorkerCall:
    """A call to a worker that has not ended.

    Args:
        kind: warm_up, run, probe or status.
        slot: The slot of its worker.
        ref: The executor's object for the call.
        payload: The scheduler's object for the call.
    Attributes:
        head_since: When the call became the oldest work of its slot; deadlines count from here.
        shared_worker: Another call was in flight when the worker was lost, so blame is uncertain.
        generation: Number of the worker in the slot.
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
        warming_since: When the worker was last started.
        retry_s: When to ask for warm-up again.
        generation: How often a worker was started here.
        asked: A status call is in flight.
        failures: Warm-ups in a row that failed.
        failing_since: When the first of these failed.
        waits_for: `source` or `output` if the worker waited for it when last asked, else empty.
        came_s: When its cores came to the run, by the pool's clock.
        left_s: When its cores left the run.
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
        """Note the audio that the worker has extracted in unpublished shards, in seconds.

        The worker drops a shard from the sum when it has published it, before the driver knows.
        So the figure never falls until `ended` subtracts the shard: progress never goes back.
        """
        self.seconds_in_flight = max(self.seconds_in_flight, seconds)

    def ended(self, seconds: float) -> None:
        """Subtract a shard that has ended, of `seconds` seconds."""
        self.seconds_in_flight = max(0.0, self.seconds_in_flight - seconds)

    @property
    def room(self) -> int:
        """Number of shards that the worker may still be sent."""
        takes = CONCURRENT_SHARDS if self.info is None else self.info.shards
        return takes - len(self.work) if self.state == READY else 0

    @property
    def idle(self) -> bool:
        """True if the worker is warm and has no work."""
        return self.state == READY and not self.work


class WorkerPool:
    """All slots of one run.

    Args:
        workers: Starts, calls and kills the workers.
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
    ) -> Iterator[tuple[WorkerCall, Outcome | LostCall]]:
        """Yield calls that ended, with their results; waits for `timeout_s` seconds at most.

        Args:
            heads_up: Called with all of these calls before the first is yielded.
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
        """Warm up the worker again, whose process died and is started again."""
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
        """Kill the slot's worker, start another, and return the calls that were in flight."""
        lost = self._forget(slot)
        self.workers.kill(slot.worker)
        self._start(slot)
        return lost

    def retire(self, slot: WorkerSlot) -> list[WorkerCall]:
        """Kill the slot's worker for good, and return the calls that were in flight."""
        lost = self._forget(slot)
        slot.state, slot.retry_s, slot.seconds_in_flight = DEAD, None, 0.0
        self.workers.kill(slot.worker)
        return lost

    def grow(self) -> WorkerSlot:
        """Add a slot, start its worker and ask it to warm up."""
        slot = WorkerSlot(len(self.slots), came_s=self._clock())
        self.slots.append(slot)
        self._start(slot)
        return slot

    def leave(self, slot: WorkerSlot) -> list[WorkerCall]:
        """Retire a slot whose node is gone, and its cores with it."""
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
