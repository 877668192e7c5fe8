"""What every backend can do: the kernels behind the torch operators, and pooled chains.

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

from amtcore.kernels.fused.program import PooledChain
from amtcore.kernels.fused.runner import PooledTables

Gradients = tuple[Tensor, Tensor, Tensor]
Samples = NDArray[np.floating[Any]]


class Chain(Protocol):
    """A pooled chain where its backend computes; see `fused.program.PooledChain`."""

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
    """Kernels of one kind of device.

    Attributes:
        name: "cpu", "cuda" or "interpreted".
        device: Where its tensors lie.
    """

    name: str
    device: torch.device

    @abstractmethod
    def place(self, chain: PooledChain) -> Chain:
        """A compiled chain, ready to run here."""

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
    def run_program(
        self, ops: NDArray[Any], x: Tensor, coef: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Operations that keep the rate, one after another; see `fused.runner`."""

    def run_op(
        self, code: int, argument: int, x: Tensor, coef: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One operation: x (batch, channel or 1, time) -> (batch, channel, time)."""
        return self.run_program(np.array([[code, 0, 0, argument]], np.int64), x, coef, state)

    @abstractmethod
    def run_bank(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int], offsets: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """A modulation bank at full rate; see `fused.runner`."""

    @abstractmethod
    def run_op_adjoint(
        self, code: int, argument: int, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor,
        gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        """Gradients of one operation with respect to x, coef and state."""

    @abstractmethod
    def run_bank_adjoint(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int],
        offsets: Sequence[int], gy: Tensor, gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        """Gradients of a bank with respect to x, coef and state."""

    @abstractmethod
    def fir(self, x: Tensor, taps: Tensor, stride: int, first: int, count: int) -> Tensor:
        """Finite impulse response of rows; see `families.fir.reference`."""

    @abstractmethod
    def hilbert_envelope(self, rows: Tensor) -> Tensor:
        """Envelopes of rows; see `families.envelope.reference`."""

    @abstractmethod
    def attack_release(self, x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Attack and release; see `families.attack_release.reference`."""

    @abstractmethod
    def attack_release_adjoint(
        self, x: Tensor, coef: Tensor, state: Tensor, y: Tensor, gy: Tensor, gstate: Tensor
    ) -> Gradients:
        """Its gradients with respect to x, coef and state."""

    @abstractmethod
    def lower_skirt(
        self, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor
    ) -> Tensor:
        """Excitation from below; see `families.roex.reference`."""

    @abstractmethod
    def lower_skirt_adjoint(
        self, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor,
        gout: Tensor,
    ) -> Gradients:  # fmt: skip
        """Its gradients with respect to intensity, slope and rate."""

    @abstractmethod
    def lif(
        self, x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Integrate-and-fire neurons; see `families.lif.runner`."""

    @abstractmethod
    def lif_adjoint(
        self, x: Tensor, coef: Tensor, starts: Tensor, max_spikes: float, record: bool,
        gspikes: Tensor, gvmem: Tensor, gisyn: Tensor, gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        """Their gradients with respect to x, coef and state."""
