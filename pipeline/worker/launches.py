"""Launches of clips on a GPU.

A launch has the clips of many shards, because one shard does not fill a GPU. A free launch thread
takes all clips that wait: few if the device waits for clips, many if clips wait for the device.
Copies of one launch overlap the kernels of another. No thread waits inside a launch for the clips
of its shard; a full queue holds the next clips back. A launch that does not fit into the device's
memory is halved, and no later launch is larger. A launch that fails otherwise is tried again shard
by shard, so that an error reaches only the shard whose clips cause it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from earmill.pipeline.common.errors import DeviceLost

# Enough warps for every multiprocessor of a large GPU, and a queue behind them.
LAUNCH_CLIPS = 1500
# Samples of a launch: 1500 clips of 4 s at 44.1 kHz. Inputs and features together take about twice.
LAUNCH_BYTES = 2**30
LAUNCH_THREADS = 2
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
    """Clips of one shard, and the results that are there, by position."""

    clips: Sequence[Any]
    future: Future[list[Any]] = field(default_factory=Future)
    made: dict[int, Any] = field(default_factory=dict)


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
    ) -> None:
        self._launch = launch
        self.most_clips, self.most_bytes = most_clips, most_bytes
        self._changed = threading.Condition()
        self._queue: deque[_Place] = deque()
        self.waiting_bytes = 0  # Bytes of clips that no launch has taken.
        self._lost = ""
        self._threads = [
            threading.Thread(target=self._work, name=f"launch-{index}", daemon=True)
            for index in range(LAUNCH_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, clips: Sequence[Any]) -> Future[list[Any]]:
        """Return the results to come, in the order of the clips; wait while a full launch waits."""
        request = _Request(clips)
        request.future.set_running_or_notify_cancel()
        with self._changed:
            self._changed.wait_for(lambda: self._lost or self.waiting_bytes < self.most_bytes)
            if self._lost:
                raise DeviceLost(self._lost)
            self._queue.extend((request, position) for position in range(len(clips)))
            self.waiting_bytes += sum(clip.nbytes for clip in clips)
            self._changed.notify_all()
        if not clips:
            request.future.set_result([])
        return request.future

    def close(self) -> None:
        self._end("the launches were ended")
        for thread in self._threads:
            thread.join()

    def _end(self, why: str, places: Sequence[_Place] = ()) -> None:
        """Fail these clips, all that wait and all that come."""
        with self._changed:
            self._lost = self._lost or why
            requests = [request for request, _ in [*places, *self._queue]]
            self._fail(requests, DeviceLost(self._lost))

    def _work(self) -> None:
        while places := self._next():
            self._run(places)
            # This thread must not hold a finished launch's memory while it waits for the next.
            del places

    def _next(self) -> list[_Place]:
        """Wait for clips, and take as many as fit into a launch; none once the device is lost."""
        with self._changed:
            self._changed.wait_for(lambda: self._lost or self._queue)
            places: list[_Place] = []
            size = 0
            while self._queue and len(places) < self.most_clips:
                request, position = self._queue[0]
                size += request.clips[position].nbytes
                if places and size > self.most_bytes:
                    break
                places.append(self._queue.popleft())
                self.waiting_bytes -= request.clips[position].nbytes
            self._changed.notify_all()
            return places

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
                self._fail([places[0][0]], full)
        except DeviceLost as error:
            self._end(str(error), places)
        except BaseException as error:
            parts = [list(of_one) for _, of_one in groupby(places, lambda place: place[0])]
            if len(parts) == 1:
                parts = []
                self._fail([places[0][0]], error)
        else:
            with self._changed:
                for (request, position), result in zip(places, made, strict=True):
                    request.made[position] = result
                    if len(request.made) == len(request.clips) and not request.future.done():
                        request.future.set_result([request.made[k] for k in sorted(request.made)])
        for part in parts:
            self._run(part)

    def _fail(self, requests: Iterable[_Request], error: BaseException) -> None:
        with self._changed:
            failed = set(requests)
            for request in failed:
                if not request.future.done():
                    request.future.set_exception(error)
            self._queue = deque(place for place in self._queue if place[0] not in failed)
            self.waiting_bytes = sum(request.clips[k].nbytes for request, k in self._queue)
            self._changed.notify_all()
