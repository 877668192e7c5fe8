"""Composition of models: arguments of stages, one dtype for all stages, replaced stages, hooks.

Streams, blocks and fused kernels use methods of our stages instead of calling them. Only a call
runs hooks or a replaced stage, so these paths check for both first.

`load_state_dict(.., assign=True)` takes over the given tensors and their dtype. A `Model` then
converts its stages without constants, such as a resampler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from amtcore.errors import ParameterError
from amtcore.plain_numbers import plain_number
from amtcore.stages.constants import Converted
from amtcore.stages.stage import Stage, check_fs
from amtcore.torch_internals import has_hooks


def stage_arguments(
    name: str,
    given: Mapping[str, Any] | None,
    models: Mapping[str, Any],
    **defaults: Any,
) -> dict[str, Any]:
    """Return all arguments of a stage.

    Args:
        name: Name of the model's argument that holds `given`, for the error.
        given: The caller's arguments for the stage, or None.
        models: Arguments that the model sets, such as dtype; the caller must not contradict them.
        defaults: Arguments that the model sets and the caller may change.
    """
    given = given or {}
    for key in models.keys() & given.keys():
        number = plain_number(given[key])
        value = given[key] if number is None else number
        if value != models[key]:
            raise ParameterError(
                f"{name}: {key} is the model's, {models[key]!r}, and cannot be {given[key]!r} for "
                f"one stage; set {key} where the model is built, or leave it out"
            )
    return {**defaults, **given, **models}


def _share_type(model: nn.Module, _: Any) -> None:
    """Convert the stages of a model to the widest type that a stage has loaded."""
    stages = [stage for stage in model.modules() if isinstance(stage, Stage)]
    loaded = [stage.dtype for stage in stages if stage.state_dict()]
    wanted = torch.float64 if torch.float64 in loaded else torch.float32
    for stage in stages:
        if loaded and stage.dtype != wanted:
            stage.to(wanted)


class Model(Converted):
    """A model of stages; with `return_stages` outputs come with a dict of the stages' outputs."""

    def __init__(self, fs: float, learnable: bool, return_stages: bool) -> None:
        super().__init__()
        self.fs, self.learnable, self.return_stages = check_fs(fs), learnable, return_stages
        self.register_load_state_dict_post_hook(_share_type)

    @property
    def dtype(self) -> torch.dtype:
        """Working type."""
        stages = (stage for stage in self.children() if isinstance(stage, Stage))
        return next((stage.dtype for stage in stages), torch.get_default_dtype())


_WHOLE = "call the model itself with the whole signal, which calls every stage as a module"


#: Methods of a stage that compute; a stage whose class overrides one of them must be called.
COMPUTING = ("forward", "stream", "_run")


def defines(stage: nn.Module, changed: Iterable[str], unless: Iterable[str] = ()) -> bool:
    """Return True if a class of another package overrides one of the methods `changed`.

    A class that also has one of the methods `unless` does not count.
    """
    for kind in type(stage).__mro__:
        if kind.__module__.startswith("amtcore.") or any(name in vars(kind) for name in unless):
            return False
        if any(name in vars(kind) for name in changed):
            return True
    return True


def require_streamable(name: str, stage: nn.Module) -> None:
    """Raise if a stage cannot take chunks."""
    if defines(stage, ("forward",), ("stream", "_run")):
        raise ParameterError(
            f"the stage {name!r} is a {type(stage).__name__} without stream() and cannot process "
            f"chunks; {_WHOLE}"
        )


def require_fusable(
    model: nn.Module, stages: Iterable[tuple[str, nn.Module]], *unless: str
) -> None:
    """Raise if kernels would skip hooks or replaced stages."""
    for name, stage in stages:
        if has_hooks(stage):
            what = "has hooks, which kernels do not run"
        elif defines(stage, COMPUTING, unless):
            what = f"is a {type(stage).__name__}, which has no kernel"
        else:
            continue
        raise ParameterError(
            f"features are made by kernels and blocks, not by calls of stages: "
            f"{type(model).__name__}.{name} {what}; {_WHOLE}"
        )
