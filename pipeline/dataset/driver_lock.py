"""The lock of an output, its members if drivers share it, and the shards that each member claims.

`driver.json` names the driver and holds its heartbeat. A holder counts as gone when its process no
longer exists on this machine, or after 60 s without a heartbeat. Clocks of the hosts should agree
to within 60 s. A driver takes over by replacing the file that it has read, so one of several
drivers succeeds. On a store without conditional replace, the fences stop the other drivers.

Drivers that share an output are its members, each with a file and a heartbeat. A driver that needs
the output for itself is refused while a member lives, and evicts members without a sign of life.
Shards are claimed in blocks by files that are created only if absent. The claim of a member that is
gone is superseded by the next number of its block. Claims only save work: commits are exactly once
without them.

A driver that was stopped (a laptop lid, SIGSTOP) may wake after another has taken over. Its `Fence`
reads the file that names the run before every write that a later command could trip over. The
heartbeat never writes this file again once it is gone or names another run, so a driver that was
overtaken stays overtaken.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

import psutil

from earmill.pipeline.common.errors import LockedError, OvertakenError, StorageError
from earmill.pipeline.common.text import duration
from earmill.pipeline.dataset.commit_record import committed_shards
from earmill.pipeline.storage.documents import Strict, typed_json
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import CLAIMS, CREW, DRIVER_FILE, claim_path

HEARTBEAT_S = 15.0  # Interval of the signs of life, well below `STALE_S`.
STALE_S = 60.0
# Process start times are derived from the boot time, which clock corrections move a little.
_CREATED_TOLERANCE_S = 2.0
# Most blocks of a plan, unless a block would hold more than `LARGEST_BLOCK` shards.
BLOCKS, LARGEST_BLOCK = 1024, 64
# While other drivers hold the remaining shards, commits and members are read at this interval, s.
LOOK_EVERY_S = 5.0
_CLAIM = re.compile(r"(\d+)\.(\d+)\.json")


@dataclass(frozen=True)
class LockHolder(Strict):
    """A driver, as stored in driver.json; `shares`: other drivers may work on the output as well.
    Process ids compare within one `machine`, see `machine_id`; `created_unix_s` tells processes
    apart that have one id."""

    run_id: str
    host: str
    machine: str
    pid: int
    created_unix_s: float
    heartbeat_unix_s: float
    shares: bool = False
    stored: bytes = field(default=b"", compare=False)  # The file that it was read from.

    @classmethod
    def here(cls, run_id: str | None = None, *, shares: bool = False) -> LockHolder:
        return cls(
            run_id=run_id or secrets.token_hex(8),
            host=socket.gethostname(),
            machine=machine_id(),
            pid=os.getpid(),
            created_unix_s=psutil.Process().create_time(),
            heartbeat_unix_s=time.time(),
            shares=shares,
        )

    @property
    def age_s(self) -> float:
        return time.time() - self.heartbeat_unix_s

    def may_live(self) -> bool:
        return self.age_s <= STALE_S and not self.is_gone()

    def is_gone(self) -> bool:
        """Return True if its process ran on this machine and has ended."""
        if self.machine != machine_id():
            return False
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created_unix_s) <= _CREATED_TOLERANCE_S
            return not same or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False

    def __str__(self) -> str:
        return (
            f"host {self.host}, pid {self.pid}, run {self.run_id}, "
            f"last sign of life {duration(max(0.0, self.age_s))} ago"
        )


def machine_id() -> str:
    """Name the set of processes whose ids can be compared: this boot, this pid namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append(f"boot:{round(psutil.boot_time())}")
    return "/".join(parts)


@dataclass(frozen=True, slots=True)
class Fence:
    """The right of a run to write to an output; its workers carry it. The file `name` (driver.json
    or a membership) names the run; it is empty for a writer that needs no right."""

    name: str = ""
    run_id: str = ""

    def check(self, layout: Layout) -> None:
        """Raise OvertakenError if the file is gone or names another run; always reads the file,
        because no clock tells a process how long it was stopped."""
        holder = read_holder(layout, self.name) if self.name else None
        if self.name and (holder is None or holder.run_id != self.run_id):
            raise overtaken(layout, holder)

    @contextmanager
    def says_why(self, layout: Layout) -> Iterator[None]:
        """Turn an error inside into an OvertakenError if the run was overtaken."""
        try:
            yield
        except OvertakenError:
            raise
        except Exception as error:
            try:
                self.check(layout)
            except OvertakenError as lost:
                raise lost from error
            except Exception:  # an output that is away says nothing
                pass
            raise


UNFENCED = Fence()


def overtaken(layout: Layout, holder: LockHolder | None = None) -> OvertakenError:
    who = f" ({holder})" if holder is not None else ", or the output was removed,"
    return OvertakenError(
        f"another command took {layout.url()} over{who} while this run gave no sign of life; this "
        "run ends here and writes no more: run the same command again, `earmill extract` with "
        "--resume"
    )


class Heartbeat:
    """Signs of life of a run in the file that names it, until another run takes the file over."""

    def __init__(self, layout: Layout, name: str, holder: LockHolder, heartbeat_s: float) -> None:
        self._layout, self._heartbeat_s, self.holder = layout, heartbeat_s, holder
        self.fence = Fence(name, holder.run_id)
        self._done = threading.Event()
        self._lost: OvertakenError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        # An output that is away must not hide why the run ended, nor that it is done: the next
        # driver finds the holder gone.
        with suppress(StorageError):
            self.release()

    def check(self) -> None:
        """Raise OvertakenError if the heartbeat found another run; unlike `fence.check`, reads
        nothing."""
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """Stop the heartbeat and remove the file if it is still ours; safe to call again."""
        self._done.set()
        self._thread.join(self._heartbeat_s)
        found = read_holder(self._layout, self.fence.name)
        if found is not None and found.run_id == self.holder.run_id:
            self._layout.remove_own(self.fence.name, found.stored)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        while not self._done.wait(self._heartbeat_s):
            # A short outage of the store must not end a run: beat again.
            with suppress(Exception):
                found = read_holder(self._layout, self.fence.name)
                if found is None or found.run_id != self.fence.run_id:
                    self._lost = overtaken(self._layout, found)
                    return
                # Fails if another run has taken the file over since it was read.
                self._layout.replace_own(self.fence.name, as_seen_now(self.holder), found.stored)


class DriverLock(Heartbeat):
    """Holds the output until `release`, the end of a `with`, or the death of the process. Raises
    LockedError if another live driver holds it, or got it first. With `shares` other drivers may
    join; `alone` refuses an output on which members are at work, and evicts dead members."""

    def __init__(
        self,
        layout: Layout,
        *,
        run_id: str | None = None,
        shares: bool = False,
        alone: bool = True,
        heartbeat_s: float = HEARTBEAT_S,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(layout, DRIVER_FILE, LockHolder.here(run_id, shares=shares), heartbeat_s)
        before = read_holder(layout)
        if before is not None:
            live = before.may_live()
            if live and before.age_s < -STALE_S:  # a clock far ahead: it must show that it lives
                wait(STALE_S)
                live = read_holder(layout) != before
            if live:
                raise LockedError(_at_work(layout, before))
        # Fails if another driver has written the file since it was read.
        seen = None if before is None else before.stored
        if not layout.replace_own(DRIVER_FILE, as_seen_now(self.holder), seen):
            raise LockedError(f"another driver just began to work on {layout.url()}")
        try:
            if alone:
                evict_crew(layout)
        except BaseException:
            layout.delete(DRIVER_FILE)
            raise
        self._start()


@contextmanager
def held(layout: Layout) -> Iterator[Fence]:
    """Hold an output alone; see `Fence.says_why` for errors inside."""
    with DriverLock(layout) as lock, lock.fence.says_why(layout):
        yield lock.fence


def as_seen_now(holder: LockHolder) -> bytes:
    return stored_text(replace(holder, heartbeat_unix_s=time.time()))


def stored_text(holder: LockHolder) -> bytes:
    fields = asdict(holder)
    del fields["stored"]
    return json.dumps(fields, indent=1).encode()


def read_holder(layout: Layout, name: str = DRIVER_FILE) -> LockHolder | None:
    """Return the stored holder, or None; LockedError for another file."""
    try:
        content = layout.read_bytes(name)
        return replace(typed_json(LockHolder, content), stored=content)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as err:
        raise LockedError(
            f"{layout.url(name)} is not a lock file of this release ({err}); "
            "remove it if no driver works on this output"
        ) from err


def live_crew(layout: Layout) -> dict[str, LockHolder]:
    found = [read_holder(layout, name) for name in layout.list(CREW)]
    return {one.run_id: one for one in found if one is not None and one.may_live()}


def evict_crew(layout: Layout) -> None:
    """Remove dead memberships: a member that wakes is overtaken. LockedError if a member lives."""
    for name in layout.list(CREW):
        found = read_holder(layout, name)
        if found is None or (not found.may_live() and layout.remove_own(name, found.stored)):
            continue
        if (member := read_holder(layout, name)) is not None:  # it has just given a sign of life
            raise LockedError(_at_work(layout, member))


def _at_work(layout: Layout, holder: LockHolder) -> str:
    return (
        f"another driver works on {layout.url()} ({holder}); "
        "wait for it, stop it, join it (--join), or use another output.uri"
    )


class DriverMembership(Heartbeat):
    """Membership of an output until `release` or the end of a `with`; LockedError if a driver needs
    the output for itself."""

    def __init__(
        self, layout: Layout, *, run_id: str | None = None, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        holder = LockHolder.here(run_id, shares=True)
        super().__init__(layout, f"{CREW}/{holder.run_id}.json", holder, heartbeat_s)
        layout.write_bytes(self.fence.name, as_seen_now(holder))
        # Read the lock after joining: a driver that takes it alone looks for members afterwards.
        lock = read_holder(layout)
        if lock is not None and not lock.shares and lock.may_live():
            layout.delete(self.fence.name)
            raise LockedError(f"{layout.url()} is used by one driver alone ({lock}); wait for it")
        self._start()

    def release(self) -> None:
        super().release()
        if self._layout.is_local:
            with suppress(OSError):  # not empty: others go on
                os.rmdir(self._layout.path(CREW))


class BlockClaims:
    """The claims on blocks of shards, as one member knows them; used by one thread. `start` is the
    fraction of the plan at which to begin: members that begin apart seldom meet."""

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
        """Return shards of an unclaimed block; an empty list while other members have the rest, and
        None once everything is committed or claimed here."""
        for block in self._fresh:
            if block not in self._numbers and (left := self._left(block)) and self._claim(block):
                return left
        now = self._clock()
        if self._looked is not None and now - self._looked < LOOK_EVERY_S:
            return []
        self._looked = now
        self._done = committed_shards(self._layout)
        blocks = range(len(self._blocks))
        others = [block for block in blocks if block not in self._mine and self._left(block)]
        if not others:
            return None
        self._numbers = self._claimed()
        living = live_crew(self._layout)
        for block in others:
            if self._owner(block) not in living and self._claim(block):
                self._looked = None
                return self._left(block)
        return []

    def _left(self, block: int) -> list[str]:
        return [shard for shard in self._blocks[block] if shard not in self._done]

    def _claim(self, block: int) -> bool:
        number = self._numbers.get(block, -1) + 1
        name = claim_path(self._plan_id, block, number)
        self._fence.check(self._layout)
        got = self._layout.create_own(name, json.dumps({"run_id": self._run_id}).encode())
        self._numbers[block] = number
        if got:
            self._mine.add(block)
        return got

    def _owner(self, block: int) -> str:
        try:
            name = claim_path(self._plan_id, block, self._numbers[block])
            return str(json.loads(self._layout.read_bytes(name))["run_id"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return ""

    def _claimed(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for name in self._layout.list(f"{CLAIMS}/{self._plan_id}"):
            if (parsed := _CLAIM.fullmatch(name.rpartition("/")[2])) is not None:
                block, number = map(int, parsed.groups())
                found[block] = max(number, found.get(block, 0))
        return found


def clear_claims(layout: Layout) -> None:
    """Remove the claims of a complete dataset, and memberships of drivers that have ended.
    `evict_crew` removes the memberships of drivers that may wake."""
    layout.delete(CLAIMS)
    for name in layout.list(CREW):
        holder = read_holder(layout, name)
        if holder is not None and holder.is_gone():
            layout.delete(name)
