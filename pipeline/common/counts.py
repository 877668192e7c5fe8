"""Counters of a process for monitoring: retries by cause, batches, queued bytes.

Counting is always on: a retry is rare, a batch holds many clips, and queued bytes are added up only
for a snapshot. All counters but the queued bytes only grow.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from earmill.pipeline.common.errors import ErrorKind, chain, classify, http_status

# Targets of a retry, and its causes.
SOURCE, OUTPUT = "source", "output"
TIMEOUT, CONNECTION, MACHINE, OTHER = "timeout", "connection", "machine", "other"


@dataclass(frozen=True, slots=True)
class Counts:
    """Values of the counters.

    Args:
        retries: (source or output, cause) to the number of retries.
        samples: Samples of all clips that went through the models in batches.
        padding: Samples by which these clips were shorter than the longest clip of their batch.
        queue_bytes: Bytes of decoded clips that wait for the models now.
    """

    retries: Mapping[tuple[str, str], int] = field(default_factory=dict)
    samples: int = 0
    padding: int = 0
    queue_bytes: int = 0


class Queue(Protocol):
    """A queue of bytes; it can be hashed and referred to weakly."""

    @property
    def waiting_bytes(self) -> int: ...


class ProcessCounts:
    """The counters of this process. Safe in several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._retries: dict[tuple[str, str], int] = {}
        self._samples = self._padding = 0
        self._queues: weakref.WeakSet[Queue] = weakref.WeakSet()

    def retried(self, what: str, error: BaseException) -> None:
        """Count a retry after an error."""
        key = (what, cause_of(error))
        with self._lock:
            self._retries[key] = self._retries.get(key, 0) + 1

    def batch(self, lengths: list[int]) -> None:
        """Count a batch of clips with these numbers of samples."""
        samples = sum(lengths)
        with self._lock:
            self._samples += samples
            self._padding += max(lengths, default=0) * len(lengths) - samples

    def watch(self, queue: Queue) -> None:
        """Count the bytes in a queue as long as it lives."""
        with self._lock:
            self._queues.add(queue)

    def snapshot(self) -> Counts:
        """Return the current values."""
        with self._lock:
            waiting = sum(queue.waiting_bytes for queue in self._queues)
            return Counts(dict(self._retries), self._samples, self._padding, waiting)


counts = ProcessCounts()


def cause_of(error: BaseException) -> str:
    """Return the cause of a retry in one word: an HTTP status, timeout, connection, ...

    There are few words, so that they can be labels of a metric.
    """
    status = http_status(error)
    if status is not None:
        return str(status)
    kinds = {kind.__name__ for each in chain(error) for kind in type(each).__mro__}
    if any("timeout" in kind.lower() for kind in kinds):
        return TIMEOUT
    if any("connect" in kind.lower() or "disconnect" in kind.lower() for kind in kinds):
        return CONNECTION
    is_system = any(isinstance(e, OSError) and e.errno is not None for e in chain(error))
    return MACHINE if is_system and classify(error) is ErrorKind.OUTAGE else OTHER
