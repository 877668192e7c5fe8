"""A worker's models on a GPU: compared with the CPU's before any shard, or left to the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from amtcore.errors import BackendError, DeviceLostError
from amtcore.features.feature_model import Extractor
from earmill.pipeline.audio.sinc_resample import DeviceResampler
from earmill.pipeline.common.errors import DeviceError, DeviceLost
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.worker import models
from earmill.pipeline.worker.device import (
    GpuUnusable,
    check_resampler,
    golden_second,
    relative_error,
    self_check,
)
from earmill.pipeline.worker.models import build_extractors, warm_models
from tests.pipeline.test_row_pipeline import make_spec

Change = Callable[[np.ndarray], np.ndarray]


class Changed:
    """An extractor on a stand-in for a GPU; its frames are what the CPU's were changed to."""

    def __init__(self, extractor: Any, change: Change, backend: str = "interpreted") -> None:
        self._real, self._change = extractor, change
        self.backend = SimpleNamespace(name=backend)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def extract(self, clips: Sequence[Any]) -> list[dict[str, Any]]:
        made = self._real.extract(clips)
        return [
            {k: self._change(v) if isinstance(v, np.ndarray) else v for k, v in row.items()}
            for row in made
        ]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> JobSpec:
    folder = tmp_path_factory.mktemp("check")
    streams = {"modulation": {}, "spikes": {"gain": 4.0}}
    return make_spec(folder, extract=[{"model": "dau1997", "fs_hz": 16000, "streams": streams}])


def test_equal_models_have_no_error(spec: JobSpec) -> None:
    on_cpu = build_extractors(spec, None)
    assert self_check([(each, each) for each in on_cpu]) == {"modulation": 0.0, "spikes": 0.0}


def test_the_golden_second_has_quiet_silent_and_loud_parts_and_is_always_the_same() -> None:
    signal = golden_second(16000)
    np.testing.assert_array_equal(signal, golden_second(16000))
    assert signal.shape == (16000,) and signal.dtype == np.float32
    assert not signal[4800:8000].any()
    loud_db = 20 * np.log10(signal[9600:12000].std() / signal[:4800].std())
    assert loud_db == pytest.approx(40.0, abs=0.5)


def first_frame(value: float) -> Change:
    """A change of one value, by so much of the largest."""

    def change(frames: np.ndarray) -> np.ndarray:
        changed = frames.copy()
        changed[0, 0] += value * np.abs(frames).max()
        return changed

    return change


@pytest.mark.parametrize("value", [2 * Extractor.gpu_tolerance, np.nan, np.inf])
def test_one_wrong_value_is_refused_with_its_stream(spec: JobSpec, value: float) -> None:
    on_cpu = build_extractors(spec, None)
    wrong = [(Changed(each, first_frame(value)), each) for each in on_cpu]
    with pytest.raises(DeviceError, match=r"stream modulation of dau1997 is off by .*doctor") as e:
        self_check(wrong)  # type: ignore[arg-type]
    assert "run.device to cpu" in str(e.value)


def test_the_rounding_of_another_transform_is_allowed_and_told(spec: JobSpec) -> None:
    on_cpu = build_extractors(spec, None)
    rounded = [(Changed(each, first_frame(1e-6)), each) for each in on_cpu]
    found = self_check(rounded)  # type: ignore[arg-type]
    assert found["modulation"] == pytest.approx(1e-6, rel=0.1)


def test_frames_of_another_shape_are_infinitely_wrong() -> None:
    assert relative_error(np.ones((3, 2)), np.ones((4, 2))) == float("inf")
    assert relative_error(np.zeros((0, 2)), np.zeros((0, 2))) == 0.0
    assert relative_error(np.full((1, 1), 0.5), np.zeros((1, 1))) == 0.5


class Rounding(DeviceResampler):
    """A device that rounds the factors of its convolutions to ten bits, as GPUs do unless told."""

    def __call__(self, clips: Sequence[Any], from_hz: float, to_hz: float) -> list[Any]:
        rounded = [(clip.view(torch.int32) & -8192).view(torch.float32) for clip in clips]
        return super().__call__(rounded, from_hz, to_hz)


def test_the_resampler_on_a_device_is_checked_as_well() -> None:
    device = torch.device("cpu")
    assert check_resampler(DeviceResampler(device)) == 0.0
    with pytest.raises(DeviceError, match="does not resample as the CPU: off by"):
        check_resampler(Rounding(device))


class Built:
    """What a worker builds, for the GPU as told and for the CPU as it is."""

    def __init__(self, on_gpu: Callable[[Any], Any]) -> None:
        self.on_gpu = on_gpu

    def __call__(self, spec: JobSpec, threads: int | None, backend: str = "cpu") -> list[Any]:
        built = build_extractors(spec, threads)
        return built if backend == "cpu" else [self.on_gpu(each) for each in built]


@pytest.fixture
def warm(spec: JobSpec, monkeypatch: pytest.MonkeyPatch) -> Callable[..., models.WarmModels]:
    """Warm a worker's models up on a machine with a (stand-in) GPU."""
    monkeypatch.setenv("AMTCORE_GPU", "interpreted")

    def run(wanted: str, on_gpu: Callable[[Any], Any]) -> models.WarmModels:
        monkeypatch.setattr(models, "build_extractors", Built(on_gpu))
        return warm_models(spec, 2, wanted)

    return run


Warm = Callable[..., models.WarmModels]


@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_a_gpu_that_works_is_taken_and_described(warm: Warm, wanted: str) -> None:
    found = warm(wanted, lambda each: Changed(each, lambda frames: frames))
    assert found.gpu is not None and found.note == ""
    assert found.device["backends"] == {"dau1997": "interpreted"}
    assert found.device["self_check"] == {"modulation": 0.0, "spikes": 0.0}
    assert {"device", "backend", "name", "driver"} <= set(found.device)


def test_cpu_is_cpu_whatever_the_machine_has(warm: Warm) -> None:
    found = warm("cpu", lambda each: 1 / 0)
    assert found.gpu is None and found.device["backend"] == "cpu" and found.note == ""


def rejected(extractor: Any) -> Any:
    raise BackendError("the driver rejected the PTX of dau1997; update it")


def test_a_gpu_that_cannot_run_the_models_leaves_auto_on_the_cpu(warm: Warm) -> None:
    found = warm("auto", rejected)
    assert found.gpu is None and found.device["backend"] == "cpu"
    assert found.note == "the models run on CPU: the driver rejected the PTX of dau1997; update it"
    with pytest.raises(GpuUnusable, match=r"rejected the PTX.*set run.device to auto or cpu"):
        warm("cuda", rejected)


def test_models_without_kernels_for_gpus_need_none(warm: Warm) -> None:
    def stays(extractor: Any) -> Any:
        return Changed(extractor, lambda frames: frames, backend="cpu")

    assert warm("auto", stays).note == "the models run on CPU: dau1997: no kernels for GPUs"
    with pytest.raises(GpuUnusable, match="dau1997: no kernels for GPUs"):
        warm("cuda", stays)


def test_a_gpu_that_computes_other_values_is_refused_also_where_a_cpu_would_do(warm: Warm) -> None:
    """Who has such a GPU must know: it is not to be passed over in silence."""
    for wanted in ("auto", "cuda"):
        with pytest.raises(DeviceError, match="computes other values") as caught:
            warm(wanted, lambda each: Changed(each, first_frame(1e-3)))
        assert not isinstance(caught.value, GpuUnusable)


def test_a_gpu_lost_in_warm_up_is_lost(warm: Warm) -> None:
    def lost(frames: np.ndarray) -> np.ndarray:
        raise DeviceLostError("a launch: CUDA_ERROR_LAUNCH_FAILED")

    for wanted in ("auto", "cuda"):
        with pytest.raises(DeviceLost, match="LAUNCH_FAILED"):
            warm(wanted, lambda each: Changed(each, lost))
