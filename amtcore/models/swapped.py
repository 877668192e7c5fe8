"""Stages that are not called as modules: where hooks and replacements would go unnoticed.

Streams, blocks and fused kernels use methods of our stages, not their calls. A hook, or a stage
that somebody put in, is only seen by a call; so these paths ask here first.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules import module as torch_module

from amtcore.errors import ParameterError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OWN = "amtcore."
_WHOLE = "call the model itself with the whole signal, which calls every stage as a module"


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of the module, or of one inside it, would run hooks of their own."""
    return any(getattr(each, hooks) for each in module.modules() for hooks in _HOOKS)


def any_hooks(module: nn.Module) -> bool:
    """As `has_hooks`, those that torch keeps for all modules among them."""
    return torch_module._has_any_global_hook() or has_hooks(module)


def defines(stage: nn.Module, changed: Iterable[str], unless: Iterable[str] = ()) -> bool:
    """Whether a class that is not ours changes one of the methods that we go around.

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


def is_foreign(stage: nn.Module) -> bool:
    """Whether only a call computes what the stage computes."""
    return defines(stage, ("forward", "stream", "_run"))


def check_streams(name: str, stage: nn.Module) -> None:
    """Raises where a stage cannot take chunks."""
    if defines(stage, ("forward",), ("stream", "_run")):
        raise ParameterError(
            f"the stage {name!r} is a {type(stage).__name__} without stream() and cannot process "
            f"chunks; {_WHOLE}"
        )


def check_fuses(model: nn.Module, stages: Iterable[tuple[str, nn.Module]], *unless: str) -> None:
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
