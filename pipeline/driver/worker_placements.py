"""Workers on a cluster whose nodes come and go.

    a node comes     a worker on it, as if the node had been there at the start
    a node is gone   its workers are given up, their shards go back

If all nodes of the workers are gone, the workers stay: they are actors of Ray, which starts them on
the next node. So a run always has a worker that works or is waited for, and an autoscaler sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from earmill.pipeline.common.errors import DeviceError, SpecError
from earmill.pipeline.driver import events
from earmill.pipeline.driver.placement import ClusterView, Placement, place_workers
from earmill.pipeline.driver.worker_pool import DEAD

if TYPE_CHECKING:
    from earmill.pipeline.driver.shard_ledger import ShardLedger
    from earmill.pipeline.driver.worker_pool import WorkerPool, WorkerSlot
    from earmill.pipeline.spec.job import RunSpec

# Digits of a node's id in messages.
ID_DIGITS = 8


class WorkerPlacements:
    """The places of a run's workers, by the index of their slots.

    Args:
        places: The places at the start.
        run: Says what a worker needs.
        seen: Returns the last view of the cluster; None where no node comes or goes. A newer view
            is another object.
        sink: Takes a note for each worker that comes or leaves.
    """

    def __init__(
        self,
        places: Sequence[Placement],
        run: RunSpec,
        *,
        seen: Callable[[], ClusterView | None],
        sink: events.Sink = events.ignore,
    ) -> None:
        self.places = list(places)
        self._run, self._seen, self._sink = run, seen, sink
        self._last: ClusterView | None = None

    def of_living(self, pool: WorkerPool) -> list[Placement]:
        """Return the places of the workers that are warm or warming."""
        return [self.places[slot.index] for slot in pool.slots if slot.state != DEAD]

    def follow(self, pool: WorkerPool, ledger: ShardLedger) -> None:
        """Start and give up workers as the cluster has changed; called at every tick."""
        view = self._seen()
        if view is None or view is self._last:
            return
        self._last = view
        self._join(view, pool, ledger)
        living = [slot for slot in pool.slots if slot.state != DEAD]
        lost = [slot for slot in living if self._is_gone(slot, view)]
        if len(lost) < len(living):
            for slot in lost:
                self._give_up(slot, pool, ledger)

    def _is_gone(self, slot: WorkerSlot, view: ClusterView) -> bool:
        return self.places[slot.index].node_id not in view.node_ids

    def _give_up(self, slot: WorkerSlot, pool: WorkerPool, ledger: ShardLedger) -> None:
        for call in pool.leave(slot):
            call.payload.work.copies -= 1
            ledger.put_back(call.payload.work)
        node_id = self.places[slot.index].node_id
        self._say(slot, f"node {node_id[:ID_DIGITS]} is gone: given up")

    def _join(self, view: ClusterView, pool: WorkerPool, ledger: ShardLedger) -> None:
        if ledger.nothing_waits:
            return
        for place in self._new_places(view, pool, ledger.unsettled):
            self.places.append(place)
            slot = pool.grow()
            self._say(slot, f"node {place.node_id[:ID_DIGITS]} has joined: it works there")

    def _new_places(self, view: ClusterView, pool: WorkerPool, shards: int) -> list[Placement]:
        """Return places on nodes that have fewer workers than they would be given now."""
        stay = sum(slot.state != DEAD and not self._is_gone(slot, view) for slot in pool.slots)
        room = min(shards, self._run.workers or shards) - stay
        if room <= 0 or not view.nodes:
            return []
        try:
            wanted = place_workers(view.nodes, self._run, at_most=shards)
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
        self._sink(events.Note(f"worker {slot.index}: {text}"))
