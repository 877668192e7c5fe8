"""Standard output and standard error of a command, also where they are closed, full or not read.

A command that only shows something ends when it cannot: quietly where nobody reads a pipe any more,
as pipes expect, else with one line. News for a standard error that is lost are dropped. A job whose
output is lost goes on, see `jobs.progress.Unfailing`.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast

# Exit codes: a shell reports 141 for a program that SIGPIPE has ended.
NOT_READ, NOT_WRITTEN = 141, 1


class OutputLost(Exception):
    """Standard output cannot be written.

    Args:
        error: What the system said.
    """

    def __init__(self, error: Exception) -> None:
        is_closed = isinstance(error, OSError) and error.errno == errno.EBADF
        said = "it is closed" if is_closed else getattr(error, "strerror", None) or error
        super().__init__(f"cannot write to standard output: {said}")
        self._exit_code = NOT_READ if isinstance(error, BrokenPipeError) else NOT_WRITTEN

    def tell(self) -> int:
        """Say it on standard error, unless a pipe is not read any more; the exit code."""
        if self._exit_code != NOT_READ:
            print(f"earmill: {self}", file=sys.stderr, flush=True)
        return self._exit_code


class _Stream:
    """A text stream whose failed writes are `OutputLost`, or nothing on standard error."""

    def __init__(self, inner: TextIO, *, is_output: bool) -> None:
        self._inner, self._is_output = inner, is_output

    def write(self, text: str) -> int:
        try:
            return self._inner.write(text)
        except (OSError, ValueError) as error:
            self._lost(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._inner.flush()
        except (OSError, ValueError) as error:
            self._lost(error)

    def _lost(self, error: Exception) -> None:
        # The rest of the buffer would fail once more at the end of the process.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._inner.fileno())
            os.close(nowhere)
        if self._is_output:
            raise OutputLost(error) from None  # the system's error would be taken for a store's

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def take_over() -> None:
    """Open closed standard streams on nothing, and watch the writes to all of them.

    Else the first file that a process opens would get the number of a closed stream, and the
    messages of a library would land in that file.
    """
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # Standard output for reading only, so that a write fails as on a closed one.
            os.set_inheritable(os.open(os.devnull, flags), True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)
    output = sys.stdout or open(1, "w", closefd=False)
    errors = sys.stderr or open(2, "w", closefd=False)
    sys.stdout = cast(TextIO, _Stream(output, is_output=True))
    sys.stderr = cast(TextIO, _Stream(errors, is_output=False))
