"""A Ray of our own: on loopback, in a folder of its own, gone when the driver is.

Ray leaves a session folder for every run and, where the driver is killed, agents that live on for
most of a minute. Here both end with the driver, however it ends: `ray_reaper` waits for that beside
it, and what a killed reaper leaves, the next start removes.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from earmill.pipeline.common.errors import RunStopped
from earmill.pipeline.common.text import MESSAGE_LIMIT, named_line
from earmill.pipeline.driver.executors import ray_reaper
from earmill.pipeline.storage.retrying import store_line
from earmill.pipeline.storage.scratch import OwnedFolder, abandoned, sweep

# Features never enter the object store; Ray's own minimum is 75 MiB.
OBJECT_STORE_BYTES = 128 * 2**20
PREFIX = "earmill-ray-"
# Ray's sockets lie below its folder, and their paths have at most 107 bytes.
LONGEST_FOLDER = 42
REAPED_WITHIN_S = 20.0
_HELPERS = ("start_api_server", "start_monitor", "start_log_monitor")


@contextmanager
def private_ray(**options: Any) -> Iterator[None]:
    """Ray is initialised inside the block, and nothing of it is left behind.

    Raises:
        RunStopped: It cannot be started; no room for its folder, most likely.
    """
    import ray

    parent = _parent()
    _clear_up(parent)
    try:
        folder = OwnedFolder(PREFIX, parent)
    except OSError as error:
        raise _not_started(parent, error) from error
    reaper = _start_reaper(folder.path)
    try:
        os.environ[ray_reaper.MARK] = folder.path
        try:
            # The address is spelled out because None would look for a cluster on this machine.
            with _without_helpers():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _temp_dir=folder.path,
                    **options,
                )
        except Exception as error:  # whatever Ray raises when it does not come up
            raise _not_started(folder.path, error) from error
        finally:
            del os.environ[ray_reaper.MARK]
        yield
    finally:
        shut_down()
        _end(reaper)
        folder.let_go()
        sweep()


@contextmanager
def _without_helpers() -> Iterator[None]:
    """Ray of one machine without what serves others: the autoscaler, the printer of workers' logs,
    and the server of the dashboard, for which its start waits; two CPU seconds of imports.

    There is no option for it. A release that calls them something else starts them.
    """
    from ray._private.node import Node

    own = {name: vars(Node)[name] for name in _HELPERS if name in vars(Node)}
    for name in own:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, method in own.items():
            setattr(Node, name, method)


def _start_nothing(node: Any, **_: Any) -> None:
    pass


def shut_down() -> None:
    """`ray.shutdown` without what Ray has kept to say at the end: a dead raylet's log, for one."""
    import ray

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        ray.shutdown()


def _parent() -> str:
    wanted = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return wanted if len(wanted) + len(PREFIX) + 9 <= LONGEST_FOLDER else "/tmp"


def _clear_up(parent: str) -> None:
    """Remove what drivers and workers that were killed have left."""
    for folder in abandoned(PREFIX, parent):
        ray_reaper.reap(folder, {os.getpid()})
    sweep()


def _start_reaper(folder: str) -> subprocess.Popen[bytes]:
    reaper = subprocess.Popen(
        [sys.executable, ray_reaper.__file__, folder, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    if reaper.stdout is not None:
        reaper.stdout.readline()  # from here on it outlives whatever ends us
        reaper.stdout.close()
    return reaper


def _end(reaper: subprocess.Popen[bytes]) -> None:
    if reaper.stdin is not None:
        reaper.stdin.close()
    try:
        reaper.wait(REAPED_WITHIN_S)
    except subprocess.TimeoutExpired:
        return  # it goes on by itself


def _not_started(folder: str, error: Exception) -> RunStopped:
    if isinstance(error, OSError) and error.errno is not None:
        said, advice = store_line(error), "make room there or set TMPDIR"
    else:
        said = named_line(error)[:MESSAGE_LIMIT]
        advice = "wait if this machine is busy, or set run.executor to local, which needs no Ray"
    return RunStopped(
        f"Ray could not be started in {folder}: {said}; {advice}, then run the same command with "
        "--resume"
    )
