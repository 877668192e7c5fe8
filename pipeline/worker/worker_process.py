"""A worker: it runs shards, several at a time, and answers calls of its driver over a pipe.

The first message says what to build, each later one is a call with its number, and an answer
carries the number back. The process ends with the pipe. It ignores Ctrl-C and the SIGTERM that a
batch system sends to every process, because the driver lets its workers finish their shards.
"""

from __future__ import annotations

import errno
import gc
import os
import pickle
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common import errors
from earmill.pipeline.common.monitoring import counts
from earmill.pipeline.common.text import MESSAGE_LIMIT, named_line, one_line
from earmill.pipeline.worker.messages import Outcome, PublishError, ShardNotes, ShardOrder

if TYPE_CHECKING:
    from earmill.pipeline.sources.base import Item
    from earmill.pipeline.worker.shard_runner import ShardRunner

# Writing again does not help against these errors; the run stops and says why.
PERMANENT_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
)


class ShardWorker:
    """A `ShardRunner` behind remote calls; `environment` is set before any heavy import."""

    def __init__(
        self, make_runner: Callable[[], ShardRunner], environment: Mapping[str, str] | None = None
    ) -> None:
        os.environ.update(environment or {})
        self._make_runner = make_runner
        self._runner: ShardRunner | None = None

    def warm_up(self) -> Outcome:
        # A warm worker keeps all its objects, and a collection would take a sixth of its start.
        gc.disable()
        try:
            if self._runner is None:
                self._runner = self._make_runner()
            info = self._runner.warm_up()
            gc.freeze()
            return Outcome(ok=True, info=info)
        except Exception as error:
            self._runner = None
            return _failed("warm_up", error)
        finally:
            gc.enable()

    def run(self, order: ShardOrder) -> Outcome:
        return self._guard(lambda runner: runner.run(order))

    def probe(self, items: Sequence[Item]) -> Outcome:
        return self._guard(lambda runner: runner.probe(items))

    def status(self) -> Outcome:
        if (runner := self._runner) is None:
            return Outcome(ok=True)
        return Outcome(
            ok=True,
            value=runner.seconds_in_flight(),
            outage=runner.waits_for(),
            cpu_s=runner.cpu_s(),
            counts=counts.snapshot(),
        )

    def _guard(self, work: Callable[[ShardRunner], ShardNotes | None]) -> Outcome:
        if self._runner is None:
            # Ray restarted the process without telling the driver.
            warm = self.warm_up()
            if not warm.ok or self._runner is None:
                return warm
        try:
            outcome = Outcome(ok=True, notes=work(self._runner))
        except PublishError as error:
            outcome = _failed("publish", error.__cause__ or error)
        except Exception as error:
            outcome = _failed("rows", error)
        return replace(outcome, cpu_s=self._runner.cpu_s(), counts=counts.snapshot())


def _failed(stage: str, error: BaseException) -> Outcome:
    causes = list(errors.chain(error))
    if any(isinstance(one, errors.OvertakenError) for one in causes):
        return Outcome(ok=False, stage="overtaken", message=one_line(error), permanent=True)
    if any(isinstance(one, errors.DeviceLost) for one in causes):
        return Outcome(ok=False, stage="device", message=one_line(error)[:MESSAGE_LIMIT])
    if isinstance(error, errors.DeviceError):
        return Outcome(ok=False, stage=stage, message=one_line(error), permanent=True)
    if stage == "publish" and is_permanent(error):
        return Outcome(ok=False, stage=stage, message=named_line(error), permanent=True)
    outage = outage_of(stage, error)
    if outage:
        text = one_line(error) if isinstance(error, errors.EarmillError) else named_line(error)
        full = [one for one in causes if isinstance(one, OSError) and one.errno == errno.ENOSPC]
        if any(one.filename is None for one in full):
            # The system did not name the full disk.
            text += f" (temporary files are in {tempfile.gettempdir()}, TMPDIR says where)"
        return Outcome(ok=False, stage=stage, message=text[:MESSAGE_LIMIT], outage=outage)
    return Outcome(
        ok=False,
        stage=stage,
        message=named_line(error, where=stage == "rows"),
        memory=errors.is_out_of_memory(error),
    )


def outage_of(stage: str, error: BaseException) -> str:
    """Return the kind of outage behind an exception; empty for a fault of the shard or program."""
    for one in errors.chain(error):
        if isinstance(one, errors.SourceOutage):
            return one.kind
        if isinstance(one, errors.StorageError):
            return "output"
    if stage == "publish":
        # The shard itself may be too large for memory.
        short = errors.is_out_of_memory(error)
        return "output" if errors.is_outage(error) and not short else ""
    return "machine" if errors.is_machine_fault(error) else ""


def is_permanent(error: BaseException) -> bool:
    """Return True if an I/O error will come back: no space, no right, read-only."""
    causes = errors.chain(error)
    return any(isinstance(one, OSError) and one.errno in PERMANENT_ERRNOS for one in causes)


# If memory runs out, the system kills a worker, which is started again, before its driver.
OOM_SCORE_ADJ = "500"


def serve(descriptor: int) -> None:
    """Answer calls that come through a pipe until the driver is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE_ADJ)
    os.set_inheritable(descriptor, False)
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        _answer_calls(connection)
    except (EOFError, OSError):
        # Shards in flight are worth nothing without a driver, and their threads would wait on.
        os._exit(0)


def _answer_calls(connection: Connection[Any, Any]) -> None:
    make_runner, shards = connection.recv()
    # Unpickling imports the runner's modules in the first call, where a failure becomes an answer.
    worker = ShardWorker(lambda: pickle.loads(make_runner)())
    lock = threading.Lock()

    def answer(number: int, call: Callable[..., Outcome], args: bytes) -> None:
        try:
            outcome = call(*pickle.loads(args))
        except Exception as error:  # the worker answers for what it does itself
            outcome = Outcome(ok=False, stage="rows", message=named_line(error))
        with lock, suppress(OSError):
            connection.send((number, outcome))

    # Status calls are answered while shards run.
    work, control = ThreadPoolExecutor(shards, "shards"), ThreadPoolExecutor(1, "control")
    while True:
        number, kind, args = connection.recv()
        threads = control if kind == "status" else work
        threads.submit(answer, number, getattr(worker, kind), args)
