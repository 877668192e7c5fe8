"""Rows of shards that share launches: equal to those of shards alone on the CPU, byte for byte.

The device is a stand-in that computes with the CPU's kernels, counts its launches and fails as
told; what the interpreted kernels make of a whole job is in test_ray_gpu_job.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from amtcore.errors import DeviceLostError, DeviceMemoryError
from earmill.pipeline.audio.resample import ON_DEVICES
from earmill.pipeline.common.errors import DeviceLost
from earmill.pipeline.sources import Item
from earmill.pipeline.worker.device import Gpu
from earmill.pipeline.worker.extraction import DECODED_SHARDS, GpuExtraction
from earmill.pipeline.worker.launches import DeviceFull
from earmill.pipeline.worker.prepare import Clip, LongClip
from earmill.pipeline.worker.row_pipeline import RowProcessor, ShardRows
from tests.pipeline import audio_factory
from tests.pipeline.busy_device import busy
from tests.pipeline.test_row_pipeline import Job, assert_same_rows, make_spec
from tests.waiting import wait_until

LONG_S = 2.0


class StandIn:
    """An extractor of the CPU in the clothes of one on a GPU.

    Args:
        room: Clips that fit into the device's memory. lost: The device falls off the bus.
    """

    def __init__(self, extractor: Any, room: int = 10**6, lost: bool = False) -> None:
        self._real, self.room, self.lost = extractor, room, lost
        self.backend = SimpleNamespace(name="interpreted")
        self.launches: list[int] = []
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def extract(self, clips: Sequence[Any]) -> Any:
        if self.lost:
            raise DeviceLostError("a launch: CUDA_ERROR_LAUNCH_FAILED")
        if len(clips) > self.room:
            raise DeviceMemoryError("a launch: the GPU has too little free memory")
        with self._lock:
            self.launches.append(len(clips))
            arrays = [c.numpy() if isinstance(c, torch.Tensor) else c for c in clips]
            return self._real.extract(arrays)


class GpuJob(Job):
    """The same job on the stand-in, its shards in threads."""

    def __init__(self, spec: Any, cls: type[RowProcessor] = RowProcessor, **fails: Any) -> None:
        gpu = Gpu("interpreted", torch.device("cpu"))
        super().__init__(spec, cls, decode_threads=2, long_s=LONG_S, shards=8)
        self.rows.close()
        self.on_gpu = [StandIn(model, **fails) for model in self.models]
        self.rows = cls(
            spec, self.source, self.on_gpu, decode_threads=2, long_s=LONG_S, gpu=gpu, shards=8
        )
        assert isinstance(self.rows.extraction, GpuExtraction)
        self.batcher = self.rows.extraction._launches

    def shards(self, *shards: Sequence[Item]) -> list[Future[ShardRows]]:
        """All of them in flight; none is launched before all wait or have ended."""
        submit, begun = self.batcher.submit, []

        def counted(clips: Sequence[Clip]) -> Any:
            begun.append(submit(clips))
            return begun[-1]

        with ThreadPoolExecutor(len(shards)) as threads, busy(self.batcher):
            self.batcher.submit = counted  # type: ignore[method-assign]
            ended = [threads.submit(self.rows.process, items) for items in shards]
            wait_until(lambda: len(begun) + sum(each.done() for each in ended) >= len(shards))
        return ended


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips of two rates and several lengths, one of them stereo, one long."""
    folder = tmp_path_factory.mktemp("gpu-corpus")
    for index, seconds in enumerate((0.31, 0.9, 0.05, 1.2, 2.6, 0.5)):
        kind = ("wav", "flac", "wav", "mp3", "flac", "wav-float")[index]
        data = audio_factory.clip(kind, seconds, channels=1 + index % 2, seed=index)
        (folder / f"{index:02d}_{kind}.{kind.split('-')[0]}").write_bytes(data)
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"audio__resampler": ON_DEVICES},
        {"audio__resampler": ON_DEVICES, "audio__calibration": {"level_db_spl": 65.0}},
        {"audio__resampler": ON_DEVICES, "audio__channels": "each"},
    ],
    ids=["soxr", "on-device", "levelled", "each"],
)
def test_shards_that_share_a_launch_get_the_rows_of_the_cpu(
    corpus: Path, changes: dict[str, Any]
) -> None:
    spec = make_spec(corpus, **changes)
    on_cpu, on_gpu = Job(spec, long_s=LONG_S), GpuJob(spec)
    shards = [on_gpu.items[:1], on_gpu.items[1:4], on_gpu.items[4:], []]
    ended = on_gpu.shards(*shards)
    for future, items in zip(ended, shards, strict=True):
        assert future.result().bad == []
        assert_same_rows(on_cpu.rows.process(items).good, future.result().good)
    # The long clip went by itself; all others are one launch.
    long = sum(row.seconds > LONG_S for future in ended for row in future.result().good)
    assert on_gpu.on_gpu[0].launches == [sum(len(f.result().good) for f in ended) - long]


def test_two_models_and_two_ears_on_the_device(tmp_path: Path) -> None:
    for index in range(2):
        data = audio_factory.clip("wav", 0.4, channels=2, seed=index)
        (tmp_path / f"{index}.wav").write_bytes(data)
    models = [{"model": "dau1997", "fs_hz": 16000}, {"model": "moore2016"}]
    changes = {"audio__channels": "binaural", "audio__resampler": ON_DEVICES, "extract": models}
    spec = make_spec(tmp_path, **changes)
    on_gpu = GpuJob(spec)
    (ended,) = on_gpu.shards(on_gpu.items)
    assert_same_rows(Job(spec)().good, ended.result().good)
    # Samples move once, whoever asks for them.
    assert len(on_gpu.on_gpu[0].launches) == len(on_gpu.on_gpu[1].launches) == 1


def test_a_launch_that_does_not_fit_is_halved_and_changes_no_row(corpus: Path) -> None:
    spec = make_spec(corpus)
    on_gpu = GpuJob(spec, room=2)
    items = on_gpu.items[:4]
    ended = on_gpu.shards(items[:1], items[1:])
    on_cpu = Job(spec)
    assert_same_rows(on_cpu.rows.process(items[:1]).good, ended[0].result().good)
    assert_same_rows(on_cpu.rows.process(items[1:]).good, ended[1].result().good)
    assert on_gpu.on_gpu[0].launches == [2, 2]


def test_one_clip_that_does_not_fit_is_an_error_and_no_row(corpus: Path) -> None:
    on_gpu = GpuJob(make_spec(corpus), room=0)
    (ended,) = on_gpu.shards(on_gpu.items[:1])
    with pytest.raises(DeviceFull, match="too little free memory"):
        ended.result()


def test_a_lost_device_fails_every_shard_on_it(corpus: Path) -> None:
    on_gpu = GpuJob(make_spec(corpus), lost=True)
    for ended in on_gpu.shards(on_gpu.items[:1], on_gpu.items[1:2]):
        with pytest.raises(DeviceLost, match=r"the GPU was lost: .*LAUNCH_FAILED"):
            ended.result()


class Faulty(RowProcessor):
    """A row pipeline with a bug that one row brings out."""

    def prepare(self, item: Item, stream: Any) -> list[Clip] | LongClip:
        if item.row_id.startswith("03"):
            raise ZeroDivisionError("a bug, not a bad row")
        return super().prepare(item, stream)


def test_bad_rows_and_failing_shards_disturb_no_other(corpus: Path, tmp_path: Path) -> None:
    for path in corpus.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "01_flac.flac").write_bytes(b"fLaC and nothing more")
    spec = make_spec(tmp_path)
    on_gpu = GpuJob(spec, Faulty)
    good, faulty, last = on_gpu.shards(on_gpu.items[:3], on_gpu.items[3:4], on_gpu.items[5:])
    with pytest.raises(ZeroDivisionError):
        faulty.result()
    assert [row.row_id for row in good.result().bad] == ["01_flac.flac"]
    on_cpu = Job(spec)
    assert_same_rows(on_cpu.rows.process(on_cpu.items[:3]).good, good.result().good)
    assert_same_rows(on_cpu.rows.process(on_cpu.items[5:]).good, last.result().good)


def test_a_rate_that_the_resampler_refuses_is_a_bad_row_of_either_device(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(audio_factory.clip("wav", 0.2))
    odd = [{"model": "dau1997", "fs_hz": 16001}]
    spec = make_spec(tmp_path, audio__resampler=ON_DEVICES, extract=odd)
    on_gpu = GpuJob(spec)
    (ended,) = on_gpu.shards(on_gpu.items)
    (bad,) = ended.result().bad
    assert (bad.stage, bad.error_class) == ("resample", "resample_ratio")
    assert "soxr_vhq" in bad.message and Job(spec)().bad == [bad]


class Noted(RowProcessor):
    """A row pipeline that notes the order in which rows are decoded."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.decoded: list[str] = []
        super().__init__(*args, **options)

    def prepare(self, item: Item, stream: Any) -> list[Clip] | LongClip:
        self.decoded.append(item.row_id)
        return super().prepare(item, stream)


def test_shards_are_decoded_two_at_a_time_while_the_device_is_busy(tmp_path: Path) -> None:
    """Else all shards are ready to be written together, and the device idles meanwhile."""
    rows, shards = 4, 5
    for index in range(rows * shards):
        (tmp_path / f"{index:02d}.wav").write_bytes(audio_factory.clip("wav", 0.1, seed=index))
    on_gpu = GpuJob(make_spec(tmp_path), Noted)
    parts = [on_gpu.items[k * rows : (k + 1) * rows] for k in range(shards)]
    # All of them are begun before the device is free: no shard waits for its own launch.
    ended = on_gpu.shards(*parts)
    assert [len(future.result().good) for future in ended] == [rows] * shards
    assert isinstance(on_gpu.rows, Noted)
    shard_of = {item.row_id: k for k, part in enumerate(parts) for item in part}
    left = dict.fromkeys(range(shards), rows)
    for row_id in on_gpu.rows.decoded:
        left[shard_of[row_id]] -= 1
        under_way = [k for k, count in left.items() if 0 < count < rows]
        assert len(under_way) <= DECODED_SHARDS
