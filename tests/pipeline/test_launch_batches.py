"""Launches over shards: who meets whom, what a failure reaches, and that nobody waits for ever."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from earmill.pipeline.common.errors import DeviceLost
from earmill.pipeline.worker.launches import (
    LAUNCH_BYTES,
    LAUNCH_CLIPS,
    LAUNCH_THREADS,
    MOST_SHARDS,
    DeviceFull,
    LaunchBatcher,
    shards_in_flight,
)
from tests.pipeline.busy_device import LIMIT_S, busy
from tests.short import drawn
from tests.waiting import threads_end


@dataclass(frozen=True)
class Sized:
    """A clip: its value, which its result follows from, and its bytes."""

    value: int
    nbytes: int = 1


@dataclass
class Device:
    """What launches do: negative values, and a lot of bytes, have each their own way to fail."""

    room_bytes: int = 10**9
    launches: list[list[int]] = field(default_factory=list)
    lost_at: int | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, clips: Sequence[Sized]) -> list[int]:
        values = [clip.value for clip in clips]
        if sum(clip.nbytes for clip in clips) > self.room_bytes:
            raise DeviceFull(f"{len(clips)} clips do not fit")
        with self.lock:
            self.launches.append(values)
        if self.lost_at in values:
            raise DeviceLost("it fell off the bus")
        if any(value < 0 for value in values):
            raise ArithmeticError(f"cannot digest {min(values)}")
        return [3 * value for value in values]


Batch = Callable[..., LaunchBatcher]


@pytest.fixture
def batch() -> Iterator[Batch]:
    made: list[LaunchBatcher] = []

    def make(device: Device, **options: float) -> LaunchBatcher:
        made.append(LaunchBatcher(device, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()
        threads_end(each._threads)


def run_shards(
    batcher: LaunchBatcher, shards: Sequence[Sequence[Sized]], *, together: bool = True
) -> list[Future[list[int]]]:
    """Ask for the clips of all shards; `together`: while the device is busy, so they collect."""
    with busy(batcher) if together else nullcontext():
        ended = [batcher.submit(clips) for clips in shards]
    wait_for(ended, LIMIT_S)
    return ended


def clips(first: int, count: int, nbytes: int = 1) -> list[Sized]:
    return [Sized(value, nbytes) for value in range(first, first + count)]


def test_the_clips_of_all_shards_that_wait_are_one_launch(batch: Batch) -> None:
    device = Device()
    shards = [clips(100 * n, n + 1) for n in range(8)]
    ended = run_shards(batch(device), shards)
    for future, asked in zip(ended, shards, strict=True):
        assert future.result() == [3 * clip.value for clip in asked]
    (launch,) = device.launches
    assert sorted(launch) == sorted(clip.value for shard in shards for clip in shard)


def test_a_launch_has_no_more_clips_and_bytes_than_it_may(batch: Batch) -> None:
    device = Device()
    shards = [clips(0, 25), clips(100, 25, nbytes=10)]
    ended = run_shards(batch(device, most_clips=10, most_bytes=80), shards)
    assert [future.result()[-1] for future in ended] == [3 * 24, 3 * 124]
    sizes = {clip.value: clip.nbytes for shard in shards for clip in shard}
    for launch in device.launches:
        assert len(launch) <= 10 and sum(sizes[value] for value in launch) <= 80
    # Nothing is launched twice, and no launch is small without need.
    assert sorted(value for launch in device.launches for value in launch) == sorted(sizes)
    assert len(device.launches) <= 8


def test_a_clip_above_the_bytes_goes_alone(batch: Batch) -> None:
    device = Device()
    (ended,) = run_shards(batch(device, most_bytes=5), [[*clips(0, 2), Sized(7, 100)]])
    assert ended.result() == [0, 3, 21]
    assert [7] in device.launches


def test_a_free_device_launches_what_is_there(batch: Batch) -> None:
    device = Device()
    batcher = batch(device)
    for first in (0, 10):
        assert batcher.submit(clips(first, 2)).result(LIMIT_S) == [3 * first, 3 * first + 3]
    assert device.launches == [[0, 1], [10, 11]]


def test_clips_beside_a_launch_are_launched_by_the_other_thread(batch: Batch) -> None:
    batcher = batch(Device())
    with busy(batcher, LAUNCH_THREADS - 1):
        assert batcher.submit(clips(0, 2)).result(LIMIT_S) == [0, 3]


def test_a_full_queue_holds_the_next_clips_back(batch: Batch) -> None:
    batcher = batch(Device(), most_bytes=10)
    ended: list[Future[list[int]]] = []
    late = threading.Thread(target=lambda: ended.append(batcher.submit(clips(100, 1))))
    with busy(batcher):
        first = batcher.submit(clips(0, 10))
        late.start()
        late.join(0.1)
        assert late.is_alive() and batcher.waiting_bytes == 10
    late.join(LIMIT_S)
    assert first.result(LIMIT_S)[-1] == 27 and ended[0].result(LIMIT_S) == [300]


def test_clips_that_wait_when_the_launches_are_ended_fail(batch: Batch) -> None:
    batcher = batch(Device())
    closing = threading.Thread(target=batcher.close)
    with busy(batcher):
        waiting = batcher.submit(clips(0, 1))
        closing.start()
        with pytest.raises(DeviceLost, match="the launches were ended"):
            waiting.result(LIMIT_S)
        with pytest.raises(DeviceLost, match="the launches were ended"):
            batcher.submit(clips(0, 1))
    closing.join(LIMIT_S)


def test_what_does_not_fit_is_halved_and_no_later_launch_is_larger(batch: Batch) -> None:
    device = Device(room_bytes=100)
    batcher = batch(device, most_bytes=10**6)
    shards = [clips(100 * n, 10, nbytes=10) for n in range(4)]
    for future, asked in zip(run_shards(batcher, shards), shards, strict=True):
        assert future.result() == [3 * clip.value for clip in asked]
    assert batcher.most_bytes == 100
    before = len(device.launches)
    run_shards(batcher, shards, together=False)
    assert all(len(launch) <= 10 for launch in device.launches[before:])
    # Remembered as bytes: short clips still meet in large numbers.
    (ended,) = run_shards(batcher, [clips(0, 90)])
    assert ended.result()[-1] == 3 * 89
    assert len(device.launches[-1]) == 90


def test_what_did_not_fit_is_let_go_before_the_next_try(batch: Batch) -> None:
    """The frames of an exception hold the tensors of its launch."""
    held: list[weakref.ref[Sized]] = []
    alive: list[int] = []

    def launch(clips: Sequence[Sized]) -> list[int]:
        alive.append(sum(each() is not None for each in held))
        tensor = Sized(0)
        held.append(weakref.ref(tensor))
        try:
            if len(clips) > 1:
                raise MemoryError("the library says so")
        except MemoryError as error:
            raise DeviceFull("no room") from error
        return [3 * clip.value for clip in clips]

    (ended,) = run_shards(batch(launch), [clips(0, 4)])  # type: ignore[arg-type]
    assert ended.result() == [0, 3, 6, 9]
    assert alive == [0] * 7


def test_one_clip_that_does_not_fit_fails_its_shard_and_no_other(batch: Batch) -> None:
    device = Device(room_bytes=100)
    good, bad = run_shards(
        batch(device, most_bytes=10**6), [clips(0, 5), [*clips(10, 3), Sized(50, 101)]]
    )
    assert good.result() == [0, 3, 6, 9, 12]
    with pytest.raises(DeviceFull, match="one clip alone is too large: 1 clips do not") as caught:
        bad.result()
    assert "set run.device to cpu" in str(caught.value)


def test_an_error_reaches_the_shard_whose_clips_it_is_about(batch: Batch) -> None:
    first, bad, last = run_shards(
        batch(Device()), [clips(0, 3), [Sized(1), Sized(-5)], clips(9, 1)]
    )
    assert first.result() == [0, 3, 6] and last.result() == [27]
    with pytest.raises(ArithmeticError, match="cannot digest -5"):
        bad.result()


def test_a_lost_device_fails_all_that_wait_and_all_that_come(batch: Batch) -> None:
    batcher = batch(Device(lost_at=12), most_clips=4)
    for future in run_shards(batcher, [[Sized(12), *clips(n, 9)] for n in (20, 30, 40)]):
        with pytest.raises(DeviceLost, match="off the bus"):
            future.result()
    with pytest.raises(DeviceLost, match="off the bus"):
        batcher.submit(clips(0, 1))


def test_a_launch_that_returns_too_little_is_an_error_and_no_silence(batch: Batch) -> None:
    (ended,) = run_shards(batch(lambda clips: [1]), [clips(0, 2)])  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="expected 2 results of a launch, got 1"):
        ended.result()


@drawn(25)
@given(
    shards=st.lists(st.lists(st.integers(-1, 50), max_size=12), min_size=1, max_size=6),
    most_clips=st.integers(1, 20),
    room=st.integers(1, 30),
)
def test_whatever_meets_each_shard_gets_its_own(
    shards: list[list[int]], most_clips: int, room: int
) -> None:
    device = Device(room_bytes=room)
    batcher = LaunchBatcher(device, most_clips=most_clips)
    try:
        ended = run_shards(batcher, [[Sized(value) for value in shard] for shard in shards])
        for future, values in zip(ended, shards, strict=True):
            if -1 in values:
                assert isinstance(future.exception(), ArithmeticError)
            else:
                assert future.result() == [3 * value for value in values]
    finally:
        batcher.close()


def test_shards_in_flight_fill_two_launches_and_what_is_decoded_behind_them() -> None:
    assert shards_in_flight(LAUNCH_CLIPS, 600.0) == 2 * LAUNCH_THREADS
    assert shards_in_flight(300, 600.0) == 10 * LAUNCH_THREADS
    assert shards_in_flight(1, 1.0) == shards_in_flight(0.0, 0.0) == MOST_SHARDS
    assert shards_in_flight(10**6, 600.0) == 4


@pytest.mark.parametrize("seconds", [60.0, 600.0, 3600.0])
def test_shards_of_long_clips_are_bounded_by_their_bytes(seconds: float) -> None:
    """Else 64 shards of ten minutes would hold 7 GB of samples."""
    held = (shards_in_flight(5, seconds) - 1) * seconds * 48000 * 4
    assert held <= max(2 * LAUNCH_THREADS * LAUNCH_BYTES, 3 * seconds * 48000 * 4)
