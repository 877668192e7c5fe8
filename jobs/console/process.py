"""Signals and standard streams of the process that runs a command.

SIGINT, SIGTERM, and SIGHUP of a closed terminal end a command. The first signal raises
`Interrupted`, so that locks and temporary files are removed; the exit code is 128 plus its number.
A second signal ends the process at once. Signals that were ignored at the start (`nohup`) stay so.

A command ends when standard output cannot be written: without a message if the pipe has no reader,
else with one line. A job whose output is lost goes on, see `console.progress.Reporter`.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO, cast

INTERRUPTED = 128 + signal.SIGINT  # Exit code of Ctrl-C.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# After a signal the process ends within this time, even if a thread or a store does not answer.
LEAVES_WITHIN_S = 10.0
# Exit codes: a shell reports 141 for a program that SIGPIPE has ended.
NOT_READ, NOT_WRITTEN = 141, 1


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command was received. A class of its own: where KeyboardInterrupt
    itself passes through some C code, Python ends the process with SIGINT later, whatever the
    signal was."""


class _State:
    is_command = False
    first: int | None = None
    is_told = False


def catch_signals() -> None:
    """Handle the signals that end a command, which this process is from now on."""
    _State.is_command = True
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def end(number: int, frame: FrameType | None = None) -> None:
    """End the command: the handler of these signals."""
    if _State.first is not None and _State.is_command:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    _State.first = number
    if _State.is_command:
        leaves = threading.Timer(LEAVES_WITHIN_S, _leave)
        leaves.daemon = True
        leaves.start()
        # An interrupted destructor or thread would print a traceback.
        sys.unraisablehook = lambda _: None
        threading.excepthook = lambda _: None
    raise Interrupted


def _leave() -> None:
    if not _State.is_told:
        os.write(2, f"earmill: {interruption()}\n".encode())
    os._exit(exit_code())


def release_signals() -> None:
    """Give the signals back to the system, because the command is over."""
    for number in ENDING:
        if signal.getsignal(number) is end:
            signal.signal(number, signal.SIG_DFL)


def exit_code() -> int:
    return 128 + (_State.first or signal.SIGINT)


def interruption() -> str:
    """Return the message of an interrupted command; the caller prints it."""
    _State.is_told = True
    number = _State.first or signal.SIGINT
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"


class OutputLost(Exception):
    def __init__(self, error: Exception) -> None:
        is_closed = isinstance(error, OSError) and error.errno == errno.EBADF
        cause = "it is closed" if is_closed else getattr(error, "strerror", None) or error
        super().__init__(f"cannot write to standard output: {cause}")
        self._exit_code = NOT_READ if isinstance(error, BrokenPipeError) else NOT_WRITTEN

    def tell(self) -> int:
        """Return the exit code; print the message unless the pipe has no reader."""
        if self._exit_code != NOT_READ:
            print(f"earmill: {self}", file=sys.stderr, flush=True)
        return self._exit_code


class _Stream:
    """A text stream whose failed writes raise `OutputLost`, or are ignored on standard error."""

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


def guard_streams() -> None:
    """Open closed standard streams on the null device, and watch the writes to all of them. Else
    the first file that the process opens would get the number of a closed stream, and the messages
    of a library would be written to that file."""
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            # Standard output for reading only, so that a write fails as on a closed stream.
            os.set_inheritable(os.open(os.devnull, flags), True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)
    output = sys.stdout or open(1, "w", closefd=False)
    errors = sys.stderr or open(2, "w", closefd=False)
    sys.stdout = cast(TextIO, _Stream(output, is_output=True))
    sys.stderr = cast(TextIO, _Stream(errors, is_output=False))
