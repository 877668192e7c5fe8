"""The GPU of a worker: found, described, given clips, checked, and its errors classified.

A golden second on the GPU is compared with the CPU's kernels before a worker takes any shard. Fused
kernels give the same bits; streams behind a Fourier transform differ by a few parts in 10^7 of the
largest value.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.pipeline.audio.channels import EARS
from earmill.pipeline.audio.resample import ON_DEVICES, resample
from earmill.pipeline.common.errors import DeviceError, DeviceLost
from earmill.pipeline.common.machine import INTERPRETED, is_interpreted, processor_name
from earmill.pipeline.common.text import one_line
from earmill.pipeline.worker.launches import LAUNCH_BYTES, DeviceFull
from earmill.pipeline.worker.prepare import Clip, Unresampled

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from amtcore.features.feature_model import Extractor
    from earmill.pipeline.audio.sinc_resample import DeviceResampler

# The driver's version; torch and libcuda know only the version of its CUDA.
DRIVER_VERSION = "/sys/module/nvidia/version"


@dataclass(frozen=True)
class Gpu:
    """The GPU that a worker computes on, or the interpreter of its kernels."""

    backend: str  # Backend of extractors: cuda, or interpreted.
    device: torch.device  # Device of tensors.

    def launch_bytes(self) -> int:
        if self.device.type != "cuda":
            return LAUNCH_BYTES
        import torch

        free, _ = torch.cuda.mem_get_info(self.device)
        return min(LAUNCH_BYTES, free // 8)

    def describe(self) -> dict[str, Any]:
        from amtcore.kernels.gpu.device import device_facts

        kind = {"device": "cuda", "backend": self.backend}
        if self.device.type != "cuda":
            return kind | {"name": f"interpreter on {processor_name()}", "driver": None}
        facts = device_facts(self.device)
        return kind | {
            "name": facts.name,
            "capability": "{}.{}".format(*facts.capability),
            "driver": nvidia_driver(),
            "driver_cuda": "{}.{}".format(*facts.driver_cuda),
        }


class GpuUnusable(DeviceError):
    """No GPU can run the models, but a CPU can. `reason` says what to do."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"run.device: expected a GPU that works, got none: {reason}; or set run.device to auto "
            "or cpu"
        )
        self.reason = reason


def check_gpu() -> None:
    """Raise GpuUnusable on a machine without a GPU; takes none of its memory."""
    if is_interpreted():
        return
    from amtcore.kernels.gpu.device import why_no_gpu

    if reason := why_no_gpu():
        raise GpuUnusable(reason)


def find_gpu() -> Gpu:
    """Return the GPU of this process, or the interpreter of its kernels; GpuUnusable without a GPU,
    amtcore's BackendError for one that cannot run its kernels."""
    import torch

    from amtcore.kernels.gpu.device import find_device

    check_gpu()
    if is_interpreted():
        return Gpu(INTERPRETED, torch.device("cpu"))

    found = find_device("cuda")
    # Else torch rounds factors of convolutions to 10 bits.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    return Gpu("cuda", found)


def nvidia_driver() -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        return Path(DRIVER_VERSION).read_text("ascii").strip()
    return None


@contextmanager
def device_errors(doing: str) -> Iterator[None]:
    """Turn the device's errors into DeviceFull (a launch too large) and DeviceLost."""
    from amtcore.errors import DeviceLostError, DeviceMemoryError
    from amtcore.kernels.gpu.driver import device_errors as of_torch

    try:
        with of_torch(doing):
            yield
    except DeviceMemoryError as error:
        raise DeviceFull(one_line(error)) from error
    except DeviceLostError as error:
        raise DeviceLost(f"the GPU was lost: {one_line(error)}") from error


class DeviceInput:
    """Brings clips to a device, for several threads at once, each on its own CUDA stream."""

    def __init__(self, gpu: Gpu) -> None:
        from earmill.pipeline.audio.sinc_resample import DeviceResampler

        self._gpu = gpu
        self.resampler = DeviceResampler(gpu.device)
        self._of_thread = threading.local()

    @contextmanager
    def stream(self) -> Iterator[None]:
        import torch

        if self._gpu.device.type != "cuda":
            yield
            return
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = torch.cuda.Stream(self._gpu.device)
        with torch.cuda.stream(self._of_thread.stream):
            yield

    def signals(self, clips: Sequence[Clip]) -> list[list[Any]]:
        """Return each model's inputs, clip by clip: arrays, or tensors the device resampled."""
        import torch

        by_model = [list(of_model) for of_model in zip(*(c.signals for c in clips), strict=True)]
        by_rates: dict[tuple[float, float], list[Unresampled]] = {}
        for one in (one for row in by_model for one in row if isinstance(one, Unresampled)):
            by_rates.setdefault((one.from_hz, one.to_hz), []).append(one)
        if not by_rates:
            return by_model
        made: dict[int, Tensor] = {}
        with torch.no_grad():
            for rates, wanted in by_rates.items():
                resampled = self.resampler(self._moved([one.ears for one in wanted]), *rates)
                for one, ears in zip(wanted, resampled, strict=True):
                    made[id(one)] = _as_model_input(ears, one)
        if self._gpu.device.type == "cuda":
            # The extractor has streams of its own.
            torch.cuda.current_stream().synchronize()
        return [[made.get(id(one), one) for one in row] for row in by_model]

    def _moved(self, arrays: Sequence[np.ndarray[Any, Any]]) -> list[Tensor]:
        """Move arrays to the device, in one copy from pinned memory."""
        import torch

        if self._gpu.device.type != "cuda":
            return [torch.from_numpy(array) for array in arrays]
        pinned = torch.empty(sum(array.size for array in arrays), pin_memory=True)
        np.concatenate([array.ravel() for array in arrays], out=pinned.numpy())
        parts = pinned.to(self._gpu.device, non_blocking=True).split([a.size for a in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _as_model_input(ears: Tensor, wanted: Unresampled) -> Tensor:
    """Compute `Preparer.ready` with tensors, to the last bit."""
    import torch

    if len(ears) == 1:
        signal = ears[0]
    elif wanted.ears_of_model == len(ears):
        signal = ears
    else:
        signal = ((ears[0].double() + ears[1].double()) / 2).float()
    return signal if wanted.gain == 1.0 else signal * torch.tensor(wanted.gain).float().item()


# Part of a stream's spikes: rounding can delay a spike by one step near the threshold.
EVENTS_TOLERANCE = 0.02

# Sums of a thousand products in another order; factors of 10 bits would give ten times this.
RESAMPLER_TOLERANCE = 5e-5
RESAMPLED_HZ = (16000.0, 44100.0)

# RMS in the model's unit: quiet speech, and a part 40 dB above it that drives every compression.
QUIET, LOUD = 0.01, 1.0
SILENT_S, LOUD_S = (0.3, 0.5), (0.6, 0.75)


def golden_second(fs_hz: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return seeded noise with a gap of digital silence and a loud part."""
    n = round(fs_hz)
    signal = np.random.default_rng(1997).standard_normal(n) * QUIET
    loud, silent = (slice(*(round(fs_hz * s) for s in part)) for part in (LOUD_S, SILENT_S))
    signal[loud] *= LOUD / QUIET
    signal[silent] = 0.0
    return signal.astype(np.float32)


def self_check(models: Sequence[tuple[Extractor, Extractor]]) -> dict[str, float]:
    """Compare (GPU, CPU) pairs of models; return the largest relative error of each stream."""
    errors: dict[str, float] = {}
    for checked, reference in models:
        # Clips of a launch have different lengths.
        whole = golden_second(checked.fs_hz)
        clips = [whole, whole[: len(whole) // 3]]
        if max(checked.input_channels) == EARS:
            both = np.stack([whole, whole[::-1]])
            # Roots compress the level range to 14 dB: STOI discards frames below -40 dB.
            clips = [*clips, both] if 1 in checked.input_channels else [np.cbrt(both)]
        pairs = list(zip(checked.extract(clips), reference.extract(clips), strict=True))
        for info in checked.streams:
            of_clips = [relative_error(made[info.name], right[info.name]) for made, right in pairs]
            found = float(np.max(of_clips))  # NaN where one of them is
            allowed = EVENTS_TOLERANCE if info.layout == "events" else checked.gpu_tolerance
            if not found <= allowed:
                raise DeviceError(
                    f"the GPU computes other values than the CPU: stream {info.name} of "
                    f"{info.model} is off by {found:.2g}, expected at most {allowed:g}; run "
                    "`earmill doctor`, or set run.device to cpu"
                )
            errors[info.name] = found
    return errors


def check_resampler(on_device: DeviceResampler) -> float:
    import torch

    device = on_device.device
    whole = golden_second(RESAMPLED_HZ[0])
    clips = [whole, whole[: len(whole) // 3], whole]
    made = on_device([torch.from_numpy(clip)[None].to(device) for clip in clips], *RESAMPLED_HZ)
    right = [resample(clip, *RESAMPLED_HZ, ON_DEVICES) for clip in clips]
    pairs = zip(made, right, strict=True)
    found = float(np.max([relative_error(ours[0].cpu().numpy(), one) for ours, one in pairs]))
    if not found <= RESAMPLER_TOLERANCE:
        raise DeviceError(
            f"the GPU does not resample as the CPU: off by {found:.2g}, expected at most "
            f"{RESAMPLER_TOLERANCE:g}; use audio.resampler soxr_vhq, or set run.device to cpu"
        )
    return found


def relative_error(made: Any, right: Any) -> float:
    """Return a stream's error: relative to the largest value, or the share of unequal events."""
    if not isinstance(right, np.ndarray):
        ours, theirs = (
            {tuple(row) for row in each.to_columns().tolist()} for each in (made, right)
        )
        return len(ours ^ theirs) / max(1, len(theirs))
    if made.shape != right.shape:
        return float("inf")
    largest = float(np.abs(right).max(initial=0.0))
    error = float(np.abs(made - right).max(initial=0.0))
    return error / largest if largest else error
