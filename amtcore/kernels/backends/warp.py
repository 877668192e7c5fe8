"""The block functions on a GPU, or on what stands in for one.

Everything stays on the device and on the current stream; nothing waits for results.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.backends import warp_families
from amtcore.kernels.backends.base import Backend, Chain, Gradients, Samples
from amtcore.kernels.backends.warp_chain import WarpChain, gathered
from amtcore.kernels.backends.warp_launch import Clips, rows_of, run_forward, start, warps_of
from amtcore.kernels.families.envelope import reference as envelope
from amtcore.kernels.fused.filters import get_filter
from amtcore.kernels.fused.operations import get_adjoint
from amtcore.kernels.fused.program import PooledChain
from amtcore.kernels.fused.runner import (
    bank_layout,
    check_keeps_rate,
    filter_states,
    gather,
    spread,
)
from amtcore.kernels.vector.lanes import groups_of, pack_tensor, unpack_tensor
from amtcore.kernels.warp import adjoint
from amtcore.kernels.warp.compiler import compiled
from amtcore.kernels.warp.forward import Program, Row
from amtcore.kernels.warp.launching import Launcher

#: What the warps of an adjoint may take for their tapes.
_WORK_BYTES = 2**31


class WarpBackend(Backend):
    """Kernels of warps.

    Args:
        launcher: Runs them.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher, self._own = launcher, threading.local()
        self.name, self.device = launcher.name, launcher.device

    def place(self, chain: PooledChain) -> Chain:
        """The chain with its constants on the device."""
        return WarpChain(self.launcher, chain)

    def stream(self) -> AbstractContextManager[Any]:
        """A stream of this thread's own, where there are streams; it goes on from where the
        caller's is, on which tensors that are given may still be in the making."""
        if self.device.type != "cuda":
            return nullcontext()
        if not hasattr(self._own, "stream"):
            self._own.stream = torch.cuda.Stream(self.device)
        own: torch.cuda.Stream = self._own.stream
        own.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(own)

    def upload(self, clip: Samples | Tensor) -> Tensor:
        return gathered([clip], self.device).view(clip.shape)

    def clip_of(self, x: Tensor) -> Tensor:
        return x.contiguous()

    def download(self, frames: list[Tensor]) -> list[Samples]:
        """In one piece; this thread waits for its stream."""
        if not frames:
            return []
        whole = torch.cat([part.reshape(-1) for part in frames])
        if self.device.type == "cuda":
            room = torch.empty_like(whole, device="cpu", pin_memory=True)
            room.copy_(whole, non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()
            whole = room
        parts = whole.split([part.numel() for part in frames])
        return [here.view(part.shape).numpy() for here, part in zip(parts, frames, strict=True)]

    def share(self, clips: list[Any]) -> list[Any]:
        whole = gathered(clips, self.device)
        parts = whole.split([len(clip) for clip in clips])
        return list(parts)

    def run_program(
        self, ops: NDArray[Any], x: Tensor, coef: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        check_keeps_rate(ops)
        (batch, rows, samples), channels = x.shape, coef.shape[0]
        program = Program(
            rows_of(ops), (), None, rows == 1, x.dtype == torch.float64, coef.shape[1],
            state.shape[2],
        )  # fmt: skip
        out, packed = x.new_empty(batch, channels, samples), pack_tensor(state)
        clips = Clips.equal(batch, rows * samples, samples, channels * samples, x.device)
        given = x.detach().contiguous(), pack_tensor(coef), packed, _no_columns(x.device), out
        run_forward(self.launcher, program, channels, clips, *given)
        return out, unpack_tensor(packed, channels)

    def run_bank(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int], offsets: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        (batch, channels, samples), most = x.shape, len(kinds)
        program, columns = _bank(x, tuple(kinds), tuple(offsets), coef.shape[1])
        out, packed = (
            x.new_empty(batch, offsets[-1], samples),
            pack_tensor(spread(state, offsets, most)),
        )
        clips = Clips.equal(batch, channels * samples, samples, offsets[-1] * samples, x.device)
        given = x.detach().contiguous(), pack_tensor(spread(coef, offsets, most)), packed
        run_forward(self.launcher, program, channels, clips, *given, columns, out)
        return out, gather(unpack_tensor(packed, channels), offsets, most)

    def run_op_adjoint(
        self, code: int, argument: int, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor,
        gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        get_adjoint(code)
        channels, shared = coef.shape[0], x.shape[1] == 1
        program = Program(
            ((code, 0, 0, argument),), (), None, shared, x.dtype == torch.float64, coef.shape[1],
            state.shape[2],
        )  # fmt: skip
        packed = pack_tensor(coef), pack_tensor(state), pack_tensor(gstate)
        gx, gcoef = self._adjoint(program, x, gy, packed, _no_columns(x.device), channels)
        if x.shape[1] != channels:
            gx = gx.sum(1, keepdim=True)
        return gx, gcoef, unpack_tensor(packed[2], channels)

    def run_bank_adjoint(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int],
        offsets: Sequence[int], gy: Tensor, gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        channels, most = x.shape[1], len(kinds)
        program, columns = _bank(x, tuple(kinds), tuple(offsets), coef.shape[1])
        coefs, states, gstates = (
            pack_tensor(spread(t, offsets, most)) for t in (coef, state, gstate)
        )
        gx, gcoef = self._adjoint(program, x, gy, (coefs, states, gstates), columns, channels)
        gstate = unpack_tensor(gstates, channels)
        return gx, gather(gcoef, offsets, most), gather(gstate, offsets, most)

    def _adjoint(
        self, program: Program, x: Tensor, gy: Tensor, packed: tuple[Tensor, Tensor, Tensor],
        columns: Tensor, channels: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of the input, (batch, channel, time), and of the coefficients; packed[2] is
        changed from the gradient of the last state to that of the first."""
        (batch, rows, samples), (coef, state, gstate) = x.shape, packed
        gx, gcoef = x.new_empty(batch, channels, samples), x.new_zeros(batch, *coef.shape)
        items = batch * groups_of(channels)
        if items and samples:
            kernel = compiled(
                "adjoint",
                program,
                lambda: adjoint.adjoint_of(program),
                warps_of(program.double),
            )
            size = adjoint.work_size(program, samples)
            most = max(_WORK_BYTES // (size * x.element_size()), 1)
            warps = min(self.launcher.resident_warps(kernel), items, most)
            start(
                self.launcher, kernel, warps, batch, groups_of(channels), channels, samples,
                gy.shape[1], x.detach().contiguous(), gy.detach().contiguous(), gx, coef, gcoef,
                state, gstate, columns, x.new_empty(warps * size), size, rows,
            )  # fmt: skip
        return gx, unpack_tensor(gcoef, channels).sum(0)

    def fir(self, x: Tensor, taps: Tensor, stride: int, first: int, count: int) -> Tensor:
        return warp_families.fir(self.launcher, x, taps, stride, first, count)

    def hilbert_envelope(self, rows: Tensor) -> Tensor:
        """By torch's transforms: two passes over memory are no recurrence."""
        return envelope.hilbert_envelope(rows)

    def attack_release(self, x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return warp_families.attack_release(self.launcher, x, coef, state)

    def attack_release_adjoint(
        self, x: Tensor, coef: Tensor, state: Tensor, y: Tensor, gy: Tensor, gstate: Tensor
    ) -> Gradients:
        return warp_families.attack_release_adjoint(self.launcher, x, coef, state, y, gy, gstate)

    def lower_skirt(
        self, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor
    ) -> Tensor:
        return warp_families.lower_skirt(self.launcher, intensity, slope, rate, fc_hz, f_hz)

    def lower_skirt_adjoint(
        self, intensity: Tensor, slope: Tensor, rate: Tensor, fc_hz: Tensor, f_hz: Tensor,
        gout: Tensor,
    ) -> Gradients:  # fmt: skip
        given = intensity, slope, rate, fc_hz, f_hz, gout
        return warp_families.lower_skirt_adjoint(self.launcher, *given)

    def lif(
        self, x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return warp_families.lif(self.launcher, x, coef, state, max_spikes, record, keep)

    def lif_adjoint(
        self, x: Tensor, coef: Tensor, starts: Tensor, max_spikes: float, record: bool,
        gspikes: Tensor, gvmem: Tensor, gisyn: Tensor, gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        given = x, coef, starts, max_spikes, record, gspikes, gvmem, gisyn, gstate
        return warp_families.lif_adjoint(self.launcher, *given)


@functools.lru_cache
def _no_columns(device: torch.device) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


@functools.lru_cache(maxsize=64)
def _layout(
    kinds: tuple[int, ...], offsets: tuple[int, ...], coefs: int, device: torch.device
) -> tuple[tuple[Row, ...], Tensor]:
    """Rows of a bank, and on the device which filter of the output each lane's m-th one is."""
    for kind in kinds:
        get_filter(kind)
    filters, columns = bank_layout(kinds, offsets, coefs, 0, 0)
    return rows_of(filters), torch.from_numpy(columns).to(device)


def _bank(
    x: Tensor, kinds: tuple[int, ...], offsets: tuple[int, ...], coefs: int
) -> tuple[Program, Tensor]:
    """A bank alone, over signals of every channel."""
    filters, columns = _layout(kinds, offsets, coefs, x.device)
    most, double = len(kinds), x.dtype == torch.float64
    return Program(
        (), filters, None, False, double, coefs * most, filter_states(coefs) * most
    ), columns
