"""Drivers that share an output, and which shards each of them does.

Every member of a crew keeps a file with a heartbeat, as the holder of the driver lock does. Shards
are claimed in blocks, so that a claim costs a small part of a commit: a file that is created only
if absent, and names the member. The claim of a member that is gone is superseded by the next number
of the same block, which again one only can create. Claims save work and nothing else: commits are
exactly once without them, and a member that was frozen and wakes among the others goes on.

A command that needs the output for itself removes the memberships of members that gave no sign of
life. The file is a member's fence (see `dataset.driver_lock`): it is never written again once it is
gone.
"""

from __future__ import annotations

import json
import os
import re
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress

from earmill.pipeline.common.errors import LockedError
from earmill.pipeline.dataset.commit_record import committed_shards
from earmill.pipeline.dataset.driver_lock import (
    HEARTBEAT_S,
    UNFENCED,
    Fence,
    Heartbeat,
    LockHolder,
    as_seen_now,
    live_crew,
    read_holder,
)
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import CLAIMS, CREW, claim_path

# Most blocks of a plan, unless a block would hold more than `LARGEST_BLOCK` shards.
BLOCKS = 1024
LARGEST_BLOCK = 64
# While other drivers hold the remaining shards, commits and members are read at this interval, s.
LOOK_EVERY_S = 5.0
_CLAIM = re.compile(r"(\d+)\.(\d+)\.json")


class DriverMembership(Heartbeat):
    """Membership of an output's crew until `release` or the end of a `with`.

    Raises:
        LockedError: Somebody needs the output for itself.
    """

    def __init__(
        self, layout: Layout, *, run_id: str | None = None, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        holder = LockHolder.here(run_id, shares=True)
        super().__init__(layout, f"{CREW}/{holder.run_id}.json", holder, heartbeat_s)
        layout.write_bytes(self.fence.name, as_seen_now(holder))
        # In this order: who takes the lock for itself looks for members after that.
        lock = read_holder(layout)
        if lock is not None and not lock.shares and lock.may_live():
            layout.delete(self.fence.name)
            raise LockedError(f"{layout.url()} is not to be shared now ({lock}); wait for its end")
        self._start("crew")

    def release(self) -> None:
        """Give all claims back; safe to call again."""
        self._stop()
        self._layout.delete(self.fence.name)
        if self._layout.is_local:
            with suppress(OSError):  # not empty: others go on
                os.rmdir(self._layout.path(CREW))


class BlockClaims:
    """One member's view of who does which shards; asked by one thread.

    Args:
        shards: Every shard of the plan, in order.
        done: Committed shards.
        start: Where to begin, as a fraction of the plan: members that begin apart seldom meet.
        fence: The run's right to write to the output; checked before a claim.
    """

    def __init__(
        self,
        layout: Layout,
        plan_id: str,
        shards: Sequence[str],
        done: set[str],
        *,
        run_id: str,
        start: float = 0.0,
        fence: Fence = UNFENCED,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout, self._plan_id, self._run_id, self._fence = layout, plan_id, run_id, fence
        self._done, self._clock = set(done), clock
        size = min(LARGEST_BLOCK, -(-len(shards) // BLOCKS))
        self._blocks = [shards[at : at + size] for at in range(0, len(shards), size)]
        self._mine: set[int] = set()
        self._numbers = self._claimed()
        first = int(start * len(self._blocks)) % max(1, len(self._blocks))
        self._fresh = iter([*range(first, len(self._blocks)), *range(first)])
        self._looked: float | None = None

    def next(self) -> list[str] | None:
        """Shards of a block that nobody does; an empty list while others have the rest, and None
        where everything is committed or this member's."""
        for block in self._fresh:
            if block not in self._numbers and (left := self._left(block)) and self._get(block):
                return left
        now = self._clock()
        if self._looked is not None and now - self._looked < LOOK_EVERY_S:
            return []
        self._looked = now
        self._done = committed_shards(self._layout)
        others = self._of_others()
        if not others:
            return None
        self._numbers = self._claimed()
        living = live_crew(self._layout)
        for block in others:
            is_claimed = block in self._numbers and self._owner(block) in living
            if not is_claimed and self._get(block):
                self._looked = None
                return self._left(block)
        return []

    @property
    def others(self) -> int:
        """Shards that others had when it was last looked."""
        return sum(len(self._left(block)) for block in self._of_others())

    def _of_others(self) -> list[int]:
        blocks = range(len(self._blocks))
        return [block for block in blocks if block not in self._mine and self._left(block)]

    def _left(self, block: int) -> list[str]:
        return [shard for shard in self._blocks[block] if shard not in self._done]

    def _get(self, block: int) -> bool:
        number = self._numbers.get(block, -1) + 1
        name = claim_path(self._plan_id, block, number)
        self._fence.check(self._layout)
        got = self._layout.create_own(name, json.dumps({"run_id": self._run_id}).encode())
        self._numbers[block] = number
        if got:
            self._mine.add(block)
        return got

    def _owner(self, block: int) -> str:
        name = claim_path(self._plan_id, block, self._numbers[block])
        try:
            return str(json.loads(self._layout.read_bytes(name))["run_id"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return ""

    def _claimed(self) -> dict[int, int]:
        """Blocks that have claims, and the number of the claim that counts."""
        found: dict[int, int] = {}
        for name in self._layout.list(f"{CLAIMS}/{self._plan_id}"):
            parsed = _CLAIM.fullmatch(name.rpartition("/")[2])
            if parsed is not None:
                block, number = int(parsed[1]), int(parsed[2])
                found[block] = max(number, found.get(block, 0))
        return found


def start_of(run_id: str) -> float:
    """A place to begin for a member that nobody gave one."""
    return zlib.crc32(run_id.encode()) / 2**32


def clear_claims(layout: Layout) -> None:
    """Remove the claims of a complete dataset, and the memberships of drivers that have ended.

    The membership of a driver that may wake stays. It goes with the next command that needs the
    output for itself, and tells that driver so.
    """
    layout.delete(CLAIMS)
    for name in layout.list(CREW):
        holder = read_holder(layout, name)
        if holder is not None and holder.is_gone():
            layout.delete(name)
