"""Threads that take their turns in the order in which they lined up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class Turn:
    """A place in a line."""

    def __init__(self, line: deque[Turn], changed: threading.Condition) -> None:
        self._line, self._changed = line, changed
        with changed:
            line.append(self)

    def wait(self) -> None:
        """Returns when everyone who lined up before has left."""
        with self._changed:
            self._changed.wait_for(lambda: self._line[0] is self)

    def over(self) -> None:
        """Leave the line; again is no harm."""
        with self._changed:
            if self in self._line:
                self._line.remove(self)
                self._changed.notify_all()


class Turns:
    """One caller at a time, in the order of arrival, for a part of what they do.

    Example:
        >>> turns = Turns()
        >>> with turns.line_up() as turn:
        ...     turn.wait()  # returns when everyone who lined up before has left
        ...     turn.over()  # the next one may begin; the end of the block says so too
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[Turn] = deque()

    @contextmanager
    def line_up(self) -> Iterator[Turn]:
        """A place in the line, until it says that it is over or the block ends."""
        turn = Turn(self._line, self._changed)
        try:
            yield turn
        finally:
            turn.over()


def free_turn() -> Turn:
    """A turn that nobody else waits for."""
    return Turn(deque(), threading.Condition())
