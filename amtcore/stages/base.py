"""What all stages share: parameters that may be learnable, input checks, state in and out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ParameterError, ShapeError

_DTYPES = (torch.float32, torch.float64)


def check_fs(fs: float) -> float:
    """The sampling rate as a float; raises when it is not a positive number."""
    if not (isinstance(fs, (int, float)) and fs > 0):
        raise ParameterError(f"fs must be a sampling rate in Hz above 0, got {fs!r}")
    return float(fs)


def check_below_nyquist(name: str, highest_hz: float, fs: float) -> None:
    """Raises when a frequency reaches half the sampling rate."""
    if not highest_hz < fs / 2:
        raise ParameterError(
            f"{name} {highest_hz:g} Hz must lie below half the sampling rate "
            f"({fs / 2:g} Hz); raise fs or lower {name}"
        )


class Stage(nn.Module):
    """A stage of a model: a recurrence over time with explicit state.

    Args:
        fs: Sampling rate in Hz.
        learnable: Whether the stage's constants are parameters (else buffers).
        dtype: Working type, torch.float32 or torch.float64; inputs are converted to it.
        backend: None picks the kernel by device, "reference" or "cpu" forces one.

    Invariants:
        `stage(x)` equals the outputs of `stage.stream` over any split of x, one after another.
    """

    #: Whether outputs wait for later inputs; `stream` then takes `last`.
    looks_ahead = False

    def __init__(
        self, fs: float, learnable: bool, dtype: torch.dtype, backend: str | None = None
    ) -> None:
        super().__init__()
        if dtype not in _DTYPES:
            raise ParameterError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
        self.fs = check_fs(fs)
        self.learnable = learnable
        self.dtype = dtype
        self.backend = backend

    @property
    def can_stream(self) -> bool:
        """Whether chunks can be processed one after another."""
        return True

    def constant(self, name: str, value: Tensor | Sequence[float] | float) -> None:
        """Register a constant under its name: a parameter when learnable, else a buffer."""
        tensor = torch.as_tensor(value, dtype=self.dtype).clone()
        if self.learnable:
            self.register_parameter(name, nn.Parameter(tensor))
        else:
            self.register_buffer(name, tensor)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keep `dtype` true after `.float()`, `.double()` or `.to(dtype)`."""
        super()._apply(fn, recurse)
        first = next((t for t in (*self.parameters(), *self.buffers())), None)
        if first is not None:
            self.dtype = first.dtype
        return self

    def as_input(self, x: Tensor, axes: tuple[int, ...], names: str) -> Tensor:
        """`x` in the working type; raises when it is not a float tensor with so many axes."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(f"expected a floating-point tensor {names}, got {kind}")
        if x.ndim not in axes:
            raise ShapeError(f"expected {names}, got a tensor of shape {tuple(x.shape)}")
        return x.to(self.dtype)


class ChannelStage(Stage):
    """A stage that maps (batch, channel, time) to the same shape, channel by channel."""

    def rest_state(self, batch: int, channels: int) -> Tensor:
        """State before the first sample, (batch, channel, values)."""
        raise NotImplementedError

    def _run(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def stream(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Process the next chunk.

        Args:
            x: (batch, channel, time) or (channel, time).
            state: What the previous chunk returned; None at the start.
        Returns:
            Output of the same shape as x, and the state to pass with the next chunk.
        """
        x = self.as_input(x, (2, 3), "(batch, channel, time) or (channel, time)")
        batched = x if x.ndim == 3 else x.unsqueeze(0)
        if state is None:
            state = self.rest_state(batched.shape[0], batched.shape[1])
        y, state = self._run(batched, state)
        return (y if x.ndim == 3 else y.squeeze(0)), state

    def forward(self, x: Tensor) -> Tensor:
        """The whole signal at once: (batch, channel, time) or (channel, time), same shape out."""
        return self.stream(x)[0]
