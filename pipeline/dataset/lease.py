"""One driver per output: `driver.json` with who holds it and a heartbeat.

It saves work and confusion, not correctness: commits are exactly once without it. A holder counts
as gone when its process no longer exists on this machine, or after 60 s without a heartbeat (clocks
of the hosts should agree to within that). A heartbeat further than that in the future says nothing
of its age, so it is watched: a holder that gives no other sign of life meanwhile is gone. Taking
over is itself done under a lock, named after the dead holder, so that of several drivers that find
it dead one gets it.
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
from types import TracebackType

import psutil

from earmill.pipeline.common.errors import LockedError, StorageError
from earmill.pipeline.storage.layout import DRIVER_FILE, Layout
from earmill.pipeline.storage.typed_json import Strict, typed_json

HEARTBEAT_S = 15.0
STALE_S = 60.0
# How often a heartbeat of the future is looked at again; all looks together span some heartbeats.
WATCH_LOOKS = 3
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
    """

    run_id: str
    host: str
    machine: str
    pid: int
    created_unix_s: float
    heartbeat_unix_s: float

    def is_live(self, now_unix_s: float, stale_s: float) -> bool:
        """Whether this holder may still be at work."""
        if now_unix_s - self.heartbeat_unix_s > stale_s:
            return False
        return self.machine != machine_id() or _runs(self.pid, self.created_unix_s)


def machine_id() -> str:
    """Names the set of processes whose pids can be compared: this boot, this pid namespace."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        parts.append(f"boot:{round(psutil.boot_time())}")
    return "/".join(parts)


def _runs(pid: int, created_unix_s: float) -> bool:
    try:
        process = psutil.Process(pid)
        alive = process.status() != psutil.STATUS_ZOMBIE
        return alive and abs(process.create_time() - created_unix_s) <= _CREATED_TOLERANCE_S
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


class DriverLock:
    """Holds the output until `release`, the end of a `with`, or the death of the process.

    Args:
        layout: The output.
        run_id: Name of this run; None draws one.
        heartbeat_s: Interval of the signs of life, s; well below `stale_s`.
        stale_s: Age at which a heartbeat counts as none, s; the same for all drivers.
        name: File of the lock.
        wait: Waits so many seconds between looks at a heartbeat of the future.

    Raises:
        LockedError: Another live driver holds it, or got it first.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        run_id: str | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        stale_s: float = STALE_S,
        name: str = DRIVER_FILE,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._layout = layout
        self._name = name
        self._heartbeat_s = heartbeat_s
        self._stale_s = stale_s
        self._done = threading.Event()
        self._lost: Holder | None = None
        self.holder = Holder(
            run_id=run_id or secrets.token_hex(8),
            host=socket.gethostname(),
            machine=machine_id(),
            pid=os.getpid(),
            created_unix_s=psutil.Process().create_time(),
            heartbeat_unix_s=time.time(),
        )
        _take(layout, name, self.holder, stale_s, wait)
        self._thread = threading.Thread(target=self._beat, name="driver-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise LockedError where another driver has taken the output over meanwhile."""
        if self._lost is not None:
            raise LockedError(
                f"another driver took {self._layout.url()} over ({_who(self._lost)}), as this one "
                f"gave no sign of life for {self._stale_s:g} s; stop here, the other one continues"
            )

    def release(self) -> None:
        """Stop the heartbeat and remove the file if it is still ours; safe to call again."""
        self._done.set()
        self._thread.join(self._heartbeat_s)
        current = _read(self._layout, self._name)
        if current is not None and current.run_id == self.holder.run_id:
            self._layout.delete(self._name)

    def __enter__(self) -> DriverLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # An output that is away must not hide why the run ended, nor that it is done: the next
        # driver finds the holder gone.
        with suppress(StorageError):
            self.release()

    def _beat(self) -> None:
        while not self._done.wait(self._heartbeat_s):
            try:
                current = _read(self._layout, self._name)
                if current is not None and current.run_id != self.holder.run_id:
                    self._lost = current
                    return
                _write(self._layout, self._name, self.holder)
            except Exception:  # a store that is away for a moment must not end a run: beat again
                continue


def _take(
    layout: Layout, name: str, me: Holder, stale_s: float, wait: Callable[[float], object]
) -> None:
    """Get the lock, or raise LockedError.

    A dead holder X is replaced under the lock `<name>.<X>`, taken by the same function. Whoever has
    that one looks again before it writes: only while X still stands there is the place free.
    """
    if layout.create_own(name, _text(me)):
        return
    holder = _read(layout, name)
    if holder is not None and _lives(layout, name, holder, stale_s, wait):
        raise LockedError(
            f"another driver works on {layout.url()} ({_who(holder)}); "
            "wait for it, stop it, or use another output.uri"
        )
    if holder is not None:
        takeover = f"{name}.{holder.run_id}"
        _take(layout, takeover, me, stale_s, wait)
        try:
            now = _read(layout, name)
            if now is not None and now.run_id == holder.run_id:
                _write(layout, name, me)
                return
        finally:
            layout.delete(takeover)
    # The holder left while we looked, or another driver was faster: whoever creates it now has it.
    if not layout.create_own(name, _text(me)):
        raise LockedError(f"another driver just began to work on {layout.url()}")


def _lives(
    layout: Layout,
    name: str,
    holder: Holder,
    stale_s: float,
    wait: Callable[[float], object],
) -> bool:
    """Whether a holder may still be at work; one with a clock far ahead must show it."""
    if not holder.is_live(time.time(), stale_s):
        return False
    if holder.heartbeat_unix_s - time.time() <= stale_s:
        return True
    for _ in range(WATCH_LOOKS):
        wait(stale_s / WATCH_LOOKS)
        if _read(layout, name) != holder:
            return True
    return False


def _text(holder: Holder) -> bytes:
    fresh = replace(holder, heartbeat_unix_s=time.time())
    return json.dumps(asdict(fresh), indent=1).encode()


def _write(layout: Layout, name: str, holder: Holder) -> None:
    layout.write_bytes(name, _text(holder))


def _read(layout: Layout, name: str) -> Holder | None:
    """The stored holder, or None where nobody holds it."""
    try:
        return typed_json(Holder, layout.read_bytes(name))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as err:
        raise LockedError(
            f"{layout.url(name)} is not a lock file of this release ({err}); "
            "remove it if no driver works on this output"
        ) from err


def _who(holder: Holder) -> str:
    age_s = max(0.0, time.time() - holder.heartbeat_unix_s)
    return (
        f"host {holder.host}, pid {holder.pid}, run {holder.run_id}, "
        f"last sign of life {age_s:.0f} s ago"
    )
