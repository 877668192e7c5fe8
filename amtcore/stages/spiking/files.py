"""Integrate-and-fire layers as JSON, as text or in a file, and as graphs of NIR."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from amtcore.errors import ParameterError
from amtcore.stages.spiking.attributes import HasAttributes
from amtcore.stages.spiking.nir import to_nir

_JSON_CLASS = "LIFExodus"


class HasFiles(HasAttributes):
    """What `LIFExodus` is written to and read from."""

    learnable: bool
    dtype: torch.dtype

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, int]:
            """(inputs, neurons)."""

    def to_json(self) -> str:
        """Options and constants as JSON; states belong to a run and are left out."""
        unlimited = self.max_spikes_per_dt == math.inf
        options: dict[str, Any] = {
            "class": _JSON_CLASS,
            "shape": list(self.shape),
            "dt": self.dt,
            "leak_mode": self.leak_mode,
            "learning_window": self.learning_window,
            "max_spikes_per_dt": None if unlimited else self.max_spikes_per_dt,
            "learnable": self.learnable,
            "dtype": str(self.dtype).removeprefix("torch."),
            "constants": {name: getattr(self, name).tolist() for name in self.constants},
        }
        return json.dumps(options)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The layer that `to_json` wrote, at rest."""
        try:
            options = json.loads(text)
            if options.pop("class") != _JSON_CLASS:
                raise ParameterError(f"expected JSON of a {_JSON_CLASS}")
            most, dtype = options.pop("max_spikes_per_dt"), getattr(torch, options.pop("dtype"))
            shape, constants = tuple(options.pop("shape")), options.pop("constants")
        except (KeyError, AttributeError, TypeError, json.JSONDecodeError) as error:
            raise ParameterError(f"expected what to_json wrote, got {text[:80]!r}") from error
        most = math.inf if most is None else most
        build: Any = cls
        layer: Self = build(shape, **options, **constants, dtype=dtype, max_spikes_per_dt=most)
        return layer

    def save(self, filename: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file."""
        Path(filename).write_text(self.to_json(), encoding="utf-8")

    def load(self, filename: str | os.PathLike[str]) -> Self:
        """Take constants and options from a file that `save` wrote; states stay. Returns the layer.

        Shape, time step and leak mode must be those of the layer: `from_json` builds any.
        """
        stored = type(self).from_json(Path(filename).read_text(encoding="utf-8"))
        for name in ("shape", "dt", "leak_mode"):
            mine, other = getattr(self, name), getattr(stored, name)
            if mine != other:
                raise ParameterError(
                    f"expected a layer with {name} {mine!r}, got {other!r} in {filename}; build "
                    "one from it with from_json()"
                )
        options = ("learning_window", "max_spikes_per_dt")
        self.set_attributes({name: getattr(stored, name) for name in (*self.constants, *options)})
        return self

    def to_nir(self) -> Any:
        """The layer as a graph of the `nir` package; see `nir.to_nir`."""
        return to_nir(self)
