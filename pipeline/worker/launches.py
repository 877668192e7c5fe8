"""Launches of clips on a GPU.

A launch has the clips of many shards, because one shard does not fill a GPU. It begins when enough
clips wait, when every shard inside `LaunchBatcher.shard` waits, or when the oldest clip has waited
for LINGER_S. Copies of one launch overlap the kernels of another. A launch that does not fit into
the device's memory is halved, and no later launch is larger. A launch that fails otherwise is tried
again shard by shard, so that an error reaches only the shard whose clips cause it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from earmill.pipeline.common.errors import DeviceLost

# Enough warps for every multiprocessor of a large GPU, and a queue behind them.
LAUNCH_CLIPS = 1500
# Samples of a launch: 1500 clips of 4 s at 44.1 kHz. Inputs and features together take about twice.
LAUNCH_BYTES = 2**30
LAUNCH_THREADS = 2
LINGER_S = 0.5
USUAL_RATE_HZ, BYTES_A_SAMPLE = 48000, 4
# More shards in flight cost memory for clips that are decoded ahead, and gain nothing.
MOST_SHARDS = 64


class DeviceFull(MemoryError): ...


def shards_in_flight(rows_a_shard: float, seconds_a_shard: float) -> int:
    """Return how many shards keep launches full while as many are decoded and written."""
    bytes_a_shard = seconds_a_shard * USUAL_RATE_HZ * BYTES_A_SAMPLE
    a_launch = min(LAUNCH_CLIPS / max(1.0, rows_a_shard), LAUNCH_BYTES / max(1.0, bytes_a_shard))
    return min(MOST_SHARDS, max(4, math.ceil(2 * LAUNCH_THREADS * a_launch)))


@dataclass(eq=False)
class _Request:
    """Clips that one shard waits for, and the results that are there, by position."""

    clips: Sequence[Any]
    since: float
    made: dict[int, Any] = field(default_factory=dict)
    error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.error is not None or len(self.made) == len(self.clips)


_Place = tuple[_Request, int]  # A clip: its request, and its position there.


class LaunchBatcher:
    """Collects clips, which have `nbytes`, and launches them together. `launch` returns one result
    a clip; it raises DeviceFull if the clips do not fit, DeviceLost if nothing can be launched."""

    def __init__(
        self,
        launch: Callable[[Any], Sequence[Any]],
        *,
        most_clips: int = LAUNCH_CLIPS,
        most_bytes: int = LAUNCH_BYTES,
        linger_s: float = LINGER_S,
    ) -> None:
        self._launch, self._linger_s = launch, linger_s
        self.most_clips, self.most_bytes = most_clips, most_bytes
        self._changed = threading.Condition()
        self._queue: deque[_Place] = deque()
        self._inside = self._waiting = 0
        self._lost = ""
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"launch-{index}", daemon=True)
            for index in range(LAUNCH_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def shard(self, step: int = 1) -> Iterator[None]:
        """Inside the block, launches may wait for this thread's next clips."""
        with self._changed:
            self._inside += step
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._inside -= step
                self._changed.notify_all()

    def away(self) -> AbstractContextManager[None]:
        """Inside the block, no launch waits for the clips of this thread's shard."""
        return self.shard(-1)

    def extract(self, clips: Sequence[Any]) -> list[Any]:
        request = _Request(clips, time.monotonic())
        with self._changed:
            self._queue.extend((request, position) for position in range(len(clips)))
            self._waiting += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: request.is_over or self._lost or self._closed)
            self._waiting -= 1
        if request.error is not None:
            raise request.error
        if not request.is_over:
            raise DeviceLost(self._lost or "the launches were ended")
        return [request.made[position] for position in range(len(clips))]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while places := self._next():
            self._run(places)
            # This thread must not hold a finished launch's memory while it waits for the next.
            del places

    def _next(self) -> list[_Place]:
        with self._changed:
            while not (self._closed or self._is_due()):
                pause_s = None
                if self._queue and not self._lost:
                    # Until the oldest clip has waited long enough.
                    waited_s = time.monotonic() - self._queue[0][0].since
                    pause_s = max(0.0, self._linger_s - waited_s)
                self._changed.wait(pause_s)
            places: list[_Place] = []
            size = 0
            while self._queue and len(places) < self.most_clips and not self._closed:
                request, position = self._queue[0]
                size += request.clips[position].nbytes
                if places and size > self.most_bytes:
                    break
                places.append(self._queue.popleft())
            return places

    def _is_due(self) -> bool:
        if not self._queue or self._lost:
            return False
        return (
            self._waiting >= self._inside
            or len(self._queue) >= self.most_clips
            or sum(request.clips[k].nbytes for request, k in self._queue) >= self.most_bytes
            or time.monotonic() - self._queue[0][0].since >= self._linger_s
        )

    def _run(self, places: list[_Place]) -> None:
        """Launch clips, then the parts of them that must be launched again."""
        parts: list[list[_Place]] = []
        clips = [request.clips[position] for request, position in places]
        try:
            made = self._launch(clips)
            if len(made) != len(clips):
                raise RuntimeError(f"expected {len(clips)} results of a launch, got {len(made)}")
        except DeviceFull as error:
            # Its frames hold the tensors that did not fit; they must go before the next try.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            if len(clips) > 1:
                with self._changed:
                    # In bytes: two long clips may not fit where a thousand short clips do.
                    half_bytes = sum(clip.nbytes for clip in clips) // 2
                    self.most_bytes = min(self.most_bytes, half_bytes)
                half = len(places) // 2
                parts = [places[:half], places[half:]]
            else:
                advice = (
                    "set run.device to cpu, audio.max_seconds lower, or leave the GPU to fewer "
                    "workers (run.gpus_per_worker)"
                )
                full = DeviceFull(f"one clip alone is too large: {error}; {advice}")
                self._fail(places[0][0], full)
        except DeviceLost as error:
            with self._changed:
                self._lost = str(error)
                self._changed.notify_all()
        except BaseException as error:
            parts = [list(of_one) for _, of_one in groupby(places, lambda place: place[0])]
            if len(parts) == 1:
                parts = []
                self._fail(places[0][0], error)
        else:
            with self._changed:
                for (request, position), result in zip(places, made, strict=True):
                    request.made[position] = result
                self._changed.notify_all()
        for part in parts:
            self._run(part)

    def _fail(self, request: _Request, error: BaseException) -> None:
        with self._changed:
            request.error = error
            self._queue = deque(place for place in self._queue if place[0] is not request)
            self._changed.notify_all()
