"""The process of a command: its streams, its signals, and the exit code with which it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from earmill.jobs import signals, standard_streams

# Runs the arguments of a command line and returns the exit code.
CommandLine = Callable[[Sequence[str]], int]

# Objects that are made until Python looks for garbage among them. Much is made at the start that
# stays: as often as usual, looking for garbage takes a second.
SELDOM = 10_000
MEMORY = "too little memory to start; give this command more (help: earmill explain memory)"


def run_and_exit(load: Callable[[], CommandLine]) -> NoReturn:
    """Run the command line of this process and end the process.

    Args:
        load: Imports what runs the command line. It is called once streams and signals are
            guarded, because the import takes a good part of a second.
    """
    standard_streams.take_over()
    signals.catch()
    arguments, code = sys.argv[1:], 0
    try:
        run = load()
        import gc

        gc.set_threshold(SELDOM)
        code = run(arguments)
        sys.stdout.flush()
    except standard_streams.OutputLost as lost:
        code = code or lost.tell()
    except KeyboardInterrupt:
        code = _ended(arguments, signals.exit_code(), signals.what_happened())
    except MemoryError:
        code = _ended(arguments, 1, MEMORY)
    signals.let_go()
    sys.exit(code)


def _ended(arguments: Sequence[str], code: int, message: str) -> int:
    """Tell how a command ended that could not do so itself, with as little as that needs."""
    os.write(2, f"earmill: {message}\n".encode())
    if "--json" in arguments:
        import json

        event = {"event": "error", "exit_code": code, "message": message}
        print(json.dumps(event), flush=True)
    return code
