"""CPU seconds for a second of audio, from earlier runs on this machine.

Every job on the cores of this machine, and every timing, puts its figure into
the user's cache. The key is the machine, the models' sources and their entries in the job. If
nothing ran yet, there is a built-in reference: the models with default parameters, measured on
another machine (`python -m benchmarks.reference_speeds`). `Speed.origin` says which it is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from earmill.pipeline.audio.channels import BINAURAL, EARS
from earmill.pipeline.common.machine import cores, processor_name
from earmill.pipeline.common.monitoring import IDLE
from earmill.pipeline.common.user_cache import keep, models_key, read_kept
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import Description

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from amtcore.features.feature_model import Extractor

JOB, TIMING, REFERENCE = "job", "timing", "reference"
REFERENCE_FILE = "reference_speeds.json"
# With less audio, start and end of a job outweigh its speed.
LEAST_AUDIO_S = 30.0
# A timing takes this many clips of noise of this many seconds.
CLIPS, MEASURED_S = 4, 4.0
_KIND = "speed"


@dataclass(frozen=True)
class Speed:
    """The cost of a second of audio."""

    core_s: float  # CPU seconds.
    # `job`: a whole job with these models, on this machine; `timing`: the models alone, on this
    # machine; `reference`: the models with default parameters, on another machine.
    origin: str
    # Seconds from the start of a job here to its first warm worker; None if no job ran.
    start_s: float | None = None


def find_speed(spec: JobSpec, models: Sequence[Description]) -> Speed | None:
    """Return the best known speed of a job's models; None if one of them was never timed."""
    entries = spec.canonical()["extract"]
    whole = _kept(spec, entries)
    if whole is not None:
        return whole
    alone = [_kept(spec, [entry]) for entry in entries]
    if all(each is not None and each.origin == TIMING for each in alone):
        return Speed(sum(each.core_s for each in alone if each is not None), TIMING)
    return _reference(spec, models)


def keep_timing(spec: JobSpec, core_s: float) -> Speed:
    """Keep the CPU seconds for a second of audio of a job's models on this machine."""
    return _keep(spec, Speed(core_s, TIMING))


def keep_job(spec: JobSpec, audio_s: float, cpu_s: Mapping[str, float], start_s: float) -> None:
    """Keep the cost of a job whose workers were all on cores of this machine.

    Args:
        spec: The job.
        audio_s: Seconds of audio that went through the models.
        cpu_s: CPU seconds by part (`common.monitoring`): the sum of commit records, and the driver.
        start_s: Seconds until the first worker was warm.
    """
    spent = sum(seconds for part, seconds in cpu_s.items() if part != IDLE)
    if audio_s >= LEAST_AUDIO_S and spent > 0:
        _keep(spec, Speed(spent / audio_s, JOB, round(start_s, 1)))


def _keep(spec: JobSpec, speed: Speed) -> Speed:
    key = _key(spec, spec.canonical()["extract"])
    if key is not None:
        keep(_KIND, key, asdict(speed))
    return speed


def _kept(spec: JobSpec, entries: Sequence[Any]) -> Speed | None:
    key = _key(spec, entries)
    found = None if key is None else read_kept(_KIND, key)
    try:
        speed = Speed(**(found or {}))
        return speed if speed.core_s > 0 else None
    except TypeError:
        return None


def _key(spec: JobSpec, entries: Sequence[Any]) -> str | None:
    sources = models_key()
    if sources is None:
        return None
    ears = EARS if spec.audio.channels == BINAURAL else 1
    machine = f"{processor_name()}, {cores()} cores"
    return f"{machine} {sources} {ears} {json.dumps(entries, sort_keys=True)}"


@lru_cache(maxsize=1)
def reference() -> dict[str, Any]:
    """Return the built-in figures: `processor`, and `fs_hz` and `core_s` of each of `models`."""
    text = resources.files(__package__).joinpath(REFERENCE_FILE).read_text()
    figures: dict[str, Any] = json.loads(text)
    return figures


def warm_up(extractors: Sequence[Extractor]) -> None:
    """Load or compile the kernels by a first call."""
    for extractor in extractors:
        extractor.extract([noise(MEASURED_S / 10, extractor)])


def noise(seconds: float, extractor: Extractor, *, ears: int = 1) -> NDArray[np.float32]:
    """Return quiet noise at a model's rate: (time,), or (ear, time) for two ears."""
    import numpy as np

    length = round(seconds * extractor.fs_hz)
    shape = (length,) if ears == 1 else (ears, length)
    samples = np.random.default_rng(0).standard_normal(shape)
    return (samples * 0.01).astype(np.float32)


def seconds_of_a_second(
    extractors: Sequence[Extractor], *, binaural: bool = False
) -> tuple[float, float]:
    """Measure wall and CPU seconds of all models for a second of audio, on all cores."""
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


def _reference(spec: JobSpec, models: Sequence[Description]) -> Speed | None:
    """Return the reference, in proportion to the sample rate; None for an unknown model."""
    measured = reference()["models"]
    core_s = 0.0
    for entry, described in zip(spec.extract, models, strict=True):
        if entry.model not in measured:
            return None
        known = measured[entry.model]
        both = spec.audio.channels == BINAURAL and EARS in described.input_channels
        core_s += known["core_s"] * described.fs_hz / known["fs_hz"] * (EARS if both else 1)
    return Speed(core_s, REFERENCE)
