"""Loudness streams as a GPU makes them: in waves of blocks, on tensors of the processor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from amtcore import Glasberg2002, Moore2016
from amtcore.errors import ShapeError
from amtcore.features import loudness_batches, loudness_model
from amtcore.features.feature_model import Extractor
from amtcore.features.loudness_batches import (
    LoudnessBatches,
    Signal,
    batches_of_runs,
    grouped,
)
from amtcore.features.loudness_model import LoudnessExtractor
from amtcore.features.registry import build_extractor
from amtcore.kernels.devices import use_backend
from amtcore.models.loudness import LoudnessModel

from ..compare import Tolerance, assert_close
from ..short import only
from .device_watch import CUDA, AbsentDevice
from .loudness_golden import noise, one_thread  # noqa: F401

STREAMS = {
    "short_term_loudness": {},
    "long_term_loudness": {"frame_rate_hz": 100, "unit": "phon"},
    "specific_loudness": {"frame_rate_hz": 33.3},
    "loudness_summary": {"unit": "phon"},
}
#: Of no block, one, several and of more than a wave has.
LENGTHS = (9000, 31, 0, 33, 4096, 16500, 6000)
NEAR = Tolerance(1e-5, "float32 transforms and products of other shapes")


def _clips(name: str) -> list[np.ndarray]:
    mono = [noise(n, seed=i).numpy() for i, n in enumerate(LENGTHS)]
    both = [noise(2, n, seed=9).numpy() for n in (9000, 1)] if name == "moore2016" else []
    return [*mono[:3], *both, *mono[3:]]


def _equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k], equal_nan=True) for k in a
    )


@pytest.fixture(scope="module", params=["moore2016", "glasberg2002"])
def here(request: pytest.FixtureRequest) -> Extractor:
    return build_extractor(request.param, streams=STREAMS)


@pytest.fixture(scope="module")
def there(here: Extractor) -> Extractor:
    return build_extractor(here.model, streams=STREAMS, backend="interpreted")


@pytest.fixture(scope="module")
def whole(there: Extractor) -> list[dict[str, Any]]:
    return there.extract(_clips(there.model))


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """What the model is given."""
    seen, run = [], LoudnessModel.run_blocks

    def watched(self: LoudnessModel, x: torch.Tensor, *others: Any) -> Any:
        seen.append(tuple(x.shape))
        return run(self, x, *others)

    monkeypatch.setattr(LoudnessModel, "run_blocks", watched)
    yield seen


def test_values_are_those_of_the_processor(
    here: Extractor, there: Extractor, whole: list[dict[str, Any]]
) -> None:
    assert there.backend.name == "interpreted" and there.buffers_sha256() == here.buffers_sha256()
    clips = _clips(here.model)
    for clip, got, expected in zip(clips, whole, here.extract(clips), strict=True):
        assert {k: len(v) for k, v in got.items()} == there.n_frames(clip.shape[-1])
        for name in STREAMS:
            assert got[name].dtype == expected[name].dtype
            assert_close(got[name], expected[name], NEAR, name)


def test_company_order_and_waves_change_no_bit(
    there: Extractor,
    whole: list[dict[str, Any]],
    shapes: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clips = _clips(there.model)
    monkeypatch.setattr(loudness_batches, "_HELD_BYTES", 0)  # taken to the host wave by wave
    loud = np.full(4000, np.finfo(np.float32).max)  # as loud as can be
    assert all(map(_equal, there.extract([loud, *clips[::-1]])[:0:-1], whole))
    for clip, expected in zip(clips, whole, strict=True):
        assert _equal(there.extract([clip])[0], expected)
    by_ears = {shape[1]: shape for shape in shapes}
    assert set(shapes) == set(by_ears.values()), "every wave has the same shape"


def test_many_clips_are_few_waves(there: Extractor, shapes: list[tuple[int, ...]]) -> None:
    clips = [noise(32 * 3, seed=i).numpy() for i in range(10)]
    there.extract(clips)
    assert len(shapes) == 3, "10 blocks, 4 a wave"


def test_chunks_equal_the_whole(
    there: Extractor, whole: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loudness_model, "_PIECE_S", 0.3)  # a push of several pieces
    clips = _clips(there.model)
    for number, cuts in ((-2, (0, 1, 9000, 9001, 16500)), (3, (0, 33)), (2, (0, 0)), (1, (0,))):
        stream, clip = there.open_stream(), clips[number]
        ends = [*(c for c in cuts if c <= clip.shape[-1]), clip.shape[-1]]
        parts = [stream.push(clip[..., a:b]) for a, b in pairwise(ends)] + [stream.finish()]
        joined = {k: np.concatenate([part[k] for part in parts]) for k in STREAMS}
        assert _equal(joined, whole[number])
    assert [len(v) for v in there.open_stream().finish().values()] == [0, 0, 0, 0]


def test_tensors_and_other_types_are_taken(there: Extractor) -> None:
    clip, other = noise(3000).numpy(), noise(1500, seed=1).numpy()
    expected = there.extract([clip, other])
    tensor: Any = torch.from_numpy(clip)
    other.setflags(write=False)
    for clips in ([tensor, other], [clip.astype(np.float64), torch.from_numpy(other.copy())]):
        assert all(map(_equal, there.extract(clips), expected))
    stream = there.open_stream()
    parts = [stream.push(tensor), stream.finish()]
    assert _equal({k: np.concatenate([part[k] for part in parts]) for k in STREAMS}, expected[0])


def test_several_callers_at_once(there: Extractor, whole: list[dict[str, Any]]) -> None:
    clips = _clips(there.model)
    with ThreadPoolExecutor(2) as pool:
        for got in pool.map(there.extract, [clips[:4], clips[:4]]):
            assert all(map(_equal, got, whole[:4]))


def test_kernels_for_gpus_give_the_same_bits(there: Extractor) -> None:
    clips = [noise(1000).numpy(), noise(200, seed=1).numpy()]
    expected = there.extract(clips)
    with use_backend("interpreted"):
        assert all(map(_equal, there.extract(clips), expected))


def test_double_precision_and_maxima() -> None:
    streams = {"specific_loudness": {"frame_rate_hz": 70, "pool": "max"}}
    clip, got = noise(2, 5000).numpy(), []
    for backend in ("cpu", "interpreted"):
        made = build_extractor("moore2016", streams=streams, dtype="float64", backend=backend)
        got.append(made.extract([clip])[0]["specific_loudness"])
    assert_close(got[1], got[0], Tolerance(1e-12, "float64 products of other shapes"))


class _AbsentBackend:
    """Of a GPU that is not there; its tensors have shapes only."""

    name, device = "cuda", torch.device(CUDA)

    def __init__(self, absent: AbsentDevice) -> None:
        self._absent, self.taken = absent, 0

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def upload(self, given: np.ndarray) -> torch.Tensor:
        there = torch.from_numpy(given)
        return self._absent.like(there, there.dtype)

    def share(self, parts: list[np.ndarray]) -> list[torch.Tensor]:
        return [self.upload(part) for part in parts]

    def download(self, frames: list[torch.Tensor]) -> list[np.ndarray]:
        self.taken += 1
        return [np.ones(part.shape, np.float32) for part in frames]


@pytest.mark.parametrize("build", only([Moore2016], [Moore2016, Glasberg2002]))
def test_nothing_waits_for_a_gpu_until_all_waves_are_on_their_way(
    build: Callable[[], LoudnessModel], shapes: list[tuple[int, ...]]
) -> None:
    absent, model = AbsentDevice(CUDA), build()
    extractor = build_extractor(model._get_name().lower(), streams={"short_term_loudness": {}})
    assert isinstance(extractor, LoudnessExtractor)
    backend: Any = _AbsentBackend(absent)
    taps = absent.like(model.ear.taps(), torch.float64)
    waves = LoudnessBatches(absent.take(model), extractor._plans, backend, taps)
    clips = [np.zeros((ears, 32 * 3000), np.float32) for ears in model.input_channels] * 32
    with absent.watching():
        made = waves.extract(clips)
    assert [len(each["short_term_loudness"]) for each in made] == [3000] * len(clips)
    blocks = 32 * 24  # A block has 128 frames, and a wave has 512 blocks, counted for each ear.
    assert [shape[:2] for shape in shapes] == {
        (1,): [(512, 1)] * 2, (1, 2): [(512, 1)] * 2 + [(256, 2)] * (blocks // 256)
    }[model.input_channels]  # fmt: skip
    assert backend.taken == len(model.input_channels), "once for all clips of as many ears"


def test_bad_clips() -> None:
    there = build_extractor("moore2016", backend="interpreted")
    with pytest.raises(ShapeError, match="with 1 or 2 ears"):
        there.extract([np.zeros((3, 100), np.float32)])
    with pytest.raises(ShapeError, match="floating-point"):
        there.extract([torch.zeros(100, dtype=torch.int16)])  # type: ignore[list-item]
    stream = there.open_stream()
    stream.push(np.zeros((2, 10), np.float32))
    with pytest.raises(ShapeError, match="expected 2 ears as before, got 1"):
        stream.push(np.zeros(10, np.float32))


def test_rows_of_waves() -> None:
    def signal(frames: int, goes_on: bool = False) -> Signal:
        return Signal(np.zeros((1, 0)), 0, 0, 0, frames, goes_on)

    signals = [signal(700), signal(200), signal(256), signal(1), signal(5, True), signal(0)]
    waves = list(batches_of_runs(signals, 5))
    assert [[(r.number, r.begin, r.end, r.at, r.blocks) for r in rows] for rows in waves] == [
        [(0, 0, 640, 0, 5)],
        [(0, 640, 700, 0, 1), (1, 0, 200, 1, 2), (2, 0, 256, 3, 2)],
        [(3, 0, 1, 0, 1), (4, 0, 5, 1, 1)],
    ]
    alone = [[(len(g.rows), g.carried is not None) for g in grouped(w, signals)] for w in waves]
    assert alone == [[(1, True)], [(1, True), (2, False)], [(1, False), (1, True)]]
