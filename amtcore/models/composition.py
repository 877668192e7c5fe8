"""How a model is put together: arguments of its stages, one type for all, replaced stages, hooks.

Streams, blocks and fused kernels use methods of our stages instead of calling them. Only a call
runs hooks, or a stage that a user put in, so these paths check first.

`load_state_dict(.., assign=True)` keeps the tensors that it is given. Stages without constants,
such as a resampler, are given none and would stay in their old type: `share_type` converts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from amtcore.errors import ParameterError
from amtcore.plain_numbers import plain_number
from amtcore.stages.stage import Stage
from amtcore.torch_internals import has_hooks


def stage_arguments(
    name: str,
    given: Mapping[str, Any] | None,
    models: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """All arguments of a stage.

    Args:
        name: Of the model's argument that holds `given`, for the error.
        given: What the caller set for the stage; None is nothing.
        models: What is the model's to say, such as learnable and dtype; the caller may repeat it
            but not contradict it.
        defaults: What the model sets for the stage and the caller may change.
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
    return {**(defaults or {}), **given, **models}


def share_type(model: nn.Module, _: Any = None) -> None:
    """Convert the stages of a model to the widest type that a stage has loaded."""
    stages = [stage for stage in model.modules() if isinstance(stage, Stage)]
    loaded = [stage.dtype for stage in stages if stage.state_dict()]
    wanted = torch.float64 if torch.float64 in loaded else torch.float32
    for stage in stages:
        if loaded and stage.dtype != wanted:
            stage.to(wanted)


_OWN = "amtcore."
_WHOLE = "call the model itself with the whole signal, which calls every stage as a module"


def defines(stage: nn.Module, changed: Iterable[str], unless: Iterable[str] = ()) -> bool:
    """Return True if a class that is not ours changes one of the methods that we go around.

    Args:
        stage: One of ours, one derived from ours, or any module.
        changed: Methods that decide what the stage computes.
        unless: Methods by which such a class takes part after all.
    """
    for kind in type(stage).__mro__:
        if kind.__module__.startswith(_OWN) or any(name in vars(kind) for name in unless):
            return False
        if any(name in vars(kind) for name in changed):
            return True
    return True


def is_replaced(stage: nn.Module) -> bool:
    """Return True if only a call computes what the stage computes."""
    return defines(stage, ("forward", "stream", "_run"))


def require_streamable(name: str, stage: nn.Module) -> None:
    """Raises where a stage cannot take chunks."""
    if defines(stage, ("forward",), ("stream", "_run")):
        raise ParameterError(
            f"the stage {name!r} is a {type(stage).__name__} without stream() and cannot process "
            f"chunks; {_WHOLE}"
        )


def require_fusable(
    model: nn.Module, stages: Iterable[tuple[str, nn.Module]], *unless: str
) -> None:
    """Raises where kernels would compute something else than the stages, or pass hooks by."""
    for name, stage in stages:
        what = ""
        if has_hooks(stage):
            what = "has hooks, which kernels do not run"
        elif defines(stage, ("forward", "stream", "_run"), unless):
            what = f"is a {type(stage).__name__}, which has no kernel"
        if what:
            raise ParameterError(
                f"features are made by kernels and blocks, not by calls of stages: "
                f"{type(model).__name__}.{name} {what}; {_WHOLE}"
            )
