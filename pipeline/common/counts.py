"""What a process counts for whoever watches it: tries again by cause, batches, bytes that wait.

Counted where it happens and always on: a try again is rare, a batch holds many clips, and what
waits is added up only when somebody asks. All but the bytes that wait only grow.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from earmill.pipeline.common.errors import Fault, chain, fault_of, http_status

# What was asked again.
SOURCE, OUTPUT = "source", "output"
TIMEOUT, CONNECTION, MACHINE, OTHER = "timeout", "connection", "machine", "other"


@dataclass(frozen=True, slots=True)
class Counts:
    """What a process has counted so far.

    Args:
        retries: (source or output, cause) to tries again.
        samples: Samples of all clips that went through the models in batches.
        padding: Samples by which these are shorter than the longest of their batch.
        queue_bytes: Of decoded clips that wait for the models now.
    """

    retries: Mapping[tuple[str, str], int] = field(default_factory=dict)
    samples: int = 0
    padding: int = 0
    queue_bytes: int = 0


class Queue(Protocol):
    """Something in which bytes wait; may be hashed and referred to weakly."""

    @property
    def waiting_bytes(self) -> int: ...


class ProcessCounts:
    """See the module; any number of threads count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._retries: dict[tuple[str, str], int] = {}
        self._samples = self._padding = 0
        self._queues: weakref.WeakSet[Queue] = weakref.WeakSet()

    def retried(self, what: str, error: BaseException) -> None:
        """Something is asked again, because of an error."""
        key = (what, cause_of(error))
        with self._lock:
            self._retries[key] = self._retries.get(key, 0) + 1

    def batch(self, lengths: list[int]) -> None:
        """A batch of clips of so many samples goes to the models."""
        samples = sum(lengths)
        with self._lock:
            self._samples += samples
            self._padding += max(lengths, default=0) * len(lengths) - samples

    def watch(self, queue: Queue) -> None:
        """Count what waits in a queue as long as it lives."""
        with self._lock:
            self._queues.add(queue)

    def snapshot(self) -> Counts:
        """All of it now."""
        with self._lock:
            waiting = sum(queue.waiting_bytes for queue in self._queues)
            return Counts(dict(self._retries), self._samples, self._padding, waiting)


counts = ProcessCounts()


def cause_of(error: BaseException) -> str:
    """Why something is worth another try, in one word: an HTTP status, timeout, connection, ...

    A small set, so that it can be a label.
    """
    status = http_status(error)
    if status is not None:
        return str(status)
    kinds = {kind.__name__ for one in chain(error) for kind in type(one).__mro__}
    if any("timeout" in kind.lower() for kind in kinds):
        return TIMEOUT
    if any("connect" in kind.lower() or "disconnect" in kind.lower() for kind in kinds):
        return CONNECTION
    is_system = any(isinstance(one, OSError) and one.errno is not None for one in chain(error))
    return MACHINE if is_system and fault_of(error) is Fault.OUTAGE else OTHER
