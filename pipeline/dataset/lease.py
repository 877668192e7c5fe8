"""One driver per output: `driver.json` with who holds it and a heartbeat.

A courtesy that saves work and confusion, not correctness: commits are exactly once without it. A
holder counts as gone when its process no longer exists on this machine, or after 60 s without a
heartbeat (clocks of the hosts should agree to within that). A heartbeat further than that in the
future says nothing of its age, so it is watched for as long. Taking over is itself done under a
lock, named after the dead holder, so that of several drivers that find it dead one gets it.

Drivers that share an output (`dataset.crew`) do without it, but not beside a holder that needs the
output for itself; whoever takes the lock for itself is refused while one of them lives.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from earmill.pipeline.common.errors import LockedError, StorageError
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import CREW, DRIVER_FILE
from earmill.pipeline.storage.typed_json import Strict, typed_json

HEARTBEAT_S = 15.0
STALE_S = 60.0
# Process start times are derived from the boot time, which clock corrections move a little.
_CREATED_TOLERANCE_S = 2.0


@dataclass(frozen=True)
class Holder(Strict):
    """Who drives, as stored in driver.json.

    Args:
        run_id: Random name of this run.
        host: Host name, for people. machine: Boot and process namespace; pids compare within one.
        pid, created_unix_s: The process; both, as pids are used again.
        heartbeat_unix_s: Last sign of life, s since 1970.
        shares: Others may work on the output meanwhile, as members of its crew.
    """

    run_id: str
    host: str
    machine: str
    pid: int
    created_unix_s: float
    heartbeat_unix_s: float
    shares: bool = False

    @classmethod
    def here(cls, run_id: str | None = None, *, shares: bool = False) -> Holder:
        """This process, now.

        Args:
            run_id: Name of this run; None draws one.
        """
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
        """Time since the last sign of life."""
        return time.time() - self.heartbeat_unix_s

    def may_live(self) -> bool:
        """Whether this holder may still be at work."""
        return self.age_s <= STALE_S and (self.machine != machine_id() or self._runs())

    def _runs(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.created_unix_s) <= _CREATED_TOLERANCE_S
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True

    def __str__(self) -> str:
        return (
            f"host {self.host}, pid {self.pid}, run {self.run_id}, "
            f"last sign of life {max(0.0, self.age_s):.0f} s ago"
        )


def machine_id() -> str:
    """Names the set of processes whose pids can be compared: this boot, this pid namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append(f"boot:{round(psutil.boot_time())}")
    return "/".join(parts)


class DriverLock:
    """Holds the output until `release`, the end of a `with`, or the death of the process.

    Args:
        layout: The output.
        run_id: Name of this run; None draws one.
        shares: Others may join; see `dataset.crew`.
        alone: Refuse an output on which members of a crew are at work.
        heartbeat_s: Interval of the signs of life, s; well below `STALE_S`.
        wait: Waits so many seconds before a heartbeat of the future is looked at again.

    Raises:
        LockedError: Another live driver holds it, or got it first.
    """

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
        self._layout, self._heartbeat_s, self._wait = layout, heartbeat_s, wait
        self._done = threading.Event()
        self._lost: Holder | None = None
        self.holder = Holder.here(run_id, shares=shares)
        self._take(DRIVER_FILE)
        if alone and (crew := live_crew(layout)):
            self._layout.delete(DRIVER_FILE)
            raise LockedError(_at_work(layout, next(iter(crew.values()))))
        self._thread = threading.Thread(target=self._beat, name="driver-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise LockedError where another driver has taken the output over meanwhile."""
        if self._lost is not None:
            raise LockedError(
                f"another driver took {self._layout.url()} over ({self._lost}), as this one "
                f"gave no sign of life for {STALE_S:g} s; stop here, the other one continues"
            )

    def release(self) -> None:
        """Stop the heartbeat and remove the file if it is still ours; safe to call again."""
        self._done.set()
        self._thread.join(self._heartbeat_s)
        current = self._read(DRIVER_FILE)
        if current is not None and current.run_id == self.holder.run_id:
            self._layout.delete(DRIVER_FILE)

    def __enter__(self) -> DriverLock:
        return self

    def __exit__(self, *raised: object) -> None:
        # An output that is away must not hide why the run ended, nor that it is done: the next
        # driver finds the holder gone.
        with suppress(StorageError):
            self.release()

    def _beat(self) -> None:
        while not self._done.wait(self._heartbeat_s):
            # A store that is away for a moment must not end a run: beat again.
            with suppress(Exception):
                current = self._read(DRIVER_FILE)
                if current is not None and current.run_id != self.holder.run_id:
                    self._lost = current
                    return
                # Not over a driver that takes over between the two.
                seen = None if current is None else stored_text(current)
                self._layout.replace_own(DRIVER_FILE, self._text(), seen)

    def _take(self, name: str) -> None:
        """Get the lock of this name, or raise LockedError.

        A dead holder X is replaced under the lock `<name>.<X>`, taken by the same function. Whoever
        has that one looks again before it writes: only while X still stands there is it free.
        """
        if self._layout.create_own(name, self._text()):
            return
        holder = self._read(name)
        if holder is not None:
            self._refuse_if_live(name, holder)
            takeover = f"{name}.{holder.run_id}"
            self._take(takeover)
            try:
                now = self._read(name)
                if now is not None and now.run_id == holder.run_id:
                    self._layout.write_bytes(name, self._text())
                    return
            finally:
                self._layout.delete(takeover)
        # It left while we looked, or another driver was faster: whoever creates it now has it.
        if not self._layout.create_own(name, self._text()):
            raise LockedError(f"another driver just began to work on {self._layout.url()}")

    def _refuse_if_live(self, name: str, holder: Holder) -> None:
        live = holder.may_live()
        if live and holder.age_s < -STALE_S:  # a clock far ahead: it must show that it lives
            self._wait(STALE_S)
            live = self._read(name) != holder
        if live:
            raise LockedError(_at_work(self._layout, holder))

    def _text(self) -> bytes:
        return as_seen_now(self.holder)

    def _read(self, name: str) -> Holder | None:
        return read_holder(self._layout, name)


def as_seen_now(holder: Holder) -> bytes:
    """What is stored of a holder that gives a sign of life."""
    return stored_text(replace(holder, heartbeat_unix_s=time.time()))


def stored_text(holder: Holder) -> bytes:
    """A holder as it is stored."""
    return json.dumps(asdict(holder), indent=1).encode()


def read_holder(layout: Layout, name: str = DRIVER_FILE) -> Holder | None:
    """The stored holder, or None where nobody holds it.

    Raises:
        LockedError: The file is something else.
    """
    try:
        return typed_json(Holder, layout.read_bytes(name))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as err:
        raise LockedError(
            f"{layout.url(name)} is not a lock file of this release ({err}); "
            "remove it if no driver works on this output"
        ) from err


def live_crew(layout: Layout) -> dict[str, Holder]:
    """Drivers that share the output now, by run id."""
    found = {name: read_holder(layout, name) for name in layout.list(CREW)}
    return {one.run_id: one for one in found.values() if one is not None and one.may_live()}


def _at_work(layout: Layout, holder: Holder) -> str:
    return (
        f"another driver works on {layout.url()} ({holder}); "
        "wait for it, stop it, join it (--join), or use another output.uri"
    )
