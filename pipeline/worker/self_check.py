"""A golden second through the GPU and through the CPU's kernels, before a worker takes any shard.

Fused kernels are the same operations in the same order, so they give the same bits. Streams behind
a Fourier transform do not: two libraries round differently, by a few parts in 10^7 of the largest
value. A kernel, a driver or a chip that is wrong is off by far more than the tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.pipeline.audio.channels import EARS
from earmill.pipeline.audio.resample import ON_DEVICES, AudioResampler
from earmill.pipeline.common.errors import DeviceError

if TYPE_CHECKING:
    from amtcore.features.base import Extractor
    from earmill.pipeline.audio.sinc_resample import DeviceResampler

# Of a stream's largest value: a hundred times what transforms in float32 differ by.
FRAMES_TOLERANCE = 1e-5
# Of a stream's spikes: a neuron near its threshold may fire a step later.
EVENTS_TOLERANCE = 0.02

# A sum of up to a thousand products in another order; factors of 10 bits would be ten times off.
RESAMPLER_TOLERANCE = 5e-5
RESAMPLED_HZ = (16000.0, 44100.0)

# RMS in the model's unit: quiet speech, and a part 40 dB above it that drives every compression.
QUIET, LOUD = 0.01, 1.0
SILENT_S, LOUD_S = (0.3, 0.5), (0.6, 0.75)


def golden_second(fs_hz: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Seeded noise with a gap of digital silence and a loud part."""
    n = round(fs_hz)
    signal = np.random.default_rng(1997).standard_normal(n) * QUIET
    loud, silent = (slice(*(round(fs_hz * s) for s in part)) for part in (LOUD_S, SILENT_S))
    signal[loud] *= LOUD / QUIET
    signal[silent] = 0.0
    return signal.astype(np.float32)


def self_check(models: Sequence[tuple[Extractor, Extractor]]) -> dict[str, float]:
    """The largest relative error of each stream.

    Args:
        models: Each as it was built for the GPU, and for the CPU.
    Raises:
        DeviceError: One is above its tolerance.
    """
    errors: dict[str, float] = {}
    for checked, reference in models:
        clips = _clips(checked)
        pairs = list(zip(checked.extract(clips), reference.extract(clips), strict=True))
        for info in checked.streams:
            of_clips = [relative_error(made[info.name], right[info.name]) for made, right in pairs]
            found = float(np.max(of_clips))  # NaN where one of them is
            allowed = EVENTS_TOLERANCE if info.layout == "events" else FRAMES_TOLERANCE
            if not found <= allowed:
                raise DeviceError(
                    f"the GPU computes other values than the CPU: stream {info.name} of "
                    f"{info.model} is off by {found:.2g}, expected at most {allowed:g}; run "
                    "`earmill doctor`, or set run.device to cpu"
                )
            errors[info.name] = found
    return errors


def check_resampler(on_device: DeviceResampler) -> float:
    """The largest relative error of `sinc_resample.DeviceResampler` on its device.

    Raises:
        DeviceError: It is above its tolerance.
    """
    import torch

    device = on_device.device
    whole = golden_second(RESAMPLED_HZ[0])
    clips = [whole, whole[: len(whole) // 3], whole]
    made = on_device([torch.from_numpy(clip)[None].to(device) for clip in clips], *RESAMPLED_HZ)
    right = [AudioResampler(*RESAMPLED_HZ, ON_DEVICES).process(clip) for clip in clips]
    pairs = zip(made, right, strict=True)
    found = float(np.max([relative_error(ours[0].cpu().numpy(), one) for ours, one in pairs]))
    if not found <= RESAMPLER_TOLERANCE:
        raise DeviceError(
            f"the GPU resamples otherwise than the CPU: off by {found:.2g}, expected at most "
            f"{RESAMPLER_TOLERANCE:g}; use audio.resampler soxr_vhq, or set run.device to cpu"
        )
    return found


def relative_error(made: Any, right: Any) -> float:
    """Of frames by the largest value; of events the share that only one of the two has."""
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


def _clips(extractor: Extractor) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """The golden second, and a part of it: clips of a launch have different lengths."""
    whole = golden_second(extractor.fs_hz)
    clips = [whole, whole[: len(whole) // 3]]
    if max(extractor.input_channels) == EARS:
        clips.append(np.stack([whole, whole[::-1]]))
    return clips
