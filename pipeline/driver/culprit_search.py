"""Which rows of a shard kill their worker: a search by halves that asks for one probe at a time.

The search owns no process. The driver loop asks `next_probe`, runs those rows alone in a worker
that may die of it, and reports what happened. A row is a culprit when it failed alone twice: once
may be a lost machine or the late death of a worker that another row had wounded, and no good row
may be thrown away for that. With k culprits among n it takes about k (2 log2(n) + 1) probes. A
group that fails while both its halves pass has no culprit (memory, for one, adds up over rows):
then `culprits` stays empty and the caller decides.
"""

from __future__ import annotations

from collections.abc import Sequence


class Bisection:
    """State of one search.

    Args:
        row_ids: The suspects, in planned order, each once.
    Attributes:
        culprits: Row id -> why, for every row that failed alone twice; in planned order.
    Invariants:
        Every row either passed in some probe, or is a culprit, before `done` turns true.
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
        # A shard of one row has failed alone before the search began.
        self._failed_once: set[str] = set(row_ids) if len(row_ids) == 1 else set()
        self._stack: list[tuple[str, ...]] = self._halves(tuple(row_ids))

    @property
    def done(self) -> bool:
        """Nothing is left to probe."""
        return not self._stack

    def next_probe(self) -> tuple[str, ...] | None:
        """The rows to run next, None when the search is over."""
        return self._stack[-1] if self._stack else None

    def report(self, *, failed: bool, reason: str = "") -> None:
        """Take the result of the probe that `next_probe` named."""
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
        # The group as a whole is known to fail, so it is never probed; a row alone has no halves.
        if len(rows) <= 1:
            return [rows] if rows else []
        middle = len(rows) // 2
        return [rows[middle:], rows[:middle]]
