"""A worker as a plain process: `ShardWorker` behind a pipe from the driver that started it.

The first message says what to build, each other one is a call with its number; answers carry the
number back. The process ends with the pipe: no driver, no worker. A terminal's Ctrl-C and the
SIGTERM that a batch system sends to every process are the driver's to handle: it lets its workers
finish what they have, as long as it is given the time.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from earmill.pipeline.common.text import named_line
from earmill.pipeline.worker.messages import Outcome, Runner
from earmill.pipeline.worker.shard_worker import ShardWorker

# Where memory runs out, the system takes a worker, which is started again, before its driver.
OOM_SCORE_ADJ = "500"


def serve(descriptor: int) -> None:
    """Answer calls until the driver is gone.

    Args:
        descriptor: Of this side of the pipe.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_ADJ)
    os.set_inheritable(descriptor, False)
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        _serve(connection)
    except (EOFError, OSError):
        # Shards in flight are worth nothing without a driver, and their threads would wait on.
        os._exit(0)


def _serve(connection: Connection[Any, Any]) -> None:
    make_runner, shards = connection.recv()

    def build() -> Runner:
        # What it needs is imported now, where a failure is an answer.
        made: Callable[[], Runner] = pickle.loads(make_runner)
        return made()

    worker = ShardWorker(build)
    lock = threading.Lock()

    def answer(number: int, call: Callable[..., Outcome], args: bytes) -> None:
        try:
            outcome = call(*pickle.loads(args))
        except Exception as error:  # the worker answers for what it does itself
            outcome = Outcome(ok=False, stage="rows", message=named_line(error))
        with lock, suppress(OSError):
            connection.send((number, outcome))

    # A question is answered while shards run.
    work, control = ThreadPoolExecutor(shards, "shards"), ThreadPoolExecutor(1, "control")
    while True:
        number, kind, args = connection.recv()
        threads = control if kind == "status" else work
        threads.submit(answer, number, getattr(worker, kind), args)
