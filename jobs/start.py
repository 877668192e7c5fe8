"""Entry point of `earmill`: guards signals and streams, then imports and runs the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from earmill.jobs.console import process

# Allocations until Python's garbage collector runs. Most objects of the start live on: with the
# default of 700 the collector would take a second of the start.
GC_THRESHOLD = 10_000
MEMORY = "too little memory to start; give this command more (help: earmill explain memory)"


def main() -> NoReturn:
    process.guard_streams()
    process.catch_signals()
    arguments, code = sys.argv[1:], 0
    try:
        # Imported once streams and signals are guarded, because it takes a good part of a second.
        import gc

        from earmill.jobs.cli import run

        gc.set_threshold(GC_THRESHOLD)
        code = run(arguments)
        sys.stdout.flush()
    except process.OutputLost as lost:
        code = code or lost.tell()
    except KeyboardInterrupt:
        code = _report_end(arguments, process.exit_code(), process.interruption())
    except MemoryError:
        code = _report_end(arguments, 1, MEMORY)
    process.release_signals()
    sys.exit(code)


def _report_end(arguments: Sequence[str], code: int, message: str) -> int:
    """Print how a command ended that could not say so itself; it may have little memory left."""
    os.write(2, f"earmill: {message}\n".encode())
    if "--json" in arguments:
        import json

        event = {"event": "error", "exit_code": code, "message": message}
        print(json.dumps(event), flush=True)
    return code


if __name__ == "__main__":
    main()
