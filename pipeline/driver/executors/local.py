"""Workers as new processes of this machine: a forked process would inherit locks that the driver's
threads hold. A thread for each worker sends its calls, because a frozen worker reads nothing."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from earmill.pipeline.common.errors import TOO_LITTLE, speaks_of_memory
from earmill.pipeline.common.machine import cores, is_interpreted, run_python
from earmill.pipeline.common.text import one_line
from earmill.pipeline.driver.executors import KEPT_MEMORY, Session, WorkerRequest
from earmill.pipeline.driver.placement import Node
from earmill.pipeline.spec.job import RunSpec
from earmill.pipeline.storage.scratch import sweep
from earmill.pipeline.worker.device import check_gpu
from earmill.pipeline.worker.messages import LostCall, Outcome
from earmill.pipeline.worker.shard_runner import ShardRunner

HERE = "this machine"
# Arguments are the file descriptor of the pipe and the module search path. Garbage collection
# begins once the worker is warm.
COMMAND = (
    "import gc, sys; gc.disable(); sys.path[:] = sys.argv[2:]; "
    "from earmill.pipeline.worker.worker_process import serve; serve(int(sys.argv[1]))"
)
# The end of a process's standard error is quoted when the process dies; the rest is dropped.
LAST_WORDS_BYTES = 4096
STDERR_LIMIT_BYTES = 2**20
CALL_NUMBERS = itertools.count()  # A call is a number, unique among the calls of all workers.
# Time between the closing of a worker's pipe and the end of its process, in seconds.
ENDS_WITHIN_S = 5.0


class LocalExecutor:
    def check(self, run: RunSpec) -> None:
        if run.device == "cuda":
            check_gpu()

    @contextmanager
    def session(self, run: RunSpec, say: Callable[[str], None]) -> Iterator[Session]:
        gpus = visible_gpus() if run.gpus_wanted else []
        stand_ins = int(is_interpreted() and bool(run.gpus_wanted))
        node = Node(HERE, cores(), len(gpus) or stand_ins)
        yield Session([node], lambda request_of: LocalWorkers(request_of, gpus))
        sweep()  # temporary files of killed workers


class LocalWorkers:
    """Processes as `Workers`; `gpus`, named as CUDA_VISIBLE_DEVICES has them, are dealt in turn."""

    def __init__(
        self, request_of: Callable[[int], WorkerRequest], gpus: Sequence[str] = ()
    ) -> None:
        self._request_of, self._gpus = request_of, gpus
        self._processes: list[LocalProcess] = []

    def start(self, index: int) -> LocalProcess:
        request = self._request_of(index)
        environment = request.environment
        if request.place.num_gpus and self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[index % len(self._gpus)]
        process = LocalProcess(request.make_runner, environment, request.shards)
        self._processes.append(process)
        return process

    def call(self, worker: LocalProcess, kind: str, *args: object) -> int:
        return worker.call(kind, args)

    def ended(self, calls: Collection[int], timeout_s: float) -> Iterable[tuple[int, Outcome]]:
        by_connection = {one.connection: one for one in self._processes if one.process is not None}
        if not by_connection:
            time.sleep(timeout_s)
            return ()
        ready = wait(list(by_connection), timeout_s)
        processes = [by_connection[each] for each in ready]  # type: ignore[index]
        return [ended for process in processes for ended in process.read()]

    def kill(self, worker: LocalProcess) -> None:
        worker.kill()
        self._processes.remove(worker)


class LocalProcess:
    """A worker; a call starts its process, if there is none or it has died."""

    def __init__(
        self, make_runner: Callable[[], ShardRunner], environment: Mapping[str, str], shards: int
    ) -> None:
        self._begin = (pickle.dumps(make_runner), shards)
        self._environment = KEPT_MEMORY | os.environ | dict(environment)
        self._calls: set[int] = set()
        # None before the process is started and once it is known to be dead.
        self.process: subprocess.Popen[bytes] | None = None
        self._last_words = tempfile.TemporaryFile(buffering=0)

    def call(self, kind: str, args: tuple[object, ...]) -> int:
        """Send a call; if the process has died meanwhile, `read` returns the call as lost."""
        if self.process is None:
            self._start()
        call = next(CALL_NUMBERS)
        self._calls.add(call)
        self._send((call, kind, pickle.dumps(args)))
        return call

    def read(self) -> list[tuple[int, Outcome]]:
        """Return the answers that have come, and all calls as lost if the process has died."""
        ended: list[tuple[int, Outcome]] = []
        try:
            while self.connection.poll():
                call, outcome = self.connection.recv()
                self._calls.remove(call)
                ended.append((call, outcome))
        except (EOFError, OSError):
            why = self._end()
            # The system kills for memory, and writes nothing to standard error.
            memory = why.startswith("SIGKILL") or speaks_of_memory(why)
            hint = f" ({TOO_LITTLE})" if memory else ""
            lost = LostCall(f"the worker process died: {why}{hint}", memory=memory)
            calls, self._calls = sorted(self._calls), set()
            return ended + [(call, lost) for call in calls]
        if os.fstat(self._last_words.fileno()).st_size > STDERR_LIMIT_BYTES:
            self._last_words.truncate(0)
        return ended

    def kill(self) -> None:
        self._calls.clear()
        self._end()
        self._last_words.close()

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        self._last_words.truncate(0)
        try:
            self.process = subprocess.Popen(
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
        # A process that died reads nothing; `read` reports the call as lost.
        def send(connection: Connection[Any, Any]) -> None:
            with suppress(OSError):
                connection.send(message)

        self._out.submit(send, self.connection)

    def _end(self) -> str:
        process, self.process = self.process, None
        if process is None:
            return ""
        # A process that closed its pipe is about to end; a kill would hide its exit code.
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_WITHIN_S if self._calls else 0)
        process.kill()
        code = process.wait()
        self._out.shutdown(wait=True, cancel_futures=True)
        self.connection.close()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        said_in = self._last_words.fileno()
        start = max(0, os.fstat(said_in).st_size - LAST_WORDS_BYTES)
        said = os.pread(said_in, LAST_WORDS_BYTES, start)
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        return f"{how}: {one_line(lines[-1])[:200]}" if lines else how


def visible_gpus() -> list[str]:
    """Return this process's GPUs as CUDA_VISIBLE_DEVICES names them, hidden GPUs left out."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):
        return []
    # In a process of its own, because torch takes half a gigabyte.
    found = int(run_python("counts GPUs", "import torch; print(torch.cuda.device_count())"))
    return named.split(",")[:found] if named else [str(index) for index in range(found)]
