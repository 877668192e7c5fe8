"""Who works where while the nodes of a cluster come, drain and go.

    a node comes     a worker on it, as if it had been there at the start
    a node drains    its workers take no more shards; they end with what they have, or just before
                     the node does: what they have then goes back, charged to nobody
    a node is gone   its workers are given up, their shards go back

The last workers stay whatever their nodes do: on one that drains they work as long as it lives, and
one whose node is gone waits, as an actor of Ray, for whatever node comes next. So a run always has
somebody who works or is waited for, and an autoscaler sees that somebody is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from earmill.pipeline.common.errors import DeviceError, SpecError
from earmill.pipeline.driver import events
from earmill.pipeline.driver.placement import ClusterView, Placement, place_workers
from earmill.pipeline.driver.pool import DEAD, LEAVING, READY

if TYPE_CHECKING:
    from earmill.pipeline.driver.pool import Pool, Slot
    from earmill.pipeline.driver.shard_tracker import Ledger
    from earmill.pipeline.spec.job import RunSpec

# A shard still under way this long before its node ends would not be committed any more.
LAST_S = 2.0
# Of a node's id, in messages.
ID_DIGITS = 8


class Roster:
    """The places of a run's workers, by the index of their slots.

    Args:
        places: Those to begin with.
        seen: What is known of the cluster; None for machines that neither come nor go. A look that
            is newer is another object.
        sink: Takes a note for each worker that comes or leaves.
        clock: Seconds since 1970, as deadlines of nodes are.
    """

    def __init__(
        self,
        places: Sequence[Placement],
        run: RunSpec,
        *,
        seen: Callable[[], ClusterView | None],
        sink: events.Sink = events.ignore,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.places = list(places)
        self._run, self._seen, self._sink, self._clock = run, seen, sink, clock
        self._last: ClusterView | None = None

    def of_living(self, pool: Pool) -> list[Placement]:
        """The places where somebody works, or gets ready to."""
        return [self.places[slot.index] for slot in pool.slots if slot.state != DEAD]

    def follow(self, pool: Pool, ledger: Ledger) -> None:
        """Make the pool what the cluster allows; asked at every tick of the driver loop."""
        view = self._seen()
        if view is None:
            return
        if view is not self._last:
            self._last = view
            self._join(view, pool, ledger)
        elif all(slot.state != LEAVING for slot in pool.slots):
            return
        living = [slot for slot in pool.slots if slot.state != DEAD]
        leaving = [slot for slot in living if self._leaves(slot, view)]
        nobody_stays = len(leaving) == len(living)
        for slot in living:
            if nobody_stays or slot not in leaving:
                if slot.state == LEAVING:
                    slot.state = READY
            else:
                self._leave(slot, view, pool, ledger)

    def _leaves(self, slot: Slot, view: ClusterView) -> bool:
        node_id = self.places[slot.index].node_id
        return node_id in view.draining or node_id not in view.node_ids

    def _leave(self, slot: Slot, view: ClusterView, pool: Pool, ledger: Ledger) -> None:
        node_id = self.places[slot.index].node_id
        ends_s = view.draining.get(node_id, 0.0)
        if slot.work and self._clock() < ends_s - LAST_S:
            if slot.state != LEAVING:
                slot.state = LEAVING
                self._say(slot, f"node {node_id[:ID_DIGITS]} drains: it ends with what it has")
            return
        why = "is gone" if node_id not in view.draining else "drains"
        for call in pool.leave(slot):
            call.payload.work.copies -= 1
            ledger.put_back(call.payload.work)
        self._say(slot, f"node {node_id[:ID_DIGITS]} {why}: given up")

    def _join(self, view: ClusterView, pool: Pool, ledger: Ledger) -> None:
        if ledger.nothing_waits:
            return
        for place in self._new_places(view, pool, ledger.unsettled):
            self.places.append(place)
            slot = pool.grow()
            self._say(slot, f"node {place.node_id[:ID_DIGITS]} has joined: it works there")

    def _new_places(self, view: ClusterView, pool: Pool, shards: int) -> list[Placement]:
        """Places on nodes that have fewer workers than they would be given now."""
        stay = sum(slot.state != DEAD and not self._leaves(slot, view) for slot in pool.slots)
        room = min(shards, self._run.workers or shards) - stay
        nodes = [node for node in view.nodes if node.node_id not in view.draining]
        if room <= 0 or not nodes:
            return []
        try:
            wanted = place_workers(nodes, self._run, at_most=shards)
        except (DeviceError, SpecError):
            return []  # not these nodes, or not yet enough of them
        # Also those that were given up for good: a node where no worker gets ready is not tried on.
        taken = Counter(place.node_id for place in self.places)
        found = []
        for place in wanted:
            if taken[place.node_id]:
                taken[place.node_id] -= 1
            else:
                found.append(place)
        return found[:room]

    def _say(self, slot: Slot, text: str) -> None:
        self._sink(events.Note(f"worker {slot.index}: {text}"))
