"""CPU seconds of a process by part of the work, and wall-clock intervals of its stages.

    with doing("decode", tally):       # this thread's time from here on, for that tally
        with doing("hash"):            # from here on another part of the same tally
            ...

A thread's time belongs to the innermost part it is in, so parts never overlap and add up to what
was spent inside. Threads that libraries start for themselves (kernels, torch, Zarr) say nothing:
each works for the kind of part in which it was first seen, and is read when such a part ends. What
nobody claims is `other`. A clock is read in a microsecond: cheap enough to be always on.

`Stages` notes when the stages of a piece of work began and ended. A few readings of the clock a
shard, none a row: cheap enough to be always on. Stages overlap (a shard's first clips are in the
models while its last ones are fetched): their times do not add up.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# What a worker does, in the order in which a clip goes through it.
FETCH, DECODE, RESAMPLE, MODEL = "fetch", "decode", "resample", "model"
ENCODE, CHECK, HASH, COMMIT, OTHER = "encode", "check", "hash", "commit", "other"
PARTS = (FETCH, DECODE, RESAMPLE, MODEL, ENCODE, CHECK, HASH, COMMIT, OTHER)
# What a job adds: its own process, Ray's processes, and cores that waited.
DRIVER, RAY, IDLE = "driver", "ray", "idle"

# Whom the threads of libraries work for.
FOR_MODELS, FOR_FILES = "models", "files"
_TASKS = "/proc/self/task"


class CpuTally:
    """CPU seconds by part; any number of threads add to it.

    Args:
        whole: Another tally that gets the same.
    """

    def __init__(self, whole: CpuTally | None = None) -> None:
        self._whole, self._lock = whole, threading.Lock()
        self._seconds: dict[str, float] = {}

    def add(self, part: str, seconds: float) -> None:
        """Count seconds for a part."""
        with self._lock:
            self._seconds[part] = self._seconds.get(part, 0.0) + seconds
        if self._whole is not None:
            self._whole.add(part, seconds)

    def seconds(self) -> dict[str, float]:
        """What was counted so far; parts that are still going on lack their current stretch."""
        with self._lock:
            return dict(self._seconds)


class _Here(threading.local):
    """What this thread is doing, for whom, and since when on its own clock."""

    def __init__(self) -> None:
        self.part = ""
        self.tally: CpuTally | None = None
        self.since_s = 0.0
        self.known = _Known()

    def turn_to(self, part: str, tally: CpuTally | None) -> None:
        """Close the stretch that goes on and begin another."""
        now_s = time.thread_time()
        if self.tally is not None:
            self.tally.add(self.part, now_s - self.since_s)
        self.part, self.tally, self.since_s = part, tally, now_s


# Threads that say themselves what they do.
_known: set[int] = set()


class _Known:
    """Keeps the number of a thread among the known ones as long as it lives."""

    def __init__(self) -> None:
        self._thread = threading.get_native_id()
        _known.add(self._thread)

    # Bound now: at the end of the process modules may be gone before threads are.
    def __del__(self, forget: Callable[[int], None] = _known.discard) -> None:
        forget(self._thread)


_here = _Here()


class doing:
    """Inside, this thread's CPU time goes to a part.

    Args:
        part: One of PARTS.
        tally: Whose; None for that of the part around it, and where there is none, nobody's.
        libraries: Also count what the threads of libraries did for FOR_MODELS or FOR_FILES.
    """

    __slots__ = ("_libraries", "_outer", "_part", "_tally")

    def __init__(self, part: str, tally: CpuTally | None = None, *, libraries: str = "") -> None:
        self._part, self._tally, self._libraries = part, tally, libraries

    def __enter__(self) -> None:
        self._outer = (_here.part, _here.tally)
        _here.turn_to(self._part, self._tally or _here.tally)

    def __exit__(self, *_: object) -> None:
        if self._libraries and _here.tally is not None:
            _here.tally.add(self._part, library_threads.spent(self._libraries))
        _here.turn_to(*self._outer)


def current() -> CpuTally | None:
    """The tally that this thread counts for."""
    return _here.tally


def carried(part: str, work: Callable[P, R]) -> Callable[P, R]:
    """`work` for another thread, counted there as a part of what this thread counts for."""
    tally = current()

    @wraps(work)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with doing(part, tally):
            return work(*args, **kwargs)

    return call


def counted(part: str, items: Iterable[T], tally: CpuTally | None) -> Iterator[T]:
    """Yield the items; making each counts as a part of a tally, whichever thread takes the item.

    Args:
        part: One of PARTS.
        items: Closed with this iterator.
        tally: Gets the CPU seconds; see `current`.
    """
    made = iter(items)
    try:
        while True:
            with doing(part, tally):
                try:
                    item = next(made)
                except StopIteration:
                    return
            yield item
    finally:
        close = getattr(made, "close", None)
        if close is not None:
            close()


class LibraryThreads:
    """CPU time of the threads that nobody here has started.

    Those that are there from the beginning work for neither: Ray's, in a worker.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listed = _thread_count()
        self._works_for = dict.fromkeys(_threads(), "")
        self._read_s: dict[int, float] = {}

    def begin(self) -> None:
        """What was spent before counts for nothing, also where the thread was not seen yet."""
        with self._lock:
            self._read_s = {thread: _thread_time(thread) for thread in _threads()}
            self._listed = 0

    def spent(self, what: str) -> float:
        """Seconds spent on it since it was last asked for; threads first seen now work for it.

        Two callers at a time share what there is: none of it is counted twice.
        """
        with self._lock:
            # List the threads where there are more or fewer than at the last call. Where one has
            # ended and another begun, the new one is found with the next that begins or ends; its
            # clock then tells all that it has spent since, or since `begin`.
            count = _thread_count()
            if count != self._listed or not count:
                self._listed = count
                self._works_for = {t: self._works_for.get(t, what) for t in _threads()}
            ours = [t for t, its in self._works_for.items() if its == what and t not in _known]
            now_s = {thread: _thread_time(thread) for thread in ours}
            before_s = {thread: self._read_s.get(thread, 0.0) for thread in ours}
            self._read_s = {t: s for t, s in self._read_s.items() if t in self._works_for} | now_s
        # A thread of another one's number that ended begins at nothing again.
        return sum(max(0.0, now_s[thread] - before_s[thread]) for thread in ours)


def count_process(part: str, pid: int, before_s: float) -> float:
    """Add what another process has spent since `before_s` to what this thread counts for.

    Returns:
        What it has spent so far; `before_s` where it is gone or the system does not say.
    """
    with suppress(OSError):
        # The number of a process's clock on Linux, as clock_getcpuclockid makes it.
        now_s = time.clock_gettime((~pid << 3) | 2)
        if _here.tally is not None:
            _here.tally.add(part, max(0.0, now_s - before_s))
        return max(now_s, before_s)
    return before_s


def _thread_count() -> int:
    """How many threads this process has; a twentieth of the cost of their list. 0 for unknown."""
    with suppress(OSError):
        return os.stat(_TASKS).st_nlink - 2
    return 0


def _threads() -> list[int]:
    """Numbers of this process's threads; none where the system does not say."""
    with suppress(OSError):
        return [int(name) for name in os.listdir(_TASKS)]
    return []


def _thread_time(thread: int) -> float:
    """CPU seconds of any thread of this process; 0 for one that is gone."""
    try:
        # The number of a thread's clock on Linux, as pthread_getcpuclockid makes it.
        return time.clock_gettime((~thread << 3) | 6)
    except OSError:
        return 0.0


library_threads = LibraryThreads()


def in_order(seconds: Mapping[str, float]) -> dict[str, float]:
    """Rounded to microseconds, in the order of PARTS."""
    ranks = {part: rank for rank, part in enumerate((*PARTS, DRIVER, RAY, IDLE))}
    parts = sorted(seconds, key=lambda part: ranks.get(part, len(ranks)))
    return {part: round(seconds[part], 6) for part in parts}


# (began, ended), seconds since 1970.
Stretch = tuple[float, float]


class Stages:
    """Stages of one piece of work; any number of threads add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stretches: dict[str, Stretch] = {}

    def mark(self, stage: str, began_s: float, ended_s: float) -> None:
        """A stage went on in this time too."""
        with self._lock:
            before = self._stretches.get(stage, (began_s, ended_s))
            self._stretches[stage] = (min(before[0], began_s), max(before[1], ended_s))

    def touch(self, stage: str) -> None:
        """A stage goes on now."""
        now_s = time.time()
        self.mark(stage, now_s, now_s)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Inside, the stage goes on."""
        began_s = time.time()
        try:
            yield
        finally:
            self.mark(name, began_s, time.time())

    def during(self, stage: str, items: Iterable[T]) -> Iterator[T]:
        """The items; the stage is the making of them, from the first to the last."""
        with self.stage(stage):
            yield from items

    def stretches(self) -> dict[str, Stretch]:
        """Stage to when it began and ended, in the order of beginning."""
        with self._lock:
            return dict(sorted(self._stretches.items(), key=lambda entry: entry[1]))
