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

from amtcore.kernels.chain import (
    ChainPlan,
    ChainTables,
    Steps,
    pad_filters,
    tables_of_bank,
    tables_of_steps,
    unpad_filters,
)
from amtcore.kernels.operation import RowOperation
from amtcore.kernels.vector.arrays import pack_tensor, unpack_tensor

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

    def run_steps(
        self, steps: Steps, x: Tensor, coef: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run operations that keep the rate; coefficients and states lie side by side.

        x (batch, channel or 1, time) becomes (batch, channel, time) and the final states.
        """
        channels, packed = coef.shape[0], pack_tensor(state)
        tables = tables_of_steps(steps, channels)
        y = self.run_full_rate(tables, x.detach().contiguous(), pack_tensor(coef), packed)
        return y, unpack_tensor(packed, channels)

    def run_bank(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int], offsets: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Run a filter bank at full rate: (batch, channel, time) -> (batch, filter, time)."""
        tables = tables_of_bank(tuple(kinds), tuple(offsets), coef.shape[1])
        coefs, states = (pack_tensor(pad_filters(t, offsets, len(kinds))) for t in (coef, state))
        y = self.run_full_rate(tables, x.detach().contiguous(), coefs, states)
        return y, unpad_filters(unpack_tensor(states, tables.channels), offsets, len(kinds))

    def run_step_adjoint(
        self, steps: Steps, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor, gstate: Tensor
    ) -> Gradients:
        """Return the gradients of one operation with respect to x, coef and state."""
        channels, coefs, states, gstates = coef.shape[0], *map(pack_tensor, (coef, state, gstate))
        tables, given = (
            tables_of_steps(steps, channels),
            (x.detach().contiguous(), gy.detach().contiguous()),
        )
        gx, gcoef = self.run_adjoint(tables, *given, coefs, states, gstates)
        if x.shape[1] != channels:
            gx = gx.sum(1, keepdim=True)
        return gx, unpack_tensor(gcoef, channels).sum(0), unpack_tensor(gstates, channels)

    def run_bank_adjoint(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int],
        offsets: Sequence[int], gy: Tensor, gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        """Return the gradients of a bank with respect to x, coef and state."""
        most, tables = len(kinds), tables_of_bank(tuple(kinds), tuple(offsets), coef.shape[1])
        packed = [pack_tensor(pad_filters(t, offsets, most)) for t in (coef, state, gstate)]
        gx, gcoefs = self.run_adjoint(
            tables, x.detach().contiguous(), gy.detach().contiguous(), *packed
        )
        gcoef, gstates = (
            unpad_filters(wide, offsets, most)
            for wide in (
                unpack_tensor(gcoefs, tables.channels).sum(0),
                unpack_tensor(packed[2], tables.channels),
            )
        )
        return gx, gcoef, gstates

    @abstractmethod
    def run_rows(self, operation: RowOperation, *args: Any) -> Any:
        """Run a row operation, or its plain form if it has no kernel for this device."""

    @abstractmethod
    def run_items(self, body: Any, items: int, *arguments: Tensor | int, room: int = 0) -> None:
        """See `operation.Device`."""
