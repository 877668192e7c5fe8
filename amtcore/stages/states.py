"""States between chunks: what a stage or model is handed must be of the kind that it returned."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from amtcore.errors import ShapeError, StateError, WrongDeviceError

#: A type, or one for each part of a tuple.
Form = type | tuple[type, ...]


def _fits(state: Any, form: Form) -> bool:
    if not isinstance(form, tuple):
        return isinstance(state, form)
    if not isinstance(state, tuple) or len(state) != len(form):
        return False
    return all(isinstance(part, kind) for part, kind in zip(state, form, strict=True))


def check_state(owner: Any, state: Any, form: Form) -> None:
    """Raise where a state is of another kind than those of its owner."""
    if _fits(state, form):
        return
    kinds = form if isinstance(form, tuple) else (form,)
    names = " and ".join(kind.__name__ for kind in kinds)
    raise StateError(
        f"{type(owner).__name__}: expected the state that its stream returned with the previous "
        f"chunk ({names}), or None at the start, got {type(state).__name__}"
    )


def check_state_device(owner: Any, state: Any, x: Tensor) -> None:
    """Raise where a state lies on another device than the chunk."""
    for part in state if isinstance(state, tuple) else (state,):
        if isinstance(part, Tensor) and part.device != x.device:
            raise WrongDeviceError(
                f"{type(owner).__name__}: expected a state on {str(x.device)!r}, as the chunk, got "
                f"one on {str(part.device)!r}; move the state, or start with None"
            )


def check_kept(kept: tuple[int, ...], chunk: tuple[int, ...]) -> None:
    """Raise where a chunk has other signals than the samples that are kept of the previous one."""
    if kept != chunk:
        raise ShapeError(
            f"expected a chunk of batch and channels {tuple(kept)} as before, got {tuple(chunk)}; "
            "streams of other signals start with state None"
        )


def taking_states(stream: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """A `stream` that refuses the state of something else before any work."""

    @functools.wraps(stream)
    def call(self: Any, x: Tensor, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        if state is not None:
            check_state(self, state, form)
            if isinstance(x, Tensor):
                check_state_device(self, state, x)
        return stream(self, x, state, *args, **kwargs)

    return call
