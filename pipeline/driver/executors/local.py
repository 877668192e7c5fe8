"""Workers as plain processes of this machine: nothing else is started, nothing else can be lost.

A process is a fresh Python that is told what to import: no copy of the driver, whose threads and
locks it would inherit, and none of its main module. Calls go out by a thread of their own, because
a worker that is frozen reads nothing, and the driver must not wait for it.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.errors import TOO_LITTLE, speaks_of_memory
from earmill.pipeline.common.machine import cores, is_interpreted
from earmill.pipeline.common.text import one_line
from earmill.pipeline.driver.executors.base import KEPT_MEMORY
from earmill.pipeline.driver.placement import Node
from earmill.pipeline.storage.scratch import sweep
from earmill.pipeline.worker.device import check_gpu
from earmill.pipeline.worker.messages import Lost, Outcome, Runner

if TYPE_CHECKING:
    from earmill.pipeline.driver.executors.base import Hire
    from earmill.pipeline.spec.job import RunSpec

HERE = "this machine"
# The child's own command line: where to look for modules, then what to run. Garbage is looked for
# once the worker is warm.
COMMAND = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[2:]; "
    "from earmill.pipeline.worker.process import serve; serve(int(sys.argv[1]))"
)
# What a process says on standard error is kept for its last words only.
LAST_WORDS_BYTES = 4096
MOST_SAID_BYTES = 2**20
# From the end of what a process sends to its own end.
ENDS_WITHIN_S = 5.0


class LocalExecutor:
    """See the module."""

    is_private = True

    def check(self, run: RunSpec) -> None:
        """Refuse `cuda` on a machine without a GPU.

        Raises:
            DeviceError: It has none that works.
        """
        if run.device == "cuda":
            check_gpu()

    @contextmanager
    def session(self, run: RunSpec, say: Callable[[str], None]) -> Iterator[LocalSession]:
        """This machine; its workers are killed by whoever started them."""
        sweep()  # what drivers and workers that were killed have left
        yield LocalSession(run)
        sweep()


class LocalSession:
    """This machine as the only node.

    Args:
        run: Says whether GPUs count.
    """

    def __init__(self, run: RunSpec) -> None:
        gpus = visible_gpus() if run.gpus_wanted else []
        stand_ins = int(is_interpreted() and bool(run.gpus_wanted))
        self._gpus = gpus
        self.is_here = True
        self._node = Node(HERE, cores(), len(gpus) or stand_ins)

    def nodes(self) -> list[Node]:
        """One."""
        return [self._node]

    def seen(self) -> None:
        """None comes or goes."""

    def workers(self, hire: Callable[[int], Hire]) -> LocalWorkers:
        """Processes; see `Session`."""
        return LocalWorkers(hire, self._gpus)

    def check(self) -> None:
        """This machine is there as long as this process is."""


class LocalWorkers:
    """Processes as `Workers`.

    Args:
        hire: Describes the worker of a place.
        gpus: What CUDA_VISIBLE_DEVICES may name; workers on GPUs take turns at them.
    """

    def __init__(self, hire: Callable[[int], Hire], gpus: Sequence[str] = ()) -> None:
        self._hire, self._gpus = hire, gpus
        self._processes: list[LocalProcess] = []
        self._ended: list[tuple[LocalCall, Outcome | Lost]] = []

    def start(self, index: int) -> LocalProcess:
        """A process; on a GPU it sees no other."""
        hire = self._hire(index)
        environment = hire.environment
        if hire.place.num_gpus and self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[index % len(self._gpus)]
        process = LocalProcess(hire.make_runner, environment, hire.shards)
        self._processes.append(process)
        return process

    def call(self, worker: LocalProcess, kind: str, *args: object) -> LocalCall:
        """The call, which is on its way."""
        return worker.call(kind, args)

    def ended(
        self, calls: Collection[LocalCall], timeout_s: float
    ) -> Iterator[tuple[LocalCall, Outcome | Lost]]:
        """Calls whose answers have come, and all calls of processes that died."""
        if not self._read(timeout_s):
            return
        ended, self._ended = self._ended, []
        yield from ended

    def kill(self, worker: LocalProcess) -> None:
        """Kill the process; its calls are forgotten."""
        worker.kill()
        self._processes.remove(worker)

    def others_cpu_s(self, pids: Collection[int]) -> dict[int, float]:
        """Nothing is between driver and workers."""
        return {}

    def _read(self, timeout_s: float) -> bool:
        by_connection = {
            process.connection: process for process in self._processes if process.is_running
        }
        if not by_connection:
            time.sleep(timeout_s)
        for ready in wait(list(by_connection), timeout_s) if by_connection else ():
            self._ended += by_connection[ready].read()  # type: ignore[index]
        return bool(self._ended)


@dataclass(eq=False, slots=True)
class LocalCall:
    """A call on its way to a process, or there."""

    number: int


class LocalProcess:
    """A worker; its process is started by the first call, and by the next one where it has died.

    Args:
        make_runner: Builds its work; must pickle. environment: Variables of the process.
        shards: Calls that run at a time.
    """

    def __init__(
        self, make_runner: Callable[[], Runner], environment: Mapping[str, str], shards: int
    ) -> None:
        self._begin = (pickle.dumps(make_runner), shards)
        self._environment = KEPT_MEMORY | os.environ | dict(environment)
        self._calls: dict[int, LocalCall] = {}
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._last_words = tempfile.TemporaryFile(buffering=0)

    @property
    def is_running(self) -> bool:
        """Started, and not known to be dead."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return None if self._process is None else self._process.pid

    def call(self, kind: str, args: tuple[object, ...]) -> LocalCall:
        """Send a call; where the process has died meanwhile, `read` says so."""
        if self._process is None:
            self._start()
        self._number += 1
        call = LocalCall(self._number)
        self._calls[call.number] = call
        self._send((call.number, kind, pickle.dumps(args)))
        return call

    def read(self) -> list[tuple[LocalCall, Outcome | Lost]]:
        """What has come: answers, or the loss of all calls. Call it when there is something."""
        ended: list[tuple[LocalCall, Outcome | Lost]] = []
        try:
            while self.connection.poll():
                number, outcome = self.connection.recv()
                ended.append((self._calls.pop(number), outcome))
        except (EOFError, OSError):
            return ended + self._lost()
        if os.fstat(self._last_words.fileno()).st_size > MOST_SAID_BYTES:
            self._last_words.truncate(0)
        return ended

    def kill(self) -> None:
        """End it at once and for good."""
        self._calls.clear()
        self._end()
        self._last_words.close()

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        self._last_words.truncate(0)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, str(theirs.fileno()), *sys.path],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._last_words,
                pass_fds=(theirs.fileno(),),
            )
        finally:
            theirs.close()
        self._out = ThreadPoolExecutor(1, "to-worker")
        self._send(self._begin)

    def _send(self, message: Any) -> None:
        # What the process no longer reads is lost with it.
        def send(connection: Connection[Any, Any]) -> None:
            with suppress(OSError):
                connection.send(message)

        self._out.submit(send, self.connection)

    def _lost(self) -> list[tuple[LocalCall, Outcome | Lost]]:
        why = self._end()
        # Nobody else kills a worker without a word.
        memory = why.startswith("SIGKILL") or speaks_of_memory(why)
        hint = f" ({TOO_LITTLE})" if memory else ""
        lost = Lost(f"the worker process died: {why}{hint}", memory=memory)
        calls, self._calls = list(self._calls.values()), {}
        return [(call, lost) for call in calls]

    def _end(self) -> str:
        """Make sure that it is gone; why it was."""
        process, self._process = self._process, None
        if process is None:
            return ""
        # One that closed its side is on its way out; killed, it would not tell how.
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_WITHIN_S if self._calls else 0)
        process.kill()
        code = process.wait()
        self._out.shutdown(wait=True, cancel_futures=True)
        self.connection.close()
        return self._why(code)

    def _why(self, code: int) -> str:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        size = os.fstat(self._last_words.fileno()).st_size
        said = os.pread(
            self._last_words.fileno(), LAST_WORDS_BYTES, max(0, size - LAST_WORDS_BYTES)
        )
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        return f"{how}: {one_line(lines[-1])[:200]}" if lines else how


def visible_gpus() -> list[str]:
    """Names of this machine's GPUs for CUDA_VISIBLE_DEVICES, those that are hidden left out."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = torch.cuda.device_count()
    return named.split(",")[:found] if named else [str(index) for index in range(found)]
