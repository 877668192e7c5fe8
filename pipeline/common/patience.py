"""How a run bears an outage: who may try meanwhile, when, and when it is enough. No Ray here.

    all is well --outage--> pause --> one shard tries --done--> all is well
                              ^            | outage
                              +------------+   several in a row, for long enough: the run stops

While a source or an output is away, one shard at a time tries it, after pauses that grow; the
others wait. Any shard that goes through ends the outage. So an outage costs nothing but time, and
a lasting one ends the run with what is committed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

# A run stops after so many attempts in a row, and so long after the first of them.
IN_A_ROW = 3
ENOUGH_S = 90.0
# Where the source answers but has nothing of what was planned, waiting helps less.
ENOUGH_MISSING_S = 10.0
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0
ADVICE = {
    "source": "the source cannot be read",
    "missing": "every row that was tried is missing from the source",
    "output": "the output cannot be written",
    "machine": "this machine cannot go on",
}


@dataclass(frozen=True, slots=True)
class Outage:
    """What a shard met that is no fault of its rows.

    Args:
        kind: `source`, `missing`, `output` or `machine`.
    """

    kind: str
    reason: str


class Patience:
    """See the module.

    Args:
        clock: Monotonic seconds. jitter: A random number of [0, 1).
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._clock, self._jitter = clock, jitter
        self._in_a_row = 0
        self._since = self._next_try = 0.0
        self.verdict = ""

    def met(self, outage: Outage) -> float:
        """An attempt ended in an outage; the seconds until the next one may start."""
        now = self._clock()
        if self._in_a_row == 0:
            self._since = now
        self._in_a_row += 1
        wait_s = self.pause_s(self._in_a_row)
        self._next_try = now + wait_s
        enough_s = ENOUGH_MISSING_S if outage.kind == "missing" else ENOUGH_S
        if self._in_a_row >= IN_A_ROW and now - self._since >= enough_s:
            advice = ADVICE.get(outage.kind, ADVICE["machine"])
            self.verdict = (
                f"{advice}: {outage.reason} ({self._in_a_row} attempts in a row over "
                f"{now - self._since:.0f} s)"
            )
        return wait_s

    def went_well(self) -> None:
        """A shard went through."""
        self._in_a_row, self._next_try, self.verdict = 0, 0.0, ""

    def may_start(self, busy: bool) -> bool:
        """Whether work may be given out.

        Args:
            busy: Something is in flight somewhere.
        """
        if self._in_a_row == 0:
            return True
        return not busy and self._clock() >= self._next_try

    def is_due(self, since: float, times: int) -> bool:
        """Whether a shard that met its `times`-th outage at `since` may be tried again."""
        return self._clock() >= since + FIRST_PAUSE_S * 2.0 ** min(times - 1, 4)

    def now(self) -> float:
        """Seconds on this clock."""
        return self._clock()

    def pause_s(self, times: int) -> float:
        """The pause after the n-th time; a fifth of it is drawn."""
        pause_s = min(FIRST_PAUSE_S * 2.0 ** (times - 1), LONGEST_PAUSE_S)
        return pause_s * (0.8 + 0.2 * self._jitter())
