"""From the name of a model to a warm extractor of its feature streams, and the list of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from amtcore.errors import ModelLoadError, ParameterError
from amtcore.features.base import Extractor
from amtcore.features.module_model import DTYPES
from amtcore.features.parameters import Parameter
from amtcore.features.registry import Registration, get_registration, registrations
from amtcore.kernels.devices import get_backend
from amtcore.kernels.vector.threads import set_num_threads


@dataclass(frozen=True)
class ModelInfo:
    """What `list_models` tells of a model.

    Args:
        name: What jobs call it.
        summary: One line of what it is.
        input_unit: Unit of the samples it wants.
        default_fs_hz: Sampling rate where a job names none.
        params: What `params` of a job may hold.
        streams: Name of each stream to one line of what it is.
        distribution: Name and version of what brings it; None for the models of this package.
        error: Why it cannot be used; None where it can.
    """

    name: str
    summary: str = ""
    input_unit: str = ""
    default_fs_hz: float = 0.0
    params: Mapping[str, Parameter] = field(default_factory=dict)
    streams: Mapping[str, str] = field(default_factory=dict)
    distribution: str | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        params = {name: parameter.to_dict() for name, parameter in self.params.items()}
        return {**vars(self), "params": params, "streams": dict(self.streams)}


def build_extractor(
    model: str,
    *,
    fs_hz: float | None = None,
    params: Mapping[str, Any] | None = None,
    streams: Mapping[str, Mapping[str, Any] | None] | None = None,
    threads: int | None = None,
    dtype: str = "float32",
    backend: str | None = None,
) -> Extractor:
    """Build a model with its streams; everything wrong with the request is raised here.

    A job calibrates audio and quarantines bad clips; an extractor that is called by hand does
    neither. Multiply digital audio by `Calibration(..).gain(clip, extractor.input_unit)` first. A
    clip with NaN or infinity raises `NonFiniteError`. Features are returned as the model makes
    them, without a check.

    >>> import numpy as np
    >>> from amtcore.units import Calibration
    >>> extractor = build_extractor("dau1997", fs_hz=16000)
    >>> digital = 0.1 * np.sin(2 * np.pi * 1000 / 16000 * np.arange(1600))
    >>> gain = Calibration(rms1_db_spl=94.0).gain(digital, extractor.input_unit)
    >>> extractor.extract([gain * digital])[0]["modulation"].shape
    (10, 248)

    Args:
        model: Registered name, see `list_models`.
        fs_hz: Sampling rate of the input; None takes the model's default.
        params: The model's parameters, see `list_models`.
        streams: Stream name -> options, which are the model's: those of a filterbank have
            `frame_rate_hz` (default 100) and `pool` (default mean), "spikes" has those of
            `spikes.SpikeOptions`. None asks for the model's default streams, mostly its first.
        threads: Threads for the kernels of this process; None keeps the number.
        dtype: "float32" or "float64".
        backend: What computes: "cpu" (None), "cuda", or "interpreted", which is cuda with an
            interpreter in the place of the driver. A model that knows the processor only stays
            there; `Extractor.backend` says so.
    Raises:
        ParameterError: A model, parameter, stream or option that does not exist or does not fit.
        BackendError: No such backend, or no GPU for it.
    """
    registration = get_registration(model)
    found = registration.load()
    if dtype not in DTYPES:
        raise ParameterError(f"dtype must be float32 or float64, got {dtype!r}")
    computing = get_backend("cpu" if backend is None else backend)
    if threads is not None:
        set_num_threads(threads)
    extractor = found.build(
        found.default_fs_hz if fs_hz is None else fs_hz,
        params or {},
        {name: options or {} for name, options in (streams or {}).items()}
        or {name: {} for name in found.default_streams},
        dtype,
    )
    extractor.distribution = registration.distribution
    extractor.place(computing)
    return extractor


def list_models() -> list[ModelInfo]:
    """Every registered model with its parameters and streams; one that is broken says why."""
    return [_info(registration) for registration in registrations().values()]


def _info(registration: Registration) -> ModelInfo:
    try:
        model = registration.load()
    except ModelLoadError as error:
        return ModelInfo(
            registration.name, distribution=registration.distribution, error=str(error)
        )
    return ModelInfo(
        model.name,
        model.summary,
        model.input_unit,
        model.default_fs_hz,
        dict(model.parameters),
        {name: kind.summary for name, kind in model.streams.items()},
        registration.distribution,
    )
