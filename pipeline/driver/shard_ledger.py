"""State of every shard of a run: pending, waiting, suspect, searched, done or given up.

    pending ---> in flight ---> done
       ^            | outage
       +--waiting---+                      not counted; `breaker` ends the run if it lasts
       ^            | lost, hung or failed
       +--suspect---+                      a suspect runs alone, so that the cause is certain
                    | max_attempts times
                 search ---> suspect, its culprits marked ---> done, they in quarantine

A shard is done when it has a commit record; a worker's answer only says when to look for it. So a
lost answer, a death after the commit and a second copy of a slow shard are harmless.

While a source or an output does not answer, one shard at a time tries it, after growing pauses;
other shards wait (`CircuitBreaker`). A shard that succeeds ends the outage.

A row that hangs or crashes its worker is found by bisection of its shard. A row is a culprit when
it has failed alone twice: one failure may be a lost machine, or damage by another row. With k
culprits among n rows a search takes about k (2 log2(n) + 1) probes. A group may fail although both
its halves pass, because memory adds up: then `culprits` stays empty and the caller decides.
"""

from __future__ import annotations

import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from earmill.pipeline.dataset.commit_record import READ_THREADS, Committed
from earmill.pipeline.driver import events
from earmill.pipeline.planning.shards import Shard, item_seconds
from earmill.pipeline.sources.base import Item
from earmill.pipeline.worker.messages import LostCall, Outcome, ShardOrder


class Bisection:
    """A search for the rows of a shard, in planned order, that crash or hang their worker.

    When `done` turns true, every row has passed in a probe or is a culprit: `culprits` has its
    reason.

    Example:
        >>> search = Bisection(["a", "b", "c"])
        >>> while (rows := search.next_probe()) is not None:
        ...     search.report(failed="b" in rows, reason="killed the worker")
        >>> search.culprits
        {'b': 'killed the worker'}
    """

    def __init__(self, row_ids: Sequence[str]) -> None:
        if len(set(row_ids)) != len(row_ids):
            raise ValueError("expected each row id once, got duplicates; plan again")
        self.culprits: dict[str, str] = {}
        # The row of a shard of one row has failed alone before the search.
        self._failed_once: set[str] = set(row_ids) if len(row_ids) == 1 else set()
        self._stack: list[tuple[str, ...]] = self._halves(tuple(row_ids))

    @property
    def done(self) -> bool:
        return not self._stack

    def next_probe(self) -> tuple[str, ...] | None:
        """Return the rows to run next; None when the search is over."""
        return self._stack[-1] if self._stack else None

    def report(self, *, failed: bool, reason: str = "") -> None:
        if not self._stack:
            raise ValueError("expected a running search, got a report after its end")
        rows = self._stack.pop()
        if not failed:
            return
        if len(rows) > 1:
            self._stack.extend(self._halves(rows))
        elif rows[0] in self._failed_once:
            self.culprits[rows[0]] = reason
        else:
            self._failed_once.add(rows[0])
            self._stack.append(rows)

    @staticmethod
    def _halves(rows: tuple[str, ...]) -> list[tuple[str, ...]]:
        # The group as a whole is known to fail, so only its halves are probed.
        if len(rows) <= 1:
            return [rows] if rows else []
        middle = len(rows) // 2
        return [rows[middle:], rows[:middle]]


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


@dataclass(eq=False, slots=True)
class ShardWork:
    shard: Shard
    attempts: int = 0  # Failures certainly caused by the shard, since the last search.
    failures: int = 0  # All failed attempts.
    fruitless: int = 0  # Searches without a culprit, and probes that found no room to write.
    copies: int = 0  # Calls in flight; two while a slow shard is tried a second time.
    worker: int | None = None  # Index of the slot where an attempt ended last.
    outages: int = 0  # Number of outages that the shard met.
    waits_since: float = 0.0  # Time of the last outage.
    memory_share: float = 1.0  # Part of the usual memory for the next attempt.
    culprits: dict[str, str] = field(default_factory=dict)  # Row id to reason, for quarantine.
    search: Bisection | None = None

    @property
    def shard_id(self) -> str:
        return self.shard.shard_id

    def order(self, witnesses: Sequence[Item] = ()) -> ShardOrder:
        return ShardOrder(
            shard=self.shard,
            attempt=secrets.token_hex(4),
            attempts=self.failures + 1,
            culprits=dict(self.culprits),
            witnesses=tuple(witnesses),
            memory_share=self.memory_share,
        )


@dataclass(frozen=True, slots=True)
class Assignment:
    work: ShardWork
    probe: tuple[Item, ...] | None = None  # Rows that are run but not published.
    alone: bool = False  # No other shard may be on the worker meanwhile.

    @property
    def seconds(self) -> float:
        if self.probe is None:
            return self.work.shard.seconds
        return sum(item_seconds(item) for item in self.probe)

    @property
    def rows(self) -> int:
        return self.work.shard.rows if self.probe is None else len(self.probe)


# A shard is given up after two searches without a culprit: the first may have met a lost node.
FRUITLESS_SEARCHES = 2
# A shard that ran out of memory is tried with a quarter of it, down to a sixteenth of the usual.
LESS_MEMORY, LEAST_MEMORY = 1 / 4, 1 / 16
WITNESSES = 4  # Readable rows that travel with an order, to test the source.


@dataclass(slots=True)
class Result:
    done: dict[str, Committed] = field(default_factory=dict)  # Commits by shard id.
    failed: dict[str, str] = field(default_factory=dict)  # Shard id to reason.
    fatal: str = ""  # Why nothing more was tried; empty if everything was.
    stopped: bool = False  # The run was asked to stop.
    left_to_others: int = 0  # Shards that other drivers have.
    seconds: float = 0.0  # Audio of the good rows that this run committed.
    worked_s: float = 0.0  # Time from the first warm worker to the end.
    cpu_s: dict[str, float] = field(default_factory=dict)  # CPU seconds of that time.


class ShardLedger:
    """All shards of a run and the rules by which they move to `result.done` or `result.failed`.
    `committed` reads a shard's commit record, in any thread. Rows that an earlier run could read
    are `witnesses`."""

    def __init__(
        self,
        shards: Iterable[Shard],
        committed: Callable[[str], Committed | None],
        *,
        max_attempts: int,
        sink: events.Sink = events.ignore,
        breaker: CircuitBreaker | None = None,
        witnesses: Iterable[Item] = (),
    ) -> None:
        self._committed = committed
        self._readers = ThreadPoolExecutor(READ_THREADS, "commits")
        self._begun: dict[str, Future[Committed | None]] = {}
        self._max_attempts, self._sink = max_attempts, sink
        self._breaker = breaker or CircuitBreaker()
        self.witnesses = deque(witnesses, maxlen=WITNESSES)
        self._pending = deque(ShardWork(shard) for shard in shards)
        self._waiting: deque[ShardWork] = deque()
        self._suspects: deque[ShardWork] = deque()
        self._searches: deque[ShardWork] = deque()
        self._n_shards = len(self._pending)
        self.more_to_come = False
        self.result = Result()

    def add(self, shard: Shard) -> None:
        self._pending.append(ShardWork(shard))
        self._n_shards += 1

    @property
    def pending(self) -> int:
        """Number of shards that no worker has begun."""
        return len(self._pending)

    def states(self) -> dict[str, int]:
        """Return state to number of shards; waiting is for the end of an outage."""
        found = {
            "pending": len(self._pending),
            "waiting": len(self._waiting),
            "suspect": len(self._suspects),
            "searched": len(self._searches),
            "done": len(self.result.done),
            "failed": len(self.result.failed),
        }
        return found | {"in_flight": max(0, self._n_shards - sum(found.values()))}

    @property
    def all_settled(self) -> bool:
        return self.unsettled == 0 and not self.more_to_come

    @property
    def unsettled(self) -> int:
        return self._n_shards - len(self.result.done) - len(self.result.failed)

    @property
    def nothing_waits(self) -> bool:
        return not (self._pending or self._waiting or self._suspects or self._searches)

    def next(self, *, idle: bool, busy: bool = False) -> Assignment | None:
        """Take the next work; None while there is none, or during an outage. Suspects and probes
        need an `idle` worker, and come last so that good shards do not wait. `busy`: a worker has
        work."""
        if not self._breaker.may_start(busy):
            return None
        if self._pending:
            return Assignment(self._pending.popleft())
        for work in self._waiting:
            alone = work.failures > 0
            if (idle or not alone) and self._breaker.is_due(work.waits_since, work.outages):
                self._waiting.remove(work)
                return Assignment(work, alone=alone)
        if idle and self._suspects:
            return Assignment(self._suspects.popleft(), alone=True)
        if idle and self._searches:
            work = self._searches.popleft()
            wanted = set((work.search.next_probe() if work.search else None) or ())
            items = tuple(item for item in work.shard.items if item.row_id in wanted)
            return Assignment(work, probe=items, alone=True)
        return None

    def put_back(self, work: ShardWork) -> None:
        """Put a shard back, without a failure, that was lost with its node or a hung neighbour."""
        work.copies -= 1
        if not self._is_settled(work) and not work.copies:
            (self._suspects if work.failures else self._pending).appendleft(work)

    def look_ahead(self, works: Iterable[ShardWork]) -> None:
        """Begin to read the commit records of shards for which `shard_ended` is called next. On a
        store, one read after the other would limit a job to some tens of shards a second. Earlier
        reads are dropped, because they may be older than the attempts."""
        names = {work.shard_id for work in works if not self._is_settled(work)}
        self._begun = {}
        if len(names) > 1:
            self._begun = {name: self._readers.submit(self._committed, name) for name in names}

    def shard_ended(self, work: ShardWork, outcome: Outcome, *, certain: bool = True) -> None:
        """Take the result of an attempt on a whole shard; `work.copies` no longer counts it. It is
        `certain` if the shard was alone on its worker, or the worker named it. A loss that is not
        `certain` makes the shard a suspect, but is not counted as a failure of the shard."""
        if self._is_settled(work) or self._complete(work):
            return
        if outcome.outage and not work.copies:
            work.outages, work.waits_since = work.outages + 1, self._breaker.now()
            self._waiting.append(work)
            self._meet(work, outcome.outage, outcome.message)
        elif outcome.outage:
            pass  # the result of the other copy decides
        elif outcome.memory and work.memory_share > LEAST_MEMORY:
            # The shard runs again, alone and in less memory; it is no failure of its rows yet.
            work.memory_share *= LESS_MEMORY
            share = f"again with {work.memory_share:.0%} of the memory for batches"
            self._retry(work, f"{outcome.message}; {share}", "memory")
        elif isinstance(outcome, LostCall):
            self._charge(work, outcome.message, certain, "lost")
        elif outcome.stage == "publish":
            self._publish_failed(work, outcome)
        else:
            self._charge(work, outcome.message or "its commit record is missing", True)

    def probe_ended(self, work: ShardWork, outcome: Outcome) -> None:
        search = work.search
        if search is None or self._is_settled(work):
            return
        reason = outcome.message
        if outcome.outage:
            self._meet(work, outcome.outage, reason)
            self._searches.appendleft(work)
            return
        if outcome.stage == "publish":
            # The probe found no room to write, which says nothing about its rows.
            work.fruitless += 1
            if outcome.permanent:
                self._publish_failed(work, outcome)
            elif work.fruitless > FRUITLESS_SEARCHES:
                self._give_up(work, reason)
            else:
                self._searches.appendleft(work)
            return
        known = len(search.culprits)
        search.report(failed=not outcome.ok, reason=reason)
        for row_id in list(search.culprits)[known:]:
            self._sink(events.CulpritFound(work.shard_id, row_id, reason))
        if not search.done:
            self._searches.appendleft(work)
            return
        work.culprits.update(search.culprits)
        work.fruitless += not search.culprits
        work.search, work.attempts = None, 0
        self._suspects.append(work)

    def _is_settled(self, work: ShardWork) -> bool:
        return work.shard_id in self.result.done or work.shard_id in self.result.failed

    def _complete(self, work: ShardWork) -> bool:
        begun = self._begun.pop(work.shard_id, None)
        record = self._committed(work.shard_id) if begun is None else begun.result()
        if record is None:
            return False
        self.result.done[work.shard_id] = record
        self._breaker.went_well()
        if record.rows_ok and not record.rows_bad:
            self.witnesses.append(smallest(work.shard))
        self.result.seconds += record.seconds
        self._sink(
            events.ShardDone(
                shard_id=work.shard_id,
                rows_ok=record.rows_ok,
                rows_bad=record.rows_bad,
                seconds=work.shard.seconds,
                nbytes=record.nbytes,
                audio_s=record.seconds,
                worker=work.worker,
                bad_by_class=dict(record.bad_by_class),
            )
        )
        return True

    def _meet(self, work: ShardWork, kind: str, reason: str) -> None:
        pause_s = round(self._breaker.met(kind, reason), 3)
        self._sink(events.ShardWaits(work.shard_id, reason, pause_s, work.worker, kind))
        self.result.fatal = self.result.fatal or self._breaker.verdict

    def _charge(self, work: ShardWork, reason: str, certain: bool, cause: str = "rows") -> None:
        work.attempts += certain
        if work.copies or work.attempts < self._max_attempts:
            self._retry(work, reason, cause)
            return
        work.failures += 1
        self._tell_retry(work, reason, cause)
        rows = [item.row_id for item in work.shard.items if item.row_id not in work.culprits]
        if work.fruitless >= FRUITLESS_SEARCHES:
            why = "no row fails alone: try a smaller output.shard_seconds"
            if not rows:
                why = "it still fails with all its rows in quarantine"
            self._give_up(work, f"{reason}; {why}")
        elif rows:
            work.search = Bisection(rows)
            self._searches.append(work)
            self._sink(events.BisectStarted(work.shard_id, len(rows)))
        else:
            # No row is left to search: the failure may not come again.
            work.fruitless, work.attempts = work.fruitless + 1, 0
            self._suspects.append(work)

    def _retry(self, work: ShardWork, reason: str, cause: str) -> None:
        """Count a failed attempt and try again alone, unless another copy will decide."""
        work.failures += 1
        if not work.copies:
            self._tell_retry(work, reason, cause)
            self._suspects.append(work)

    def _publish_failed(self, work: ShardWork, outcome: Outcome) -> None:
        if outcome.permanent:
            self.result.fatal = f"shard {work.shard_id} cannot be written: {outcome.message}"
        if outcome.permanent or work.failures + 1 >= self._max_attempts:
            self._give_up(work, outcome.message)
        else:
            self._retry(work, outcome.message, "publish")

    def _tell_retry(self, work: ShardWork, reason: str, cause: str) -> None:
        self._sink(events.ShardRetry(work.shard_id, work.failures, reason, work.worker, cause))

    def _give_up(self, work: ShardWork, reason: str) -> None:
        self.result.failed[work.shard_id] = reason
        self._sink(events.ShardFailed(work.shard_id, reason, work.worker))


def smallest(shard: Shard) -> Item:
    """Return the smallest row of a shard, which is read fastest."""
    return min(shard.items, key=lambda item: float("inf") if item.size is None else item.size)
