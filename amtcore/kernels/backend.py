"""Contract of a device: move clips, run a chain, run a row operation, and their gradients.

Arguments were checked by the operators. Tensors lie where the backend computes, and so do results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.chain import ChainPlan, ChainTables, Steps
from amtcore.kernels.operation import RowOperation

Gradients = tuple[Tensor, Tensor, Tensor]
Samples = NDArray[np.floating[Any]]


class Chain(Protocol):
    """A pooled chain where its backend computes."""

    @property
    def tables(self) -> ChainTables:
        """The steps, the filters, and the frame rate."""

    @property
    def tail(self) -> ChainTables | None:
        """The steps from the first look-ahead on; None if no step looks ahead."""

    def n_frames(self, n_samples: int) -> int:
        """Return the number of whole frames in `n_samples` samples."""

    def fresh(self, clips: int) -> Any:
        """Return the states of `clips` signals before their first sample."""

    def push(self, clips: Sequence[Any], states: Any, start: int) -> list[Any]:
        """Return the frames that these samples complete, (frames, width) a clip; update states."""

    def finish(self, states: Any, samples: Sequence[int]) -> list[Any]:
        """Return the last frames of signals that ended after `samples` samples each."""


class Backend(ABC):
    """Kernels of one kind of device; also a `Device` for row operations.

    Attributes:
        name: "cpu", "cuda" or "interpreted".
        device: Where its tensors lie.
    """

    name: str
    device: torch.device

    @abstractmethod
    def place(self, chain: ChainPlan) -> Chain:
        """Load a chain onto the device."""

    @abstractmethod
    def stream(self) -> AbstractContextManager[Any]:
        """Run the body on a device stream of this thread, independent of other threads."""

    @abstractmethod
    def upload(self, clip: Samples | Tensor) -> Tensor:
        """Return samples as a tensor on the device."""

    @abstractmethod
    def clip_of(self, x: Tensor) -> Any:
        """Convert a tensor to the form in which a chain takes clips."""

    @abstractmethod
    def download(self, frames: list[Any]) -> list[Samples]:
        """Return frames of a chain as arrays in host memory."""

    def share(self, clips: list[Any]) -> list[Any]:
        """Move clips to the device once, for several chains."""
        return clips

    @abstractmethod
    def run_steps(
        self, steps: Steps, x: Tensor, coef: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run operations that keep the rate; coefficients and states lie side by side.

        x (batch, channel or 1, time) becomes (batch, channel, time) and the final states.
        """

    @abstractmethod
    def run_step_adjoint(
        self, steps: Steps, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor, gstate: Tensor
    ) -> Gradients:
        """Return the gradients of one operation with respect to x, coef and state."""

    @abstractmethod
    def run_bank(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int], offsets: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Run a filter bank at full rate: (batch, channel, time) -> (batch, filter, time)."""

    @abstractmethod
    def run_bank_adjoint(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int],
        offsets: Sequence[int], gy: Tensor, gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        """Return the gradients of a bank with respect to x, coef and state."""

    @abstractmethod
    def run_rows(self, operation: RowOperation, *args: Any) -> Any:
        """Run a row operation, or its plain form if it has no kernel for this device."""

    @abstractmethod
    def run_items(self, body: Any, items: int, *arguments: Tensor | int, room: int = 0) -> None:
        """See `operation.Device`."""
