"""Base classes of all stages: input checks, states between chunks, and chains of recurrences.

A stage is a recurrence over time with explicit state. `stream` takes a chunk and the state after
the previous chunk; `forward` is the stream of one chunk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amtcore.errors import ParameterError, ShapeError, StateError, WrongDeviceError
from amtcore.kernels.chain import ChainStep, FilterBank, identity_bank
from amtcore.kernels.operators import rest_state, run_ops
from amtcore.kernels.torch_state import is_exporting, rows_of
from amtcore.stages.constants import WORKING_TYPES, HasConstants, refuse_torchscript
from amtcore.torch_internals import (
    BACKWARD_HOOKS,
    BACKWARD_PRE_HOOKS,
    BUFFERS,
    GLOBAL_BACKWARD_HOOKS,
    PARAMETERS,
)

#: A type, or one for each part of a tuple.
Form = type | tuple[type, ...]


def check_state(owner: Any, state: Any, form: Form, x: Tensor) -> None:
    """Raise if a state is not of the kind that its owner returns, or not where the chunk x is."""
    kinds = form if isinstance(form, tuple) else (form,)
    parts = state if isinstance(form, tuple) and isinstance(state, tuple) else (state,)
    if len(parts) != len(kinds) or not all(map(isinstance, parts, kinds)):
        names = " and ".join(kind.__name__ for kind in kinds)
        raise StateError(
            f"{type(owner).__name__}: expected the state that its stream returned with the "
            f"previous chunk ({names}), or None at the start, got {type(state).__name__}"
        )
    for part in parts:
        if isinstance(part, Tensor) and part.device != x.device:
            raise WrongDeviceError(
                f"{type(owner).__name__}: expected a state on {str(x.device)!r}, as the chunk, got "
                f"one on {str(part.device)!r}; move the state, or start with None"
            )


def check_kept(kept: tuple[int, ...], chunk: tuple[int, ...]) -> None:
    """Raise if a chunk differs in batch or channels from the previous chunk."""
    if kept != chunk:
        raise ShapeError(
            f"expected a chunk of batch and channels {tuple(kept)} as before, got {tuple(chunk)}; "
            "streams of other signals start with state None"
        )


def check_fs(fs: float) -> float:
    """Return the sampling rate as a float; raise if it is not a positive number."""
    if not (isinstance(fs, (int, float)) and fs > 0):
        raise ParameterError(f"fs must be a sampling rate in Hz above 0, got {fs!r}")
    return float(fs)


def check_below_nyquist(name: str, highest_hz: float, fs: float) -> None:
    """Raise if a frequency reaches half the sampling rate."""
    if not highest_hz < fs / 2:
        raise ParameterError(
            f"{name} {highest_hz:g} Hz must lie below half the sampling rate "
            f"({fs / 2:g} Hz); raise fs or lower {name}"
        )


def in_autocast(x: Tensor) -> bool:
    """Return True if a region of torch.autocast is active where x is."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x @ matrix in their own type, also inside torch.autocast."""
    if is_exporting():  # a dynamic axis before the last one: see `rows_of`
        return (rows_of(x) @ matrix).reshape(*x.shape[:-1], matrix.shape[-1])
    if not in_autocast(x):
        return x @ matrix
    with torch.autocast(x.device.type, enabled=False):
        return x @ matrix


def lowpass_memory_s(cutoff_hz: float, order: int = 1) -> float:
    """Return the time constant in s of the slowest pole of a Butterworth low- or high-pass."""
    return 1.0 / (2.0 * math.pi * cutoff_hz * math.sin(math.pi / (2 * order)))


def check_channels(expected: int, got: int) -> None:
    """Raise if a stage gets another number of channels than it was built for."""
    if expected != got:
        raise ParameterError(f"expected {expected} channels, got {got}")


@dataclass
class StreamChunk:
    """The state that a call of a stage takes and updates, so that hooks run on chunks too.

    `ending` is {"last": ..} for stages that look ahead, else empty.
    """

    state: Any
    ending: dict[str, bool]


def accepts_chunks(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `forward` to pass a `chunk` on to `stream`.

    Torch runs backward hooks for tensors and tuples only. With such hooks a list becomes a tuple,
    which the stage's `__call__` converts to a list again.
    """

    @functools.wraps(forward)
    def call(self: Any, *args: Any, chunk: StreamChunk | None = None, **kwargs: Any) -> Any:
        if chunk is None:
            y = forward(self, *args, **kwargs)
        else:
            y, chunk.state = self.stream(*args, chunk.state, **chunk.ending)
        if isinstance(y, list) and (
            getattr(self, BACKWARD_HOOKS)
            or getattr(self, BACKWARD_PRE_HOOKS)
            or any(GLOBAL_BACKWARD_HOOKS)
        ):
            return tuple(y)
        return y

    return call


def check_floating(x: Any, names: str, least_axes: int = 0) -> None:
    """Raise ShapeError unless `x` is a tensor of float32 or float64 with `least_axes` or more.

    The error calls the axes `names`.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"expected a floating-point tensor {names}, got {kind}")
    if x.dtype not in WORKING_TYPES and not in_autocast(x):
        raise ShapeError(
            f"expected float32 or float64, got {x.dtype}, which has lost the digits of soft "
            "sounds already: convert the input with .float(), or call inside torch.autocast"
        )
    if x.ndim < least_axes:
        raise ShapeError(f"expected {names}, got a tensor of shape {tuple(x.shape)}")


class Stage(HasConstants):
    """A stage of a model: a recurrence over time with explicit state.

    Args:
        fs: Sampling rate in Hz.
        learnable: Whether the stage's constants are learnt: each is then a parameter `<name>_raw`.
        dtype: Working type, torch.float32 or torch.float64; inputs are converted to it.
        backend: None picks the kernel by device, "reference" or "cpu" forces one.

    Invariants:
        `stage(x)` equals the outputs of `stage.stream` over any split of x, one after another.
    """

    #: True if outputs wait for later inputs; `stream` then takes `last`.
    looks_ahead = False
    #: Types of the states of `stream`; None leaves them unchecked.
    state_form: Form | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls):
            cls.forward = accepts_chunks(vars(cls)["forward"])

    def __init__(
        self, fs: float, learnable: bool, dtype: torch.dtype, backend: str | None = None
    ) -> None:
        super().__init__(learnable, dtype)
        if dtype not in WORKING_TYPES:
            raise ParameterError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
        self.fs = check_fs(fs)
        self.backend = backend

    @property
    def can_stream(self) -> bool:
        """Return True if chunks can be processed one after another."""
        return True

    @property
    def memory_s(self) -> float | None:
        """Time constant in s of the slowest state; None if the stage does not state one."""
        return None

    def as_input(self, x: Tensor, axes: tuple[int, ...], names: str, state: Any = None) -> Tensor:
        """Return `x` in the working type; raise unless it is a float tensor on the stage's device.

        Every call of a model comes through here, so `torch.jit.trace` is refused here. A state that
        is not None must be as `state_form` says, and on the device of x.
        """
        if torch.jit.is_tracing():  # type: ignore[attr-defined]
            refuse_torchscript(type(self))
        check_floating(x, names)
        if x.ndim not in axes:
            raise ShapeError(f"expected {names}, got a tensor of shape {tuple(x.shape)}")
        kept = (*getattr(self, PARAMETERS).values(), *getattr(self, BUFFERS).values())
        own = next((constant.device for constant in kept if constant is not None), x.device)
        if own != x.device:
            raise WrongDeviceError(
                f"{type(self).__name__}: expected a tensor on {str(own)!r}, where the stage is, "
                f"got one on {str(x.device)!r}; move the tensor with .to({str(own)!r}), or the "
                f"model with .to({str(x.device)!r})"
            )
        if state is not None and self.state_form is not None:
            check_state(self, state, self.state_form, x)
        return x.to(self.dtype)


class BlockStage(Stage):
    """A stage of chain operations; signals, chunks and gradients all go through `run_ops`."""

    state_form: Form | None = Tensor
    #: Axes of an input without and with a batch, and their names.
    axes, axis_names = (2, 3), "(batch, channel, time) or (channel, time)"

    def block_ops(self, channels: int) -> list[ChainStep]:
        """Return the stage as steps of a chain; raise if it needs more than steps."""
        raise NotImplementedError

    def bank(self, channels: int) -> FilterBank:
        """Return the filters after the steps; by default one identity filter a channel."""
        return identity_bank(channels, torch.zeros(1, dtype=self.dtype))

    def _run(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the output for a chunk with a batch, and the next state."""
        raise NotImplementedError

    def stream(self, x: Tensor, state: Any = None) -> tuple[Any, Any]:
        """Process the next chunk.

        Args:
            x: As for `forward`.
            state: State after the previous chunk, (batch, channel, values); None at the start.
        Returns:
            The output of `forward` for this chunk, and the state to pass with the next chunk.
        """
        x = self.as_input(x, self.axes, self.axis_names, state)
        batched = x.ndim == self.axes[1]
        y, state = self._run(x if batched else x.unsqueeze(0), state)
        return (y if batched else y.squeeze(0)), state

    def forward(self, x: Tensor) -> Any:
        """The whole signal at once."""
        return self.stream(x)[0]


class FilterbankStage(BlockStage):
    """A stage that splits a waveform into channels: (batch, time) -> (batch, channel, time)."""

    axes, axis_names = (1, 2), "(batch, time) or (time,)"
    num_channels: int

    def _run(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return run_ops(x.unsqueeze(1), self.block_ops(self.num_channels), state, self.backend)


class ChannelStage(BlockStage):
    """A stage that maps (batch, channel, time) to the same shape, channel by channel."""

    def recurrences(self, channels: int) -> list[ChainStep]:
        """Return the operations of the stage, in their order."""
        raise NotImplementedError

    def block_ops(self, channels: int) -> list[ChainStep]:
        return self.recurrences(channels)

    def rest_state(self, batch: int, channels: int) -> Tensor:
        """State before the first sample, (batch, channel, values)."""
        return rest_state(self.recurrences(channels), batch)

    def _run(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return run_ops(x, self.recurrences(x.shape[1]), state, self.backend)
