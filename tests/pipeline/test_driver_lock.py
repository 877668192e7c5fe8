"""One driver per output: real processes that hold the lock, die, hang, and race for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from earmill.pipeline.common.errors import LockedError, OvertakenError
from earmill.pipeline.dataset.driver_lock import (
    STALE_S,
    UNFENCED,
    DriverLock,
    DriverMembership,
    LockHolder,
    as_seen_now,
    machine_id,
    stored_text,
)
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import CREW, DRIVER_FILE
from tests.pipeline.outputs import s3_server
from tests.pipeline.stopped import let_minutes_pass
from tests.waiting import DEADLINE_S, wait_until

HOLDING = """
import sys
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.dataset.driver_lock import DriverLock

with DriverLock(Layout.open(sys.argv[1]), run_id="other", heartbeat_s=0.05):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout.open(tmp_path)


@contextmanager
def other_driver(layout: Layout) -> Iterator[subprocess.Popen[str]]:
    """A second process that holds the lock until told to stop."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, layout.root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def stored(layout: Layout) -> LockHolder:
    return LockHolder(**json.loads(layout.read_bytes(DRIVER_FILE)))


def write_holder(layout: Layout, **changes: Any) -> LockHolder:
    """A lock file of this very process, changed as told."""
    me = LockHolder(
        run_id="earlier",
        host="somewhere",
        machine=machine_id(),
        pid=os.getpid(),
        created_unix_s=psutil.Process().create_time(),
        heartbeat_unix_s=time.time(),
    )
    holder = replace(me, **changes)
    layout.write_bytes(DRIVER_FILE, stored_text(holder))
    return holder


def test_the_lock_is_held_and_released(layout: Layout) -> None:
    with DriverLock(layout) as lock:
        assert stored(layout).run_id == lock.holder.run_id
        assert stored(layout).pid == os.getpid()
        lock.check()
    assert not layout.exists(DRIVER_FILE)
    lock.release()
    with DriverLock(layout):
        pass


def test_a_second_driver_is_told_who_works_there(layout: Layout) -> None:
    with other_driver(layout) as process:
        with pytest.raises(LockedError, match=f"pid {process.pid}, run other") as caught:
            DriverLock(layout)
        assert "\n" not in str(caught.value)
        assert stored(layout).run_id == "other"
        assert process.stdin is not None
        process.stdin.write("stop\n")
        process.stdin.flush()
        assert process.wait(timeout=DEADLINE_S) == 0
    with DriverLock(layout, run_id="mine"):
        assert stored(layout).run_id == "mine"


def test_two_drivers_in_one_process_exclude_each_other(layout: Layout) -> None:
    with DriverLock(layout), pytest.raises(LockedError, match="another driver works"):
        DriverLock(layout)


@pytest.mark.chaos
def test_a_killed_driver_is_replaced_at_once(layout: Layout) -> None:
    with other_driver(layout) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=DEADLINE_S)
        assert stored(layout).run_id == "other"
        with DriverLock(layout, run_id="mine"):
            assert stored(layout).run_id == "mine"
    assert list(Path(layout.root).iterdir()) == []


@pytest.mark.chaos
def test_a_killed_driver_that_nobody_has_waited_for_is_dead_too(layout: Layout) -> None:
    with other_driver(layout) as process:
        process.send_signal(signal.SIGKILL)
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        with DriverLock(layout):
            pass


def test_the_heartbeat_goes_on(layout: Layout) -> None:
    with DriverLock(layout, heartbeat_s=0.02):
        first = stored(layout).heartbeat_unix_s
        wait_until(lambda: stored(layout).heartbeat_unix_s > first)


@pytest.mark.parametrize(
    ("changes", "live"),
    [
        ({}, True),
        ({"heartbeat_unix_s": time.time() - 3600}, False),
        ({"created_unix_s": 12345.0}, False),  # the pid was given to another process
        ({"pid": 2**22 + 1}, False),
        ({"machine": "other-host", "pid": 2**22 + 1}, True),
        ({"machine": "other-host", "heartbeat_unix_s": time.time() - 3600}, False),
    ],
    ids=["alive", "silent", "pid reused", "no such pid", "other host", "other host silent"],
)
def test_who_counts_as_gone(changes: dict[str, Any], live: bool, layout: Layout) -> None:
    write_holder(layout, **changes)
    if live:
        with pytest.raises(LockedError, match="host somewhere"):
            DriverLock(layout)
        assert stored(layout).run_id == "earlier"
    else:
        with DriverLock(layout) as lock:
            assert stored(layout).run_id == lock.holder.run_id
    assert {path.name for path in Path(layout.root).iterdir()} <= {DRIVER_FILE}


@pytest.mark.parametrize("machine", [None, "other-host"])
def test_a_heartbeat_in_the_future_does_not_lock_the_output_for_ever(
    machine: str | None, layout: Layout
) -> None:
    ahead = {"heartbeat_unix_s": time.time() + 1e6, "machine": machine or machine_id()}
    write_holder(layout, **ahead)
    waited: list[float] = []
    with DriverLock(layout, run_id="mine", wait=waited.append):
        assert stored(layout).run_id == "mine"
    assert sum(waited) == pytest.approx(STALE_S)


def test_a_live_driver_whose_clock_is_ahead_keeps_the_output(layout: Layout) -> None:
    ahead = {"heartbeat_unix_s": time.time() + 1e6, "machine": "other-host"}
    write_holder(layout, **ahead)

    def beat(_: float) -> None:
        write_holder(layout, **{**ahead, "heartbeat_unix_s": time.time() + 1e6 + 15})

    with pytest.raises(LockedError, match="host somewhere"):
        DriverLock(layout, run_id="mine", wait=beat)
    assert stored(layout).run_id == "earlier"


def test_of_many_that_find_a_dead_driver_one_gets_the_output(layout: Layout) -> None:
    racers = 8
    for turn in range(10):
        write_holder(layout, pid=2**22 + 1, run_id=f"dead{turn}")
        gate = threading.Barrier(racers)

        def race(racer: int, gate: threading.Barrier = gate) -> DriverLock | None:
            gate.wait()
            try:
                return DriverLock(layout, run_id=f"racer{racer}")
            except LockedError:
                return None

        with ThreadPoolExecutor(racers) as pool:
            held = [lock for lock in pool.map(race, range(racers)) if lock is not None]
        assert len(held) == 1
        assert stored(layout).run_id == held[0].holder.run_id
        held[0].check()
        held[0].release()


def test_a_driver_that_was_replaced_notices_and_does_not_take_it_back(layout: Layout) -> None:
    lock = DriverLock(layout, heartbeat_s=0.02)
    new = write_holder(layout, run_id="new")

    def lost() -> bool:
        try:
            lock.check()
        except LockedError as err:
            return "another command took" in str(err) and "run new" in str(err)
        return False

    wait_until(lost)
    lock.release()
    assert stored(layout) == new


def test_a_lock_file_of_another_kind_is_left_alone(layout: Layout) -> None:
    layout.write_bytes(DRIVER_FILE, b'{"run_id": "x"}')
    with pytest.raises(LockedError, match="not a lock file of this release"):
        DriverLock(layout)
    assert layout.read_bytes(DRIVER_FILE) == b'{"run_id": "x"}'


def test_it_works_on_a_bucket() -> None:
    with s3_server() as options:
        layout = Layout.open("s3://out/set", options)
        with DriverLock(layout), pytest.raises(LockedError):
            DriverLock(layout)
        write_holder(layout, pid=2**22 + 1)
        with DriverLock(layout, run_id="mine"):
            assert stored(layout).run_id == "mine"
        assert not layout.exists(DRIVER_FILE)


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


@pytest.fixture(params=["local", "s3", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, s3: dict[str, Any]) -> Layout:
    """An output on each kind of store."""
    if request.param == "s3":
        return Layout.open(f"s3://out/{tmp_path.name}", s3)
    return Layout.open(tmp_path if request.param == "local" else f"memory://{tmp_path.name}")


def test_who_has_lost_its_lock_does_not_get_it_back(place: Layout) -> None:
    """Whoever took over has ended already: nothing of it is left to be seen."""
    lock = DriverLock(place, heartbeat_s=3600)
    lock.fence.check(place)
    let_minutes_pass(place)
    with DriverLock(place, run_id="new") as new:
        with pytest.raises(OvertakenError, match="run new"):
            lock.fence.check(place)
        lock.release()
        new.fence.check(place)
    lock = DriverLock(place, heartbeat_s=0.02)
    place.delete(DRIVER_FILE)
    with pytest.raises(OvertakenError, match="or the output was removed"):
        lock.fence.check(place)
    wait_until(lambda: raises(lock.check))
    lock.release()
    assert not place.exists(DRIVER_FILE)


def test_a_member_that_gave_no_sign_of_life_is_evicted(place: Layout) -> None:
    with DriverMembership(place, run_id="frozen", heartbeat_s=3600) as frozen:
        with DriverMembership(place, run_id="alive") as alive:
            let_minutes_pass(place)
            alive_file = f"{CREW}/alive.json"
            place.write_bytes(alive_file, as_seen_now(alive.holder))
            with pytest.raises(LockedError, match="run alive"):
                DriverLock(place)
            alive.fence.check(place)
        with DriverLock(place):
            assert place.list(CREW) == []
        with pytest.raises(OvertakenError):
            frozen.fence.check(place)
    beating = DriverMembership(place, heartbeat_s=0.02)
    place.delete(f"{CREW}/{beating.holder.run_id}.json")
    wait_until(lambda: raises(beating.check))
    assert place.list(CREW) == []
    beating.release()


def raises(check: Callable[[], None]) -> bool:
    """Return True if a run finds that it was overtaken."""
    try:
        check()
    except OvertakenError:
        return True
    return False


def test_of_an_error_after_a_takeover_the_takeover_is_told(layout: Layout) -> None:
    with DriverLock(layout) as lock:
        with pytest.raises(KeyError), lock.fence.says_why(layout):
            raise KeyError("of another cause")
        write_holder(layout, run_id="new")
        with pytest.raises(OvertakenError), lock.fence.says_why(layout):
            raise KeyError("gone")
    with UNFENCED.says_why(layout):
        UNFENCED.check(layout)
