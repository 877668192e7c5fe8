"""A device that is busy for as long as a test wants, so that clips of several shards collect."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from earmill.pipeline.worker.launches import LAUNCH_THREADS, LaunchBatcher
from tests.waiting import wait_until

LIMIT_S = 60.0


@dataclass(frozen=True)
class Plug:
    """A clip that keeps a launch thread busy."""

    nbytes: int = 1


@contextmanager
def busy(batcher: LaunchBatcher, threads: int = LAUNCH_THREADS) -> Iterator[None]:
    """Keep launch threads busy inside the context."""
    launch, free, plugs = batcher._launch, threading.Event(), []

    def plugged(clips: Sequence[Any]) -> Sequence[Any]:
        if any(isinstance(clip, Plug) for clip in clips):
            assert free.wait(LIMIT_S)
            return clips
        return launch(clips)

    batcher._launch = plugged
    try:
        for _ in range(threads):
            plugs.append(batcher.submit([Plug()]))
            wait_until(lambda: not batcher.waiting_bytes, "a free launch thread")
        yield
    finally:
        free.set()
        wait(plugs, LIMIT_S)
        batcher._launch = launch
