"""What a model says of itself: how it is built, and the streams it gives."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from amtcore.errors import ParameterError, nearest_hint

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
