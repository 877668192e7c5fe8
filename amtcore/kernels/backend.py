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

from amtcore.kernels.chain import PooledChain, PooledTables, Steps
from amtcore.kernels.operation import RowOperation

Gradients = tuple[Tensor, Tensor, Tensor]
Samples = NDArray[np.floating[Any]]


class Chain(Protocol):
    """A pooled chain where its backend computes."""

    @property
    def tables(self) -> PooledTables:
        """What it needs to know besides coefficients and states."""

    @property
    def tail(self) -> PooledTables | None:
        """The operations from the first that looks ahead on; None where none does."""

    def n_frames(self, n_samples: int) -> int:
        """Whole frames in so many samples."""

    def fresh(self, clips: int) -> Any:
        """States of so many signals before their first sample."""

    def push(self, clips: Sequence[Any], states: Any, start: int) -> list[Any]:
        """Frames that these samples complete, (frames, width) a clip; states move on."""

    def finish(self, states: Any, samples: Sequence[int]) -> list[Any]:
        """Frames that were waiting for what follows the last of so many samples."""


class Backend(ABC):
    """Kernels of one kind of device; also a `Device` for row operations.

    Attributes:
        name: "cpu", "cuda" or "interpreted".
        device: Where its tensors lie.
    """

    name: str
    device: torch.device

    @abstractmethod
    def place(self, chain: PooledChain) -> Chain:
        """A chain, ready to run here."""

    @abstractmethod
    def stream(self) -> AbstractContextManager[Any]:
        """Inside, work of this thread does not wait for that of others."""

    @abstractmethod
    def upload(self, clip: Samples | Tensor) -> Tensor:
        """Samples as a tensor on the device."""

    @abstractmethod
    def clip_of(self, x: Tensor) -> Any:
        """A tensor as a chain takes its clips."""

    @abstractmethod
    def download(self, frames: list[Any]) -> list[Samples]:
        """What a chain made, as arrays of the host."""

    def share(self, clips: list[Any]) -> list[Any]:
        """Clips that several chains will take, moved once."""
        return clips

    @abstractmethod
    def run_steps(
        self, steps: Steps, x: Tensor, coef: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Operations that keep the rate: x (batch, channel or 1, time) -> (batch, channel, time)
        and the states after them; coefficients and states lie side by side."""

    @abstractmethod
    def run_step_adjoint(
        self, steps: Steps, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor, gstate: Tensor
    ) -> Gradients:
        """Gradients of one operation with respect to x, coef and state."""

    @abstractmethod
    def run_bank(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int], offsets: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """The filters of a bank at full rate: (batch, channel, time) -> (batch, filter, time)."""

    @abstractmethod
    def run_bank_adjoint(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int],
        offsets: Sequence[int], gy: Tensor, gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        """Gradients of a bank with respect to x, coef and state."""

    @abstractmethod
    def run_rows(self, operation: RowOperation, *args: Any) -> Any:
        """A row operation; its plain form where it has no kernel for this device."""

    @abstractmethod
    def run_items(self, body: Any, items: int, *arguments: Tensor | int, room: int = 0) -> None:
        """See `operation.Device`."""
