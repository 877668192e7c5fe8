"""How fast models are here: a few seconds of noise through them, on all cores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from earmill.pipeline.audio.channels import EARS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from amtcore.features.base import Extractor

MEASURED_S = 4.0
CLIPS = 4


def warm_up(extractors: Sequence[Extractor]) -> None:
    """Load or compile the kernels, which the first call does."""
    for extractor in extractors:
        extractor.extract([noise(MEASURED_S / 10, extractor)])


def noise(seconds: float, extractor: Extractor, *, ears: int = 1) -> NDArray[np.float32]:
    """Quiet noise at a model's rate: (time,), or (ear, time) for two ears."""
    import numpy as np

    length = round(seconds * extractor.fs_hz)
    shape = (length,) if ears == 1 else (ears, length)
    samples = np.random.default_rng(0).standard_normal(shape)
    return (samples * 0.01).astype(np.float32)


def seconds_of_a_second(
    extractors: Sequence[Extractor], *, binaural: bool = False
) -> tuple[float, float]:
    """Wall seconds and CPU seconds that all the models take for a second of audio, on all cores.

    Args:
        binaural: Models of two ears hear two signals.
    """
    wall_s = cpu_s = 0.0
    for extractor in extractors:
        ears = EARS if binaural and EARS in extractor.input_channels else 1
        clip = noise(MEASURED_S, extractor, ears=ears)
        began_s, spent_s = time.perf_counter(), time.process_time()
        extractor.extract([clip] * CLIPS)
        wall_s += time.perf_counter() - began_s
        cpu_s += time.process_time() - spent_s
    audio_s = CLIPS * MEASURED_S
    return wall_s / audio_s, cpu_s / audio_s
