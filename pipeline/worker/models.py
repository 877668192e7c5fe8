"""A job's models, built and warm; on the GPU where the job wants one and one works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.pipeline.audio.channels import EARS
from earmill.pipeline.audio.resample import ON_DEVICES
from earmill.pipeline.common.text import one_line
from earmill.pipeline.dataset.provenance import device_info
from earmill.pipeline.formats.dtypes import halved
from earmill.pipeline.formats.moments import RunningMoments
from earmill.pipeline.worker.device import DeviceInput, Gpu, GpuUnusable, choose_gpu, device_errors
from earmill.pipeline.worker.self_check import check_resampler, self_check

if TYPE_CHECKING:
    from amtcore.features.base import Extractor
    from earmill.pipeline.spec.job import JobSpec

# Enough signal to compile and load every kernel: a second, and two odd lengths after it.
WARM_UP_SAMPLES = (44100, 30001, 777)


@dataclass(frozen=True)
class WarmModels:
    """Models that have run once.

    Args:
        extractors: One a model of the spec, in its order.
        gpu: Where they compute; None for this process's CPU. note: Why it is that, if it is news.
        device: What provenance records of it.
        features: Of a second of noise, by stream.
    """

    extractors: Sequence[Extractor]
    gpu: Gpu | None
    note: str
    device: dict[str, Any]
    features: dict[str, Any]


def warm_models(spec: JobSpec, threads: int, wanted: str) -> WarmModels:
    """Build the models and run each once.

    Args:
        threads: For kernels on the CPU. wanted: The worker's device: cpu, cuda, or auto for a GPU
            where one works.
    Raises:
        GpuUnusable: No GPU that can run them where one must.
        DeviceError: One that computes other values.
        DeviceLost: It failed here and now.
    """
    gpu, note = choose_gpu(wanted)
    # The driver compiles the models' kernels meanwhile, see `kernels.compiling`.
    exercise_casts()
    if gpu is not None:
        try:
            return _on_gpu(spec, threads, gpu)
        except GpuUnusable as error:
            if wanted == "cuda":
                raise
            note = f"the models run on CPU: {error.reason}"
    extractors = build_extractors(spec, threads)
    return WarmModels(extractors, None, note, device_info(), exercised(extractors))


def _on_gpu(spec: JobSpec, threads: int, gpu: Gpu) -> WarmModels:
    from amtcore.errors import BackendError

    try:
        with device_errors("warm-up"):
            extractors = build_extractors(spec, threads, gpu.backend)
            backends = {each.model: each.backend.name for each in extractors}
            if set(backends.values()) == {"cpu"}:
                raise GpuUnusable(f"{', '.join(backends)}: no kernels for GPUs")
            features = exercised(extractors)
            pairs = zip(extractors, build_extractors(spec, threads), strict=True)
            checked = self_check([pair for pair in pairs if pair[0].backend.name != "cpu"])
            if spec.audio.resampler == ON_DEVICES:
                checked["resampler"] = check_resampler(DeviceInput(gpu).resampler)
    except BackendError as error:
        raise GpuUnusable(one_line(error)) from error
    device = gpu.describe() | {"backends": backends, "self_check": checked}
    return WarmModels(extractors, gpu, "", device, features)


def build_extractors(spec: JobSpec, threads: int | None, backend: str = "cpu") -> list[Extractor]:
    """The job's models, warm-up not included."""
    from amtcore.features.build import build_extractor

    return [
        build_extractor(
            entry.model,
            fs_hz=entry.fs_hz,
            params=entry.params,
            streams=entry.streams,
            threads=threads,
            backend=backend,
        )
        for entry in spec.extract
    ]


def exercised(extractors: Sequence[Extractor]) -> dict[str, Any]:
    """Run every model once, which compiles or loads its kernels; features of a second of noise."""
    features: dict[str, Any] = {}
    for extractor in extractors:
        features |= _exercise(extractor)
    return features


def exercise_casts() -> None:
    """Frames through the casts and the statistics of a shard, which compiles or loads their
    kernels."""
    halves, _ = halved(np.zeros((1, 2), np.float32), 1.0)
    RunningMoments(halves.shape[1]).add(halves)


def _exercise(extractor: Extractor) -> dict[str, Any]:
    """Run a model once in both of its ways; the features of a second of noise."""
    rng = np.random.default_rng(0)
    noise = [rng.standard_normal(n).astype(np.float32) * 0.01 for n in WARM_UP_SAMPLES]
    if extractor.can_stream:
        stream = extractor.open_stream()
        stream.push(noise[-1])
        stream.finish()
    if max(extractor.input_channels) == EARS:
        extractor.extract([np.stack(noise[-1:] * EARS)])
    return extractor.extract(noise)[0]
