"""Too little memory, in whatever class and words a library says it."""

from __future__ import annotations

import errno

from earmill.pipeline.common.faults import chain
from earmill.pipeline.common.one_line import named_line

# Python and numpy raise MemoryError; torch, the loader of shared libraries and C++ have words.
WORDS = (
    "allocate memory",
    "bad_alloc",
    "can't start new thread",
    "failed to map segment",
    "out of memory",
    "unable to allocate",
)
# For a process that the system has killed, as far as anybody can tell.
TOO_LITTLE = "most likely too little memory: give the machine more, or set fewer run.workers"
# EAGAIN is what the system says of one process or thread too many.
_ERRNOS = (errno.ENOMEM, errno.EAGAIN)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception, or one that it was raised from, says that memory ran out."""
    return any(map(_says_so, chain(error)))


def memory_text(error: BaseException) -> str:
    """Return a line for people: what happened, and what to do."""
    return (
        f"too little memory: {named_line(error)}; give this command more (`ulimit -v`, `ulimit "
        "-u`, the limit of its container or batch job), or let it take less: fewer run.workers, "
        "a smaller output.shard_seconds"
    )


def speaks_of_memory(text: str) -> bool:
    """Return True if the last words of a process say that memory ran out."""
    said = text.lower()
    return any(word in said for word in WORDS)


def _says_so(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _ERRNOS
    if not isinstance(error, RuntimeError | ImportError | OSError):
        return False
    return speaks_of_memory(str(error))
