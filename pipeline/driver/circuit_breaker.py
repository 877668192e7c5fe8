"""Circuit breaker of a run: pauses during an outage, and a stop if the outage lasts.

While a source or an output does not answer, one shard at a time tries it, after growing pauses;
other shards wait. A shard that succeeds ends the outage. `IN_A_ROW` tries and `ENOUGH_S` seconds
without a success stop the run, which keeps its commits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

# A run stops after this many attempts in a row and this many seconds since the first.
IN_A_ROW = 3
ENOUGH_S = 90.0
# Seconds for a source that answers but has no planned row: waiting helps less.
ENOUGH_MISSING_S = 10.0
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0
ADVICE = {
    "source": "the source cannot be read",
    "missing": "every row that was tried is missing from the source",
    "output": "the output cannot be written",
    "machine": "this machine cannot go on",
}


class CircuitBreaker:
    """State of a run's outage. `verdict` is the reason for the run to stop; empty if it goes on."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.now, self._jitter = clock, jitter
        self._in_a_row = 0
        self._since = self._next_try = 0.0
        self.verdict = ""

    def met(self, kind: str, reason: str) -> float:
        """Note an attempt that met an outage, a key of ADVICE; return the pause before the next."""
        now = self.now()
        if self._in_a_row == 0:
            self._since = now
        self._in_a_row += 1
        wait_s = self.pause_s(self._in_a_row)
        self._next_try = now + wait_s
        enough_s = ENOUGH_MISSING_S if kind == "missing" else ENOUGH_S
        if self._in_a_row >= IN_A_ROW and now - self._since >= enough_s:
            advice = ADVICE.get(kind, ADVICE["machine"])
            self.verdict = (
                f"{advice}: {reason} ({self._in_a_row} attempts in a row over "
                f"{now - self._since:.0f} s)"
            )
        return wait_s

    def went_well(self) -> None:
        """Note a shard that succeeded, which ends the outage."""
        self._in_a_row, self._next_try, self.verdict = 0, 0.0, ""

    def may_start(self, busy: bool) -> bool:
        """Return True if a shard may start now; `busy` says that a shard is in flight."""
        return self._in_a_row == 0 or (not busy and self.now() >= self._next_try)

    def is_due(self, since: float, times: int) -> bool:
        """Return True if a shard that met its `times`-th outage at `since` may start again."""
        return self.now() >= since + FIRST_PAUSE_S * 2.0 ** min(times - 1, 4)

    def pause_s(self, times: int) -> float:
        """Return the pause after this many attempts; a fifth of it is random."""
        pause_s = min(FIRST_PAUSE_S * 2.0 ** (times - 1), LONGEST_PAUSE_S)
        return pause_s * (0.8 + 0.2 * self._jitter())
