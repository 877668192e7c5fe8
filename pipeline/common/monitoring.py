"""Measurements of a process: CPU seconds by part of the work, times of stages, counters.

    with doing("decode", tally):  # Counts this thread's time for the tally.
        with doing("hash"):  # Counts it as another part of the same tally.
            ...

A thread's time belongs to its innermost part, so parts add up to the time spent. Threads of kernels
count for the part and the model that called the kernel. Threads of other libraries (torch, Zarr)
count for the kind of part in which they were first seen, and are read when such a part ends. Time
that no part claims is `other`. Stages (`StageTimes`) overlap, so their times do not add up.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from earmill.pipeline.common.errors import chain, http_status, is_outage

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# Parts of a worker's time, in the order in which a clip goes through them.
Part = Literal["fetch", "decode", "resample", "model", "encode", "check", "hash", "commit", "other"]
PARTS: tuple[Part, ...] = get_args(Part)
# Parts of a job beside its workers: its own process, idle cores.
DRIVER, IDLE = "driver", "idle"

# Kinds of parts that the threads of libraries count for.
Libraries = Literal["models", "files", ""]
_TASKS = "/proc/self/task"


class CpuSeconds:
    """CPU seconds by part, counted in `whole` as well. Safe in several threads."""

    def __init__(self, whole: CpuSeconds | None = None) -> None:
        self._whole, self._lock = whole, threading.Lock()
        self._seconds = defaultdict[tuple[str, str], float](float)  # Key: part, model or "".

    def add(self, part: str, seconds: float, model: str = "") -> None:
        with self._lock:
            self._seconds[part, model] += seconds
        if self._whole is not None:
            self._whole.add(part, seconds, model)

    def seconds(self) -> dict[str, float]:
        return self._sums(0)

    def of_models(self) -> dict[str, float]:
        """Return CPU seconds by model, of the parts that name one."""
        return self._sums(1)

    def _sums(self, index: int) -> dict[str, float]:
        """Return CPU seconds by one name of the keys."""
        sums: dict[str, float] = {}
        with self._lock:
            for key, seconds in self._seconds.items():
                if name := key[index]:
                    sums[name] = sums.get(name, 0.0) + seconds
        return sums


_known: set[int] = set()  # Threads that have used `doing`.


class _ThreadState(threading.local):
    """The part and tally of this thread, and when they began on its own clock."""

    def __init__(self) -> None:
        self.part: Part = "other"
        self.model = ""
        self.tally: CpuSeconds | None = None
        self.since_s = 0.0
        _known.add(threading.get_native_id())

    def switch(self, part: Part, tally: CpuSeconds | None, model: str) -> None:
        now_s = time.thread_time()
        if self.tally is not None:
            self.tally.add(self.part, now_s - self.since_s, self.model)
        self.part, self.tally, self.since_s, self.model = part, tally, now_s, model


_state = _ThreadState()


@contextmanager
def doing(
    part: Part, tally: CpuSeconds | None = None, *, libraries: Libraries = "", model: str = ""
) -> Iterator[None]:
    """Context in which this thread's CPU time counts for a part.

    Args:
        tally: Tally that counts; None for the tally of the part around this one, if any.
        libraries: Kind for which the threads of libraries are counted as well; empty for none.
        model: Name of the model that computes, see `CpuSeconds.of_models`.
    """
    outer = _state.part, _state.tally, _state.model
    _state.switch(part, tally or _state.tally, model)
    try:
        yield
    finally:
        if libraries and _state.tally is not None:
            _state.tally.add(part, library_threads.spent(libraries), model)
        _state.switch(*outer)


def current() -> CpuSeconds | None:
    return _state.tally


def carried(part: Part, work: Callable[P, R], model: str = "") -> Callable[P, R]:
    """Return `work` for another thread, counted there as a part of this thread's tally."""
    tally = current()

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with doing(part, tally, model=model):
            return work(*args, **kwargs)

    return call


def carried_alike(work: Callable[[], None]) -> Callable[[], None]:
    """Return `work` for another thread, counted there as this thread's part, model and tally."""
    return work if current() is None else carried(_state.part, work, _state.model)


def counted(part: Part, items: Iterable[T], tally: CpuSeconds | None) -> Iterator[T]:
    """Yield the items and close them; making each counts as a part of `tally` in any thread."""
    iterator = iter(items)
    try:
        while True:
            with doing(part, tally):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item
    finally:
        getattr(iterator, "close", lambda: None)()


class LibraryThreads:
    """CPU time of the threads that libraries start after this object was made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works_for = dict.fromkeys(_threads(), "")
        self._read_s: dict[int, float] = {}

    def begin(self) -> None:
        """Forget the time spent so far, also by threads that were not seen yet."""
        with self._lock:
            self._read_s = {thread: _thread_time(thread) for thread in _threads()}

    def spent(self, what: str) -> float:
        """Return the seconds spent for a kind since the last call; new threads count for it."""
        with self._lock:
            known = set(_known)
            self._works_for = {t: self._works_for.get(t, what) for t in _threads()}
            # Threads that have ended; the system may give their numbers to threads of libraries.
            _known.difference_update(known.difference(self._works_for))
            ours = [t for t, its in self._works_for.items() if its == what and t not in _known]
            now_s = {thread: _thread_time(thread) for thread in ours}
            before_s = {thread: self._read_s.get(thread, 0.0) for thread in ours}
            self._read_s = {t: s for t, s in self._read_s.items() if t in self._works_for} | now_s
        # A new thread may have the number of one that ended, and a lower clock.
        return sum(max(0.0, now_s[thread] - before_s[thread]) for thread in ours)


def count_process(part: Part, pid: int, before_s: float) -> float:
    """Count another process's CPU time since `before_s` for this thread; return its CPU seconds."""
    with suppress(OSError):
        # Id of a process's clock on Linux, computed as in clock_getcpuclockid.
        now_s = time.clock_gettime((~pid << 3) | 2)
        if _state.tally is not None:
            _state.tally.add(part, max(0.0, now_s - before_s))
        return max(now_s, before_s)
    return before_s


def _threads() -> list[int]:
    """Return the numbers of this process's threads; none if the system does not list them."""
    with suppress(OSError):
        return [int(name) for name in os.listdir(_TASKS)]
    return []


def _thread_time(thread: int) -> float:
    """Return the CPU seconds of a thread of this process; 0 if it is gone."""
    try:
        # Id of a thread's clock on Linux, computed as in pthread_getcpuclockid.
        return time.clock_gettime((~thread << 3) | 6)
    except OSError:
        return 0.0


library_threads = LibraryThreads()


def in_order(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by part, rounded to microseconds, in the order of PARTS."""
    ranks = {part: rank for rank, part in enumerate((*PARTS, DRIVER, IDLE))}
    parts = sorted(seconds, key=lambda part: ranks.get(part, len(ranks)))
    return {part: round(seconds[part], 6) for part in parts}


Stretch = tuple[float, float]  # (began, ended), seconds since 1970.


class StageTimes:
    """Stages of one piece of work; a stage reaches from its first mark to its last. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stretches: dict[str, Stretch] = {}

    def mark(self, stage: str, *times_s: float) -> None:
        times_s = times_s or (time.time(),)
        with self._lock:
            times_s += self._stretches.get(stage, ())
            self._stretches[stage] = (min(times_s), max(times_s))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began_s = time.time()
        try:
            yield
        finally:
            self.mark(name, began_s, time.time())

    def during(self, stage: str, items: Iterable[T]) -> Iterator[T]:
        with self.stage(stage):
            yield from items

    def stretches(self) -> dict[str, Stretch]:
        with self._lock:
            return dict(sorted(self._stretches.items(), key=lambda entry: entry[1]))


@dataclass(frozen=True, slots=True)
class Counts:
    retries: Mapping[tuple[str, str], int] = field(default_factory=dict)  # Key: target, cause.
    samples: int = 0  # Samples of clips that went through the models.
    padding: int = 0  # Samples missing to the longest clip of the batch.
    queue_bytes: int = 0  # Decoded clips that wait for the models now.


class ProcessCounts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._retries = Counter[tuple[str, str]]()
        self._samples = self._padding = 0
        self._queues: weakref.WeakSet[Any] = weakref.WeakSet()

    def retried(self, what: str, error: BaseException) -> None:
        with self._lock:
            self._retries[what, cause_of(error)] += 1

    def batch(self, lengths: list[int]) -> None:
        samples = sum(lengths)
        with self._lock:
            self._samples += samples
            self._padding += max(lengths, default=0) * len(lengths) - samples

    def watch(self, queue: Any) -> None:
        with self._lock:
            self._queues.add(queue)

    def snapshot(self) -> Counts:
        with self._lock:
            waiting = sum(int(queue.waiting_bytes) for queue in self._queues)
            return Counts(dict(self._retries), self._samples, self._padding, waiting)


counts = ProcessCounts()


def cause_of(error: BaseException) -> str:
    """Return the cause of a retry in one of a few words, which can be labels of a metric."""
    status = http_status(error)
    if status is not None:
        return str(status)
    kinds = {kind.__name__ for each in chain(error) for kind in type(each).__mro__}
    if any("timeout" in kind.lower() for kind in kinds):
        return "timeout"
    if any("connect" in kind.lower() or "disconnect" in kind.lower() for kind in kinds):
        return "connection"
    is_system = any(isinstance(e, OSError) and e.errno is not None for e in chain(error))
    return "machine" if is_system and is_outage(error) else "other"
