"""Trying again: with growing, jittered pauses, for so many seconds and no longer.

What is worth another try is the caller's to say. A budget is in seconds, not in tries, because
backends try again themselves and one call may take a millisecond or a minute. A store that says
when to come back (Retry-After) is left alone until then; where that is past the budget, nobody asks
again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from earmill.pipeline.common.counts import OTHER, counts
from earmill.pipeline.common.errors import retry_after_s

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retries:
    """A policy.

    Args:
        budget_s: No try starts later than this after the first; 0 tries once.
        first_s: Pause before the second try; doubled each time up to `longest_s`.
        what: Counted as this, by cause, in `common.counts`.
        clock, sleep, jitter: Monotonic seconds, waiting, and a random number of [0, 1).
    """

    budget_s: float
    first_s: float = 0.2
    longest_s: float = 8.0
    what: str = OTHER
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    jitter: Callable[[], float] = random.random

    def run(self, work: Callable[[], T], worth_it: Callable[[Exception], bool]) -> T:
        """The value of `work`, or its last exception once the budget is spent or not worth it."""
        began, pause_s = self.clock(), self.first_s
        while True:
            try:
                return work()
            except Exception as error:
                # Half of the pause is drawn: many readers of one store must not come back at once.
                wait_s = pause_s * (0.5 + self.jitter() / 2)
                wait_s += retry_after_s(error)
                out_of_time = self.clock() + wait_s - began > self.budget_s
                if out_of_time or not worth_it(error):
                    raise
                counts.retried(self.what, error)
            self.sleep(wait_s)
            pause_s = min(2 * pause_s, self.longest_s)
