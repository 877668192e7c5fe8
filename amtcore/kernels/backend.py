"""Contract of a device: move clips, run a chain, run a row operation, and their gradients.

Arguments were checked by the operators. Tensors lie where the backend computes, and so do results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.chain import ChainPlan, ChainTables
from amtcore.kernels.operation import RowOperation

Gradients = tuple[Tensor, Tensor, Tensor]
Samples = NDArray[np.floating[Any]]


class Chain(ABC):
    """A pooled chain where its backend computes."""

    def __init__(self, plan: ChainPlan) -> None:
        self.plan = plan

    @abstractmethod
    def fresh(self, clips: int) -> Any:
        """Return the states of `clips` signals before their first sample."""

    def push(self, clips: Sequence[Any], states: Any, start: int) -> list[Any]:
        """Return the frames that these samples complete, (frames, width) a clip; update states."""
        return self.run(self.plan.tables, clips, states, [start] * len(clips))

    def finish(self, states: Any, samples: Sequence[int]) -> list[Any]:
        """Return the last frames of signals that ended after `samples` samples each."""
        plan = self.plan
        zeros = [np.zeros(plan.zeros_after(count), plan.coef.dtype) for count in samples]
        return self.run(plan.tail or plan.tables, zeros, states, samples)

    @abstractmethod
    def run(
        self, tables: ChainTables, clips: Sequence[Any], states: Any, starts: Sequence[int]
    ) -> list[Any]:
        """Return the frames of clips, each after `starts` earlier samples; update states."""


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
    def run_full_rate(self, tables: ChainTables, x: Tensor, coef: Tensor, state: Tensor) -> Tensor:
        """Run a chain at full rate: x (batch, channel or 1, time) -> (batch, width, time).

        Coefficients and states are packed in lanes; the states are updated.
        """

    @abstractmethod
    def run_adjoint(
        self, tables: ChainTables, x: Tensor, gy: Tensor, coef: Tensor, state: Tensor,
        gstate: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the gradients of x (batch, channel, time), and of the coefficients of each item.

        The chain is one operation or one bank. The packed gradient of the last state becomes the
        gradient of the first state.
        """

    def run_chain(
        self, tables: ChainTables, x: Tensor, coef: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run a chain of `tables_of_steps` or `tables_of_bank`: return outputs and last states.

        Shapes: x (batch, channel or 1, time), coef (channel, coefficients of all operations), state
        (batch, channel, values), outputs (batch, channel, time). A bank has filters in the place of
        channels, but in x.
        """
        states = tables.pack(state)
        y = self.run_full_rate(tables, x.detach().contiguous(), tables.pack(coef), states)
        return y, tables.unpack(states)

    def run_chain_adjoint(
        self, tables: ChainTables, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor,
        gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        """Return the gradients of an operation, or of a bank, with respect to x, coef, state."""
        coefs, states, gstates = map(tables.pack, (coef, state, gstate))
        signals = x.detach().contiguous(), gy.detach().contiguous()
        gx, gcoefs = self.run_adjoint(tables, *signals, coefs, states, gstates)
        if x.shape[1] != tables.channels:
            gx = gx.sum(1, keepdim=True)
        return gx, tables.unpack(gcoefs).sum(0), tables.unpack(gstates)

    def run_rows(self, operation: RowOperation, *args: Any) -> Any:
        """Run a row operation, or its plain form if it has no kernel for this device."""
        return operation.run(self, *args)

    @abstractmethod
    def run_items(self, body: Any, items: int, *arguments: Tensor | int, room: int = 0) -> None:
        """See `operation.Device`."""
