"""The CPU backend: channels are packed into lanes; threads take clips and groups of lanes.

Operators keep state as (batch, channel, value) and pack it into lanes on every call. A pooled
chain keeps its state packed between the chunks of a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.backend import Backend, Gradients, Samples
from amtcore.kernels.chain import (
    ChainPlan,
    ChainTables,
    Steps,
    bank_layout,
    check_keeps_rate,
    pad_filters,
    unpad_filters,
)
from amtcore.kernels.cpu.chain_loop import BLOCK, loop_of
from amtcore.kernels.operation import RowOperation
from amtcore.kernels.operations.modulation_filters import get_filter
from amtcore.kernels.pooling import POOL_BANK, STORE, STORE_BANK
from amtcore.kernels.vector.lanes import groups_of, pack, unpack
from amtcore.kernels.vector.result_pool import empty, training
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import parallel_for

Array = NDArray[Any]
_NO_FILTERS = np.zeros((0, 4), np.int64)
_NO_FRAME = np.zeros(5, np.int64)


class CpuChain:
    """A pooled chain on this processor; methods as in `backend.Chain`."""

    def __init__(self, chain: ChainPlan) -> None:
        self.tables, self.tail, self._chain = chain.tables, chain.tail, chain
        self.n_frames = chain.n_frames

    def fresh(self, clips: int) -> list[Array]:
        return [self._chain.rest.copy() for _ in range(clips)]

    def push(self, clips: Sequence[Array], states: Sequence[Array], start: int) -> list[Array]:
        return run_pooled(self.tables, clips, self._chain.coef, states, start)

    def finish(self, states: Sequence[Array], samples: Sequence[int]) -> list[Array]:
        frames, coef = [], self._chain.coef
        for state, count in zip(states, samples, strict=True):
            silence = np.zeros(self._chain.zeros_after(count), coef.dtype)
            frames += run_pooled(self.tail or self.tables, [silence], coef, [state], count)
        return frames


class CpuBackend(Backend):
    """Kernels on threads."""

    name = "cpu"
    device = torch.device("cpu")

    def place(self, chain: ChainPlan) -> CpuChain:
        return CpuChain(chain)

    def stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def upload(self, clip: Samples | Tensor) -> Tensor:
        """Return a tensor that shares the memory of `clip` if that memory is writable."""
        if isinstance(clip, Tensor):
            return clip
        return torch.from_numpy(np.require(clip, requirements=["C", "W"]))

    def clip_of(self, x: Tensor) -> Samples:
        samples: Samples = x.numpy()
        return samples

    def download(self, frames: list[Any]) -> list[Samples]:
        return frames

    def run_steps(
        self, steps: Steps, x: Tensor, coef: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        check_keeps_rate(steps)
        channels, packed = coef.shape[0], (pack(coef), pack(state))
        rows = np.arange(channels, dtype=np.int64)[None]
        out = _run_full_rate(
            x, steps, STORE, _NO_FILTERS, lambda part: rows[:, part], packed, channels, channels
        )
        return out, unpack(packed[1], channels)

    def run_bank(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int], offsets: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        channels, most = x.shape[1], len(kinds)
        filters, columns = bank_layout(kinds, offsets, coef.shape[-1], 0, 0)
        packed = tuple(pack(pad_filters(values, offsets, most)) for values in (coef, state))
        out = _run_full_rate(
            x, (), STORE_BANK, filters, lambda part: columns[part.start // LANES], packed,
            channels, offsets[-1],
        )  # fmt: skip
        return out, unpad_filters(unpack(packed[1], channels), offsets, most)

    def run_step_adjoint(
        self, steps: Steps, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor, gstate: Tensor
    ) -> Gradients:
        ((operation, argument),) = steps
        channels = coef.shape[0]
        rows, packed = np.arange(channels)[None], (pack(coef), pack(state), pack(gstate))
        gx, gcoef = _run_adjoint(
            x, gy, steps, _NO_FILTERS, lambda part: rows[:, part], packed, channels,
            _scratch_rows(operation.taped(argument)),
        )  # fmt: skip
        if x.shape[1] != channels:
            gx = gx.sum(1, keepdim=True)
        return gx, gcoef, unpack(packed[2], channels)

    def run_bank_adjoint(
        self, x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int],
        offsets: Sequence[int], gy: Tensor, gstate: Tensor,
    ) -> Gradients:  # fmt: skip
        channels, most = x.shape[1], len(kinds)
        filters, columns = bank_layout(kinds, offsets, coef.shape[-1], 0, 0)
        packed = tuple(pack(pad_filters(values, offsets, most)) for values in (coef, state, gstate))
        gx, gcoef = _run_adjoint(
            x, gy, (), filters, lambda part: columns[part.start // LANES], packed, channels,
            _scratch_rows(max((get_filter(kind).taped for kind in kinds), default=0)),
        )  # fmt: skip
        gstates = unpad_filters(unpack(packed[2], channels), offsets, most)
        return gx, unpad_filters(gcoef, offsets, most), gstates

    def run_rows(self, operation: RowOperation, *args: Any) -> Any:
        return operation.cpu(self, *args)

    def run_items(self, body: Any, items: int, *arguments: Tensor | int, room: int = 0) -> None:
        flat = [a.reshape(-1).numpy() if isinstance(a, Tensor) else a for a in arguments]
        parallel_for(lambda item: body(item, *flat), items)


def _scratch_rows(taped: int) -> int:
    """Return the scratch rows of a block: `taped` rows a sample, and the state before it."""
    return taped * (BLOCK + 1)


def _run_full_rate(
    x: Tensor,
    steps: Steps,
    mode: int,
    filters: NDArray[np.int64],
    rows_of: Callable[[slice], NDArray[np.int64]],
    packed: tuple[Array, ...],
    channels: int,
    width: int,
) -> Tensor:
    """Return the outputs (batch, width, time); the packed states are updated."""
    loop, ops = loop_of(steps)
    coef, state = packed
    inputs, out = x.detach().contiguous().numpy(), empty((x.shape[0], width, x.shape[2]), x)
    shared, out_np = x.shape[1] != channels, out.numpy()

    def one(b: int, g: int) -> None:
        part = slice(g * LANES, min((g + 1) * LANES, channels))
        source = inputs[b] if shared else inputs[b, part]
        loop.run_chain(
            source, x.shape[2], shared, part.stop - part.start, ops, coef[g], state[b, g], mode,
            filters, rows_of(part), 0, _NO_FRAME, out_np[b],
        )  # fmt: skip

    _over_items(one, x.shape[0], groups_of(channels))
    return out


def _run_adjoint(
    x: Tensor,
    gy: Tensor,
    steps: Steps,
    filters: NDArray[np.int64],
    rows_of: Callable[[slice], NDArray[np.int64]],
    packed: tuple[Array, ...],
    channels: int,
    scratch_rows: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input, (batch, channel, time), and of the coefficients.

    The gradient of the last state in packed[2] becomes the gradient of the first state.
    """
    loop, ops = loop_of(steps)
    coef, state, gstate = packed
    inputs, upstream = x.detach().contiguous().numpy(), gy.detach().contiguous().numpy()
    with training():
        gx = empty((x.shape[0], channels, x.shape[2]), x)
    shared, gx_np = x.shape[1] != channels, gx.numpy()
    gcoef = np.zeros((x.shape[0], *coef.shape), coef.dtype)

    def one(b: int, g: int) -> None:
        part = slice(g * LANES, min((g + 1) * LANES, channels))
        source = inputs[b] if shared else inputs[b, part]
        loop.run_adjoint(
            source, upstream[b], gx_np[b, part], shared, part.stop - part.start, ops, coef[g],
            gcoef[b, g], state[b, g], gstate[b, g], filters, rows_of(part), scratch_rows,
        )  # fmt: skip

    _over_items(one, x.shape[0], groups_of(channels))
    return gx, unpack(gcoef, channels).sum(0)


def run_pooled(
    tables: ChainTables, clips: Sequence[Array], coef: Array, states: Sequence[Array], start: int
) -> list[Array]:
    """Compute the frames (frames, width) of every clip.

    Args:
        tables: The chain.
        clips: Waveforms of any lengths, (time,), or one row a channel, (channel, time).
        coef: (group, rows * LANES).
        states: Per clip (group, rows * LANES); updated in place.
        start: Index in the signal of the first sample of every clip.
    """
    loop, ops = loop_of(tables.steps, tables.rows)
    frame = np.array(
        [*tables.samples_per_frame, start, tables.samples_per_output, tables.lookahead], np.int64
    )
    groups = coef.shape[0]
    first = tables.frames_before(start)
    outs = [
        np.empty((tables.frames_before(start + clip.shape[-1]) - first, tables.width), coef.dtype)
        for clip in clips
    ]

    def one(i: int, g: int) -> None:
        part = slice(g * LANES, min((g + 1) * LANES, tables.channels))
        shared = clips[i].ndim == 1
        source = np.ascontiguousarray(clips[i][None] if shared else clips[i][part])
        loop.run_chain(
            source, source.shape[1], shared, part.stop - part.start, ops, coef[g], states[i][g],
            POOL_BANK, tables.filters, tables.columns[g], tables.pool, frame, outs[i],
        )  # fmt: skip

    _over_items(one, len(clips), groups)
    return outs


def _over_items(one: Callable[[int, int], None], clips: int, groups: int) -> None:
    parallel_for(lambda item: one(item // groups, item % groups), clips * groups)
