"""Jobs whose workers are threads of this process; the driver and its scheduler are the real ones.

A new process takes four CPU seconds to import torch. Only a process can die, freeze or be stopped:
`test_scheduler.py`, `tests/jobs/test_extract_process.py` and `tests/chaos` have real workers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from earmill.pipeline.driver.executors import Session, WorkerRequest
from earmill.pipeline.driver.executors.local import LocalExecutor
from earmill.pipeline.operations import run_job as driver
from earmill.pipeline.operations.open_job import describe
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.spec.job import JobSpec, RunSpec
from earmill.pipeline.spec.models import built_models
from earmill.pipeline.worker.messages import Outcome
from earmill.pipeline.worker.shard_runner import ShardRunner, WorkerJob
from earmill.pipeline.worker.worker_process import ShardWorker


def worker_job(spec: JobSpec, plan: Plan, threads: int, folder: Path) -> WorkerJob:
    """The job of a worker, for a dataset that is not stored."""
    return WorkerJob(spec, describe(spec, plan, built_models(spec)), threads, str(folder))


class ThreadWorker:
    """A worker with threads as `worker_process.serve` has them."""

    def __init__(self, request: WorkerRequest) -> None:
        self._request, self._runners = request, list[ShardRunner]()
        self._worker = ShardWorker(self._make_runner)
        self._work = ThreadPoolExecutor(request.shards, "shards")
        self._control = ThreadPoolExecutor(1, "control")

    def _make_runner(self) -> ShardRunner:
        self._runners.append(self._request.make_runner())
        return self._runners[-1]

    def call(self, kind: str, args: tuple[Any, ...]) -> Future[Outcome]:
        """Begin a call; its errors come out of `Future.result`."""
        threads = self._control if kind == "status" else self._work
        return threads.submit(getattr(self._worker, kind), *args)

    def close(self) -> None:
        """Wait for the calls in flight, which nothing can end in a thread."""
        self._work.shutdown(wait=True, cancel_futures=True)
        self._control.shutdown(wait=True, cancel_futures=True)
        for runner in self._runners:
            if isinstance(runner, ShardRunner):  # not one of `runners.py`
                runner.close()


class ThreadWorkers:
    """Threads as `Workers`."""

    def __init__(self, request_of: Callable[[int], WorkerRequest]) -> None:
        self._request_of = request_of

    def start(self, index: int) -> ThreadWorker:
        return ThreadWorker(self._request_of(index))

    def call(self, worker: ThreadWorker, kind: str, *args: Any) -> Future[Outcome]:
        return worker.call(kind, args)

    def ended(
        self, calls: Collection[Future[Outcome]], timeout_s: float
    ) -> list[tuple[Future[Outcome], Outcome]]:
        done, _ = wait(calls, timeout_s, FIRST_COMPLETED)
        return [(call, call.result()) for call in done]

    def kill(self, worker: ThreadWorker) -> None:
        worker.close()


class _Executor(LocalExecutor):
    @contextmanager
    def session(self, run: RunSpec, say: Callable[[str], None]) -> Iterator[Session]:
        with super().session(run, say) as session:
            yield replace(session, workers=ThreadWorkers)


@contextmanager
def workers_here() -> Iterator[None]:
    """Workers of jobs are threads; a runner changes into its job's folder, which is undone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path.cwd())
        patch.setattr(driver, "executor_of", lambda *_: _Executor())
        yield
