"""Outages to order: a clock that only moves when somebody waits, and a store whose faults switch.

`drive` is the driver loop without Ray: a real ledger and a real worker in this process. Nothing in
here waits for real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from earmill.pipeline.common.retries import RetryPolicy
from earmill.pipeline.dataset.commit_record import Committed
from earmill.pipeline.driver import events
from earmill.pipeline.driver.shard_ledger import CircuitBreaker, Result, ShardLedger
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.sources.base import Item
from earmill.pipeline.worker.shard_runner import ShardRunner
from earmill.pipeline.worker.worker_process import ShardWorker
from tests.s3_stand_in import s3_stand_in


class Clock:
    """Seconds that pass by waiting."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def retries(self, budget_s: float = 45.0) -> RetryPolicy:
        """Return a retry policy on this clock, without jitter."""
        return RetryPolicy(budget_s, clock=self, sleep=self.sleep, jitter=lambda: 1.0)

    def breaker(self) -> CircuitBreaker:
        return CircuitBreaker(self, jitter=lambda: 1.0)


class FaultyStore:
    """A WSGI layer that answers for the store behind it while `fault` says so.

    Args:
        app: The store.
    Attributes:
        fault: Asked at every request with its path; an answer as (status line, body), or None.
        asked: Paths of all requests.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app = app
        self.fault: Callable[[str], tuple[str, bytes] | None] = lambda path: None
        self.asked: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        path = str(environ.get("PATH_INFO", ""))
        self.asked.append(path)
        answer = self.fault(path)
        if answer is None:
            return self.app(environ, start_response)
        status, body = answer
        start_response(status, [("Content-Length", str(len(body)))])
        return [b""] if environ["REQUEST_METHOD"] == "HEAD" else [body]


def s3_error(status: str, code: str) -> tuple[str, bytes]:
    """An answer as S3 gives it."""
    return status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


@contextmanager
def s3_store() -> Iterator[tuple[FaultyStore, dict[str, Any]]]:
    """A bucket `corpus` on loopback with switchable faults, and its storage options."""
    import fsspec

    stores: list[FaultyStore] = []

    def faulty(app: Callable[..., Any]) -> FaultyStore:
        stores.append(FaultyStore(app))
        return stores[0]

    with s3_stand_in(faulty) as address:
        options = {
            "key": "key",
            "secret": "hush",
            "endpoint_url": address,
            "config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 2},
        }
        fs = fsspec.filesystem("s3", **options)
        fs.mkdir("corpus")
        try:
            yield stores[0], options
        finally:
            stores[0].fault = lambda path: None
            fs.rm("corpus", recursive=True)


def drive(
    shards: list[Shard],
    runner: ShardRunner,
    committed: Callable[[str], Committed | None],
    clock: Clock,
    *,
    witnesses: tuple[Item, ...] = (),
    after: Callable[[str], None] = lambda shard_id: None,
) -> tuple[Result, list[events.Event]]:
    """All shards through one worker, as the scheduler does it.

    Args:
        after: Called with the id of each shard that was tried.
    """
    said: list[events.Event] = []
    ledger = ShardLedger(
        shards,
        committed,
        max_attempts=2,
        sink=said.append,
        breaker=clock.breaker(),
        witnesses=witnesses,
    )
    worker = ShardWorker(lambda: runner)
    while not ledger.all_settled and not ledger.result.fatal:
        one = ledger.next(idle=True)
        if one is None:
            clock.sleep(1.0)
            continue
        one.work.copies += 1
        if one.probe is None:
            outcome = worker.run(one.work.order(ledger.witnesses))
            one.work.copies -= 1
            ledger.shard_ended(one.work, outcome)
            after(one.work.shard_id)
        else:
            outcome = worker.probe(one.probe)
            one.work.copies -= 1
            ledger.probe_ended(one.work, outcome)
    return ledger.result, said
