"""The models by name: what a job can ask for, with which parameters and feature streams."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ParameterError, UnknownModelError
from .dau1997 import Dau1997
from .glasberg2002 import Glasberg2002
from .king2019 import King2019
from .moore2016 import Moore2016
from .osses2021 import Osses2021
from .paulick2024 import Paulick2024

#: Constructor arguments that a job does not set.
_INTERNAL = ("self", "fs", "learnable", "return_stages", "dtype")


@dataclass(frozen=True)
class StreamKind:
    """A feature stream that a model offers: its unit, axes and one line of what it is.

    `layout` is "frames", or "events" for sparse streams that another stream of the model drives.
    """

    unit: str
    axes: tuple[str, ...]
    summary: str
    layout: str = "frames"


@dataclass(frozen=True)
class ModelEntry:
    """A registered model."""

    name: str
    model: type[Any]
    summary: str
    default_fs_hz: float
    streams: Mapping[str, StreamKind]

    def parameters(self) -> dict[str, Any]:
        """Constructor arguments a job may set, with their defaults."""
        signature = inspect.signature(self.model.__init__)
        return {k: p.default for k, p in signature.parameters.items() if k not in _INTERNAL}

    def build(self, fs_hz: float, params: Mapping[str, Any], dtype: torch.dtype) -> Any:
        """The model; a wrong parameter is a `ParameterError` that names the nearest right one."""
        for name in params:
            if name not in self.parameters():
                raise ParameterError(
                    f"model {self.name!r} has no parameter {name!r}"
                    f"{nearest_hint(name, self.parameters())}"
                )
        try:
            return self.model(fs_hz, dtype=dtype, **params)
        except TypeError as error:
            raise ParameterError(f"model {self.name!r}: {error}") from error


_MODULATION = StreamKind(
    "model units", ("time", "channel_modulation"), "modulation filter outputs, ragged by channel"
)
_ADAPTATION = StreamKind("model units", ("time", "channel"), "after the adaptation loops")
_ENVELOPE = StreamKind(
    "input unit", ("time", "channel"), "hair-cell envelope: an auditory spectrogram"
)

_SPIKES = StreamKind(
    "spikes",
    ("time", "channel"),
    "sparse spikes of integrate-and-fire neurons that hear another stream: amtcore.spikes",
    "events",
)

_KING_MODULATION = StreamKind(
    "input unit", ("time", "channel_modulation"), "modulation filter outputs, equal in all channels"
)
_HIGH_PASSED = StreamKind("input unit", ("time", "channel"), "after the adaptation's high-pass")
_POTENTIAL = StreamKind("V", ("time", "channel"), "hair-cell receptor potential above rest")
_VELOCITY = StreamKind("m/s", ("time", "channel"), "basilar-membrane velocity: pool its rms or max")

_SHORT = StreamKind(
    "sone", ("time", "loudness"), "short-term loudness: of a sound event, such as a syllable"
)
_LONG = StreamKind("sone", ("time", "loudness"), "long-term loudness: of a stretch of sound")
_SPECIFIC = StreamKind("sone/Cam", ("time", "channel"), "specific loudness, both ears together")
_SUMMARY = StreamKind(
    "sone", ("clip", "statistic"), "one row a clip: maxima and percentiles of the traces"
)
_LOUDNESS = {
    "short_term_loudness": _SHORT,
    "long_term_loudness": _LONG,
    "specific_loudness": _SPECIFIC,
    "loudness_summary": _SUMMARY,
}

MODELS = {
    entry.name: entry
    for entry in (
        ModelEntry(
            "dau1997",
            Dau1997,
            "Dau, Kollmeier and Kohlrausch (1997): gammatone, hair cell, adaptation, modulation",
            44100.0,
            {
                "modulation": _MODULATION,
                "adaptation": _ADAPTATION,
                "envelope": _ENVELOPE,
                "spikes": _SPIKES,
            },
        ),
        ModelEntry(
            "osses2021",
            Osses2021,
            "Osses Vecchi and Kohlrausch (2021): Dau (1997) behind headphones and middle ear",
            44100.0,
            {
                "modulation": _MODULATION,
                "adaptation": _ADAPTATION,
                "envelope": _ENVELOPE,
                "spikes": _SPIKES,
            },
        ),
        ModelEntry(
            "king2019",
            King2019,
            "King, Varnet and Lorenzi (2019): gammatone, compression, high-pass, modulation",
            44100.0,
            {
                "modulation": _KING_MODULATION,
                "adaptation": _HIGH_PASSED,
                "envelope": _ENVELOPE,
                "spikes": _SPIKES,
            },
        ),
        ModelEntry(
            "paulick2024",
            Paulick2024,
            "Paulick et al. (2024), CASP: nonlinear filters, hair cell, adaptation, modulation",
            44100.0,
            {
                "modulation": _MODULATION,
                "adaptation": _ADAPTATION,
                "envelope": _POTENTIAL,
                "velocity": _VELOCITY,
                "spikes": _SPIKES,
            },
        ),
        ModelEntry(
            "glasberg2002",
            Glasberg2002,
            "Glasberg and Moore (2002): loudness over time, one signal for both ears",
            32000.0,
            _LOUDNESS,
        ),
        ModelEntry(
            "moore2016",
            Moore2016,
            "Moore, Glasberg and Schlittenlacher (2016): loudness over time at two ears",
            32000.0,
            _LOUDNESS,
        ),
    )
}


def get_model(name: str) -> ModelEntry:
    """The entry of a model; `UnknownModelError` names the nearest one."""
    if name not in MODELS:
        raise UnknownModelError(f"unknown model {name!r}{nearest_hint(name, MODELS)}")
    return MODELS[name]


def nearest_hint(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f": did you mean {near[0]!r}?"
    return f": expected one of {', '.join(known)}"
