"""Signals that end a command: SIGINT of Ctrl-C, SIGTERM, and SIGHUP of a terminal that is closed.

The first one raises `Interrupted`, so that locks and temporary files go; the exit code is 128
plus its number, as a shell reports it. A second one ends the process at once. A signal that was
ignored when the process began stays ignored: `nohup` asks for that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

# Exit code of Ctrl-C.
INTERRUPTED = 128 + signal.SIGINT
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A thread in a long call, or a store that does not answer, keeps no command for longer.
LEAVES_WITHIN_S = 10.0


class Interrupted(KeyboardInterrupt):
    """A signal has come.

    A class of our own: where KeyboardInterrupt itself passes through some C code, Python ends the
    process with SIGINT later, whatever the signal was.
    """


class _State:
    """The signals of this process."""

    is_command = False
    first: int | None = None
    is_told = False


def catch() -> None:
    """Handle the signals that end a command; the process is one."""
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
        sys.unraisablehook = threading.excepthook = _ignore
    raise Interrupted


def _leave() -> None:
    if not _State.is_told:
        os.write(2, f"earmill: {what_happened()}\n".encode())
    os._exit(exit_code())


def _ignore(_: object) -> None:
    pass


def let_go() -> None:
    """Leave the signals to the system again: the command is over."""
    for number in ENDING:
        if signal.getsignal(number) is end:
            signal.signal(number, signal.SIG_DFL)


def exit_code() -> int:
    """Return the exit code of a command that was interrupted."""
    return 128 + (_State.first or signal.SIGINT)


def what_happened() -> str:
    """Return the line of a command that was interrupted, which is about to tell it."""
    _State.is_told = True
    number = _State.first or signal.SIGINT
    return "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
