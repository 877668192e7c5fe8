"""Threads that take their turns in the order in which they lined up."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Turns:
    """One caller at a time, in the order of arrival, for a part of what they do.

    Example:
        >>> turns = Turns()
        >>> with turns.line_up() as my_turn:
        ...     my_turn()  # returns when everyone who lined up before has left
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[Any] = deque()

    @contextmanager
    def line_up(self) -> Iterator[Callable[[], None]]:
        """A place in the line until the block ends; call the value to wait for the turn."""
        me = object()
        with self._changed:
            self._line.append(me)

        def wait() -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._line[0] is me)

        try:
            yield wait
        finally:
            with self._changed:
                self._line.remove(me)
                self._changed.notify_all()
