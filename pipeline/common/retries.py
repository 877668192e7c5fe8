"""Retry policy: backoff with jitter, for a budget of seconds. A budget is in seconds, not in tries,
because one call may take a millisecond or a minute. A store's Retry-After is obeyed; if it is past
the budget, there is no further try. A store that never answers is asked `SILENT_TRIES` times, as
its address is probably wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from earmill.pipeline.common.errors import http_status, retry_after_s
from earmill.pipeline.common.monitoring import counts

T = TypeVar("T")
SILENT_TRIES = 4
# The budget of each job that is under way in this process.
_jobs: dict[object, float | None] = {}


@contextmanager
def patient(budget_s: float | None = None) -> Iterator[None]:
    """Context in which calls in this process belong to a job. `budget_s` replaces the budget of
    every policy; None leaves each its own."""
    me = object()
    _jobs[me] = budget_s
    try:
        yield
    finally:
        del _jobs[me]


def in_a_job() -> bool:
    return bool(_jobs)


class Waits:
    """Waits for a store that are under way in this process."""

    def __init__(self) -> None:
        self._began_s: dict[object, float] = {}  # By an object of each wait.

    @contextmanager
    def waiting(self) -> Iterator[None]:
        me = object()
        self._began_s[me] = time.monotonic()
        try:
            yield
        finally:
            del self._began_s[me]

    def longest_s(self) -> float:
        """Return the age of the oldest wait, retries included, in s; 0 without a wait."""
        began_s = min(self._began_s.copy().values(), default=None)
        return 0.0 if began_s is None else time.monotonic() - began_s


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    budget_s: float  # Seconds in which further tries may start; 0 tries once.
    first_s: float = 0.2  # Pause before the second try; it doubles with each try.
    longest_s: float = 8.0  # Longest pause.
    what: str = "other"  # Target of the call in `counts`.
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random  # Random number in [0, 1).

    def run(
        self, work: Callable[[], T], worth_it: Callable[[Exception], bool], *, is_known: bool = True
    ) -> T:
        """Return the value of `work`; after an error it is tried again if that is `worth_it`. The
        store is known if it has answered before."""
        began, pause_s, silent = self.clock(), self.first_s, 0
        # A copy, because other threads add and remove jobs.
        budgets = [budget_s for budget_s in [*_jobs.values()] if budget_s is not None]
        budget_s = max(budgets, default=self.budget_s)
        while True:
            try:
                return work()
            except Exception as error:
                # Half of the pause is random, so that many readers do not come back at once.
                wait_s = pause_s * (0.5 + self.jitter() / 2) + retry_after_s(error)
                silent += not is_known and http_status(error) is None
                out_of_time = self.clock() + wait_s - began > budget_s
                if out_of_time or silent >= SILENT_TRIES or not worth_it(error):
                    raise
                counts.retried(self.what, error)
            self.sleep(wait_s)
            pause_s = min(2 * pause_s, self.longest_s)
