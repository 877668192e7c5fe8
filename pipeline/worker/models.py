"""A job's models: built and run once, on the GPU where the job wants one; kernels compiled ahead.

Kernels are compiled into a folder that jobs are given:

python -m earmill.pipeline.worker.models '{"model": "dau1997", ...}'    compiles one model's kernels
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.pipeline.audio.channels import EARS
from earmill.pipeline.audio.resample import ON_DEVICES
from earmill.pipeline.common.machine import Threads, cores
from earmill.pipeline.common.monitoring import carried_alike
from earmill.pipeline.common.text import one_line
from earmill.pipeline.dataset.provenance import device_info
from earmill.pipeline.formats.moments import RunningMoments
from earmill.pipeline.formats.values import halved
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import entries_of
from earmill.pipeline.worker.device import (
    DeviceInput,
    Gpu,
    GpuUnusable,
    check_resampler,
    device_errors,
    find_gpu,
    self_check,
)

if TYPE_CHECKING:
    from amtcore.features.feature_model import Extractor

# Lengths that compile and load every kernel: a second, and two odd lengths after it.
WARM_UP_SAMPLES = (44100, 30001, 777)


@dataclass(frozen=True)
class WarmModels:
    extractors: Sequence[Extractor]
    gpu: Gpu | None  # None for the CPU.
    note: str  # Reason for the CPU in a job that allows a GPU.
    device: dict[str, Any]  # Provenance record.
    features: dict[str, Any]  # Features of a second of noise.


def warm_models(spec: JobSpec, threads: int, wanted: str) -> WarmModels:
    """Build the models and run each once, on the device `wanted` (cpu, cuda, or auto)."""
    from amtcore.kernels.vector.threads import set_carrier

    set_carrier(carried_alike)
    exercise_casts()
    note = ""
    if wanted != "cpu":
        try:
            return _on_gpu(spec, threads)
        except GpuUnusable as error:
            if wanted == "cuda":
                raise
            note = f"the models run on CPU: {error.reason}"
    extractors = build_extractors(spec, threads)
    return WarmModels(extractors, None, note, device_info(), exercised(extractors))


def _on_gpu(spec: JobSpec, threads: int) -> WarmModels:
    from amtcore.errors import BackendError

    try:
        gpu = find_gpu()
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
    from amtcore.features.registry import build_extractor

    return [
        build_extractor(**entry, threads=threads, backend=backend) for entry in entries_of(spec)
    ]


def exercised(extractors: Sequence[Extractor]) -> dict[str, Any]:
    """Run every model once, which compiles its kernels; return features of a second of noise."""
    rng, features = np.random.default_rng(0), dict[str, Any]()
    noise = [rng.standard_normal(n).astype(np.float32) * 0.01 for n in WARM_UP_SAMPLES]
    for extractor in extractors:
        clips = noise
        if max(extractor.input_channels) == EARS:
            of_two = [np.stack([clip] * EARS) for clip in noise]
            extractor.extract(of_two[-1:])
            clips = noise if 1 in extractor.input_channels else of_two
        if extractor.can_stream:
            stream = extractor.open_stream()
            stream.push(clips[-1])
            stream.finish()
        features |= extractor.extract(clips)[0]
    return features


def exercise_casts() -> None:
    halves, _ = halved(np.zeros((1, 2), np.float32), 1.0)
    RunningMoments(halves.shape[1]).add(halves)


def entries_of_all() -> list[dict[str, Any]]:
    """Return `build_extractor`'s arguments for every model of this package, with all streams."""
    from amtcore.features.registry import BUILT_IN, get_model

    # Some models need a gain for spikes; its value does not change a kernel.
    options: Mapping[str, dict[str, Any]] = {"spikes": {"gain": 1.0}}
    streams = {name: get_model(name).streams for name in BUILT_IN}
    return [
        {"model": name, "streams": {each: options.get(each, {}) for each in of_model}}
        for name, of_model in streams.items()
    ]


def compile_into(
    folder: Path, entries: Sequence[Mapping[str, Any]], *, cpu: str | None, features: str | None
) -> list[str]:
    """Compile kernels into a folder for AMTCORE_KERNELS; return a line for each failed model. Each
    of `entries` (arguments of `build_extractor`) has its own process. `cpu` and `features` are
    LLVM's names ("+avx2,-avx512f"); None is this processor."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder.absolute())}
    environment.pop("AMTCORE_KERNELS", None)
    if cpu is not None:
        environment |= {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features or ""}

    def run(entry: Mapping[str, Any]) -> str:
        done = subprocess.run(
            [sys.executable, "-m", __name__, json.dumps(entry)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not done.returncode:
            return ""
        why = done.stderr.strip().splitlines()[-1:] or [f"ended with {done.returncode}"]
        return f"{entry['model']}: {one_line(why[0])}"

    with Threads(cores()) as threads:
        return [line for line in threads.map(run, entries) if line]


if __name__ == "__main__":
    from amtcore.features.registry import build_extractor

    logging.getLogger("amtcore").setLevel(logging.ERROR)
    exercised([build_extractor(**json.loads(sys.argv[1]))])
    exercise_casts()
