"""The kernels compiled for this processor, on threads."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.backends.base import Backend, Chain, Gradients, Samples
from amtcore.kernels.families.attack_release import runner as attack_release
from amtcore.kernels.families.envelope import runner as envelope
from amtcore.kernels.families.fir import runner as fir
from amtcore.kernels.families.lif import runner as lif
from amtcore.kernels.families.roex import runner as roex
from amtcore.kernels.fused import runner as fused
from amtcore.kernels.fused.program import PooledChain


class CpuBackend(Backend):
    """What the runners of the families and of the fused kernel do."""

    name = "cpu"
    device = torch.device("cpu")

    def place(self, chain: PooledChain) -> Chain:
        """The chain itself."""
        return chain

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def upload(self, clip: Samples | Tensor) -> Tensor:
        """A tensor on the same memory where it can be written to."""
        if isinstance(clip, Tensor):
            return clip
        return torch.from_numpy(np.require(clip, requirements=["C", "W"]))

    def clip_of(self, x: Tensor) -> Samples:
        samples: Samples = x.numpy()
        return samples

    def download(self, frames: list[Any]) -> list[Samples]:
        return frames

    def run_program(
        self, ops: NDArray[Any], x: Tensor, coef: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        return fused.run_program(ops, x, coef, state)

    def run_bank(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int], offsets: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        return fused.run_bank(x, coef, state, kinds, offsets)

    def run_op_adjoint(
        self, code: int, argument: int, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor,
        gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        return fused.run_op_adjoint(code, argument, x, coef, state, gy, gstate)

    def run_bank_adjoint(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int],
        offsets: Sequence[int], gy: Tensor, gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        return fused.run_bank_adjoint(x, coef, state, kinds, offsets, gy, gstate)

    def fir(self, x: Tensor, taps: Tensor, stride: int, first: int, count: int) -> Tensor:
        return fir.forward(x, taps, stride, first, count)

    def hilbert_envelope(self, rows: Tensor) -> Tensor:
        return envelope.forward(rows)

    def attack_release(self, x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return attack_release.forward(x, coef, state)

    def attack_release_adjoint(
        self, x: Tensor, coef: Tensor, state: Tensor, y: Tensor, gy: Tensor, gstate: Tensor
    ) -> Gradients:
        return attack_release.adjoint(x, coef, state, y, gy, gstate)

    def lower_skirt(
        self, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor
    ) -> Tensor:
        return roex.forward(intensity, slope, rate, fc_hz, f_hz)

    def lower_skirt_adjoint(
        self, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor,
        gout: Tensor,
    ) -> Gradients:  # fmt: skip
        return roex.adjoint(intensity, slope, rate, fc_hz, f_hz, gout)

    def lif(
        self, x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return lif.forward(x, coef, state, max_spikes, record, keep)

    def lif_adjoint(
        self, x: Tensor, coef: Tensor, starts: Tensor, max_spikes: float, record: bool,
        gspikes: Tensor, gvmem: Tensor, gisyn: Tensor, gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        return lif.adjoint(x, coef, starts, max_spikes, record, gspikes, gvmem, gisyn, gstate)
