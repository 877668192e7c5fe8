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

#: Constructor arguments that a job does not set.
_INTERNAL = ("self", "fs", "learnable", "return_stages", "dtype")


@dataclass(frozen=True)
class StreamKind:
    """A feature stream that a model offers: its unit, axes and one line of what it is."""

    unit: str
    axes: tuple[str, ...]
    summary: str


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

MODELS = {
    entry.name: entry
    for entry in (
        ModelEntry(
            "dau1997",
            Dau1997,
            "Dau, Kollmeier and Kohlrausch (1997): gammatone, hair cell, adaptation, modulation",
            44100.0,
            {"modulation": _MODULATION, "adaptation": _ADAPTATION, "envelope": _ENVELOPE},
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
