"""Models by name, and from a name to a warm extractor.

A distribution registers a model by an entry point of the group `amtcore.models`:

    [project.entry-points."amtcore.models"]
    mymodel = "mypackage.models:MyModel"

The entry point has the name of the model, and resolves to a `FeatureModel` or to a class of one
without arguments. A model is imported on first use, so a broken distribution does not affect the
other models.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from amtcore.errors import (
    ModelLoadError,
    ParameterError,
    UnknownModelError,
    check_known,
    nearest_hint,
    one_line,
)
from amtcore.features.feature_model import DTYPES, Extractor, FeatureModel
from amtcore.features.parameters import Parameter
from amtcore.features.renamed_streams import RenamedStreams
from amtcore.kernels.devices import get_backend
from amtcore.kernels.vector.threads import set_num_threads

GROUP = "amtcore.models"
_NAMES = ("dau1997", "osses2021", "king2019", "paulick2024", "glasberg2002", "moore2016")
#: The models of this package, in the order they are listed.
BUILT_IN = {name: f"amtcore.features.builtin:{name.upper()}" for name in _NAMES}


def _origin(entry_point: EntryPoint) -> str | None:
    dist = entry_point.dist
    return None if dist is None else f"{dist.name} {dist.version}"


@dataclass(frozen=True)
class Registration:
    """The name of a model and its entry points; more than one is an error."""

    name: str
    entry_points: tuple[EntryPoint, ...]

    @property
    def distribution(self) -> str | None:
        """Name and version of the model's distribution; None for this package."""
        return _origin(self.entry_points[0])

    def load(self) -> FeatureModel:
        """Return the model.

        Raises:
            ModelLoadError: Two distributions claim the name, or the entry point cannot be imported
                or is no model of this name.
        """
        claims = [f"{_origin(each) or 'amtcore'} ({each.value})" for each in self.entry_points]
        if len(claims) > 1:
            raise ModelLoadError(
                f"model {self.name!r}: expected one distribution of this name, got "
                f"{' and '.join(claims)}; uninstall or rename one"
            )
        where = f"model {self.name!r} of {claims[0]}"
        try:
            found = self.entry_points[0].load()
            model = found() if isinstance(found, type) else found
        except Exception as error:  # a stranger's module may raise anything while it is imported
            raise ModelLoadError(f"{where}: cannot be loaded: {one_line(error)}") from error
        if not isinstance(model, FeatureModel):
            raise ModelLoadError(
                f"{where}: expected a FeatureModel or a class of one, got {type(model).__name__}"
            )
        missing = [
            key for key in ("summary", "default_fs_hz", "streams") if not hasattr(model, key)
        ]
        if missing:
            raise ModelLoadError(f"{where}: expected it to have {', '.join(missing)}, got none")
        name = getattr(model, "name", None)
        if name != self.name:
            raise ModelLoadError(
                f"{where}: expected a model of the entry point's name, got {name!r}"
            )
        return model


def registrations() -> Mapping[str, Registration]:
    """Return every registered name, without importing a model."""
    found: dict[str, tuple[EntryPoint, ...]] = {
        name: (EntryPoint(name, value, GROUP),) for name, value in BUILT_IN.items()
    }
    for entry_point in _installed(tuple(sys.path)):
        found[entry_point.name] = (*found.get(entry_point.name, ()), entry_point)
    return {name: Registration(name, points) for name, points in found.items()}


@lru_cache(maxsize=8)
def _installed(path: tuple[str, ...]) -> list[EntryPoint]:
    """Return the entry points of the group, by name; they depend on `path`, which is `sys.path`.

    Listing them reads a file of each distribution: 27 ms in an environment of 270.
    """
    return sorted(entry_points(group=GROUP), key=lambda each: each.name)


def get_registration(name: str) -> Registration:
    """Return the registration of a model; `UnknownModelError` names the nearest name."""
    known = registrations()
    if name not in known:
        raise UnknownModelError(f"unknown model {name!r}{nearest_hint(name, known)}")
    return known[name]


def get_model(name: str) -> FeatureModel:
    """Return the model of this name."""
    return get_registration(name).load()


@dataclass(frozen=True)
class ModelInfo:
    """Description of a model in `list_models`.

    Args:
        name: Name in a job.
        summary: Description in one line.
        input_unit: Unit of the samples.
        default_fs_hz: Sampling rate if a job names none.
        params: Parameters of the model.
        streams: Summary of each stream by name.
        distribution: Name and version of the distribution; None for the models of this package.
        error: Reason why the model cannot be used; None for a usable model.
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
        """Return plain values, ready for JSON."""
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
    listener: Mapping[str, Any] | None = None,
) -> Extractor:
    """Build a model with its streams; raise every error of the request.

    A job calibrates audio and quarantines bad clips; an extractor that is called by hand does
    neither. Multiply digital audio by `Calibration(..).gain(clip, extractor.input_unit)` first. A
    clip with NaN or infinity raises `NonFiniteError`. Features are not checked.

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
        streams: Options by name of the stream. Streams of a filterbank have `frame_rate_hz`
            (default 100) and `pool` (default mean), "spikes" has the fields of `SpikeOptions`. None
            takes the model's default streams, mostly its first.
        threads: Threads for the kernels of this process; None keeps the number.
        dtype: "float32" or "float64".
        backend: "cpu" (None), "cuda", or "interpreted", which is cuda with an interpreter in the
            place of the driver. A model that can only use the CPU stays there; see
            `Extractor.backend`.
        listener: Hearing loss, for models with a parameter `audiogram`: that parameter, if wanted
            `ohc_share`, and `name`, which makes every stream's name `<stream>_<name>`.
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
    asked = streams or dict.fromkeys(found.default_streams)
    options = {name: given or {} for name, given in asked.items()}
    fs_hz = found.default_fs_hz if fs_hz is None else fs_hz
    loss = {key: value for key, value in (listener or {}).items() if value is not None}
    if listener is not None:
        _check_listener(found, loss, params or {})
    suffix = f"_{loss.pop('name')}" if "name" in loss else ""
    extractor = found.build(fs_hz, {**(params or {}), **loss}, options, dtype)
    if suffix:
        extractor = RenamedStreams(extractor, suffix)
    extractor.distribution = registration.distribution
    extractor.place(computing)
    return extractor


def _check_listener(
    model: FeatureModel, listener: Mapping[str, Any], params: Mapping[str, Any]
) -> None:
    """Raise if a model takes no listener, or has parameters that the listener sets."""
    if "audiogram" not in model.parameters:
        able = ", ".join(each.name for each in list_models() if "audiogram" in each.params)
        raise ParameterError(
            f"model {model.name!r} takes no listener: expected one of {able}; leave listener out"
        )
    keys = ("audiogram", "ohc_share")
    check_known("a listener has no key", listener, ("name", *keys))
    if not f"_{listener.get('name', '')}".isidentifier():
        raise ParameterError(
            "expected a listener's name of letters, digits and _, because it ends the names of "
            f"streams; got {listener['name']!r}"
        )
    if "audiogram" not in listener or any(key in params for key in keys):
        raise ParameterError(
            "expected audiogram in the listener, and neither audiogram nor ohc_share in params; "
            f"got the listener {dict(listener)} and params {dict(params)}"
        )


def list_models() -> list[ModelInfo]:
    """Return every registered model with its parameters and streams, or its error."""
    infos = []
    for name, registration in registrations().items():
        origin = registration.distribution
        try:
            model = registration.load()
        except ModelLoadError as error:
            infos.append(ModelInfo(name, distribution=origin, error=str(error)))
            continue
        infos.append(
            ModelInfo(
                model.name,
                model.summary,
                model.input_unit,
                model.default_fs_hz,
                dict(model.parameters),
                {stream: kind.summary for stream, kind in model.streams.items()},
                origin,
            )
        )
    return infos
