"""Workers as plain processes of this machine: nothing else is started, nothing else can be lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from earmill.pipeline.common.machine import cores
from earmill.pipeline.common.stand_in import is_interpreted
from earmill.pipeline.driver.local_process import LocalCall, LocalProcess, visible_gpus
from earmill.pipeline.driver.placement import Node
from earmill.pipeline.storage.owned_folders import sweep
from earmill.pipeline.worker.device import check_gpu

if TYPE_CHECKING:
    from earmill.pipeline.driver.executor import Hire
    from earmill.pipeline.spec.run import RunSpec
    from earmill.pipeline.worker.messages import Lost, Outcome

HERE = "this machine"


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
