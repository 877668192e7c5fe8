"""From tensors to the kernel: channels are packed into lanes, clips and groups go to threads.

Public recurrences keep their state as (batch, channel, value); packing it into lanes and back is
a small copy per call. The pooled chain keeps it packed between the chunks of a stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import ParameterError
from amtcore.kernels.fused.adjoint import run_adjoint
from amtcore.kernels.fused.cpu import BLOCK, POOL_BANK, STORE, STORE_BANK, run_chain
from amtcore.kernels.fused.filters import FILTER_COEFS, FILTER_STATES, get_filter
from amtcore.kernels.fused.operations import DECIMATE, get_adjoint, get_operation
from amtcore.kernels.vector.lanes import groups_of, pack, unpack
from amtcore.kernels.vector.result_pool import empty, training
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import parallel_for

_NO_OPS = _NO_FILTERS = np.zeros((0, 4), np.int64)
_NO_FRAME = np.zeros(5, np.int64)


def filter_states(coefs: int) -> int:
    """State values of a bank's filter with so many coefficients."""
    return coefs // FILTER_COEFS * FILTER_STATES


def empty_rows(batch: int, rows: int, samples: int, like: Tensor) -> tuple[Tensor, NDArray[Any]]:
    """An empty output (batch, rows, samples) as a tensor and as the array on the same memory."""
    out = empty((batch, rows, samples), like)
    return out, out.numpy()


def run_op(
    code: int, argument: int, x: Tensor, coef: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One operation at full rate: x (batch, channel or 1, time) -> (batch, channel, time)."""
    return run_program(np.array([[code, 0, 0, argument]], np.int64), x, coef, state)


def check_keeps_rate(ops: NDArray[np.int64]) -> None:
    """Raises where a row is no operation, or one with fewer outputs than samples."""
    for code in ops[:, 0]:
        get_operation(code)
    if DECIMATE in ops[:, 0]:
        raise ParameterError("operations at full rate must keep it: a decimation does not")


def run_program(
    ops: NDArray[np.int64], x: Tensor, coef: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `run_op`, for several operations one after another; they must keep the rate."""
    check_keeps_rate(ops)
    batch, channels, samples = x.shape[0], coef.shape[0], x.shape[-1]
    inputs, (out, out_np) = x.detach().contiguous().numpy(), empty_rows(batch, channels, samples, x)
    packed_coef, packed_state, shared = pack(coef), pack(state), x.shape[1] == 1

    def one(b: int, g: int) -> None:
        part = slice(g * LANES, min((g + 1) * LANES, channels))
        rows = np.arange(part.start, part.stop, dtype=np.int64)[None]
        source = inputs[b] if shared else inputs[b, part]
        run_chain(
            source, samples, shared, part.stop - part.start, ops, packed_coef[g],
            packed_state[b, g], STORE, _NO_FILTERS, rows, 0, _NO_FRAME, out_np[b],
        )  # fmt: skip

    _over_items(one, batch, groups_of(channels))
    return out, unpack(packed_state, channels)


def bank_layout(
    kinds: Sequence[int], offsets: Sequence[int], coefs: int, coef_row: int, state_row: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Kernel tables of a bank: filters (m, 4) and, per group, the output column of each lane."""
    for kind in kinds:
        get_filter(kind)
    channels, most, states = len(offsets) - 1, len(kinds), filter_states(coefs)
    filters = np.array(
        [
            [kind, coef_row + coefs * m, state_row + states * m, state_row + states * most + m]
            for m, kind in enumerate(kinds)
        ],
        np.int64,
    )
    columns = np.full((groups_of(channels), most, LANES), -1, np.int64)
    for channel in range(channels):
        for m in range(offsets[channel + 1] - offsets[channel]):
            columns[channel // LANES, m, channel % LANES] = offsets[channel] + m
    return filters, columns


@functools.lru_cache(maxsize=64)
def _places(offsets: tuple[int, ...], most: int, device: torch.device) -> Tensor:
    """Where each filter is among `most` places a channel."""
    counts = [end - begin for begin, end in pairwise(offsets)]
    places = [c * most + m for c, count in enumerate(counts) for m in range(count)]
    return torch.tensor(places, dtype=torch.int64).to(device)


def spread(values: Tensor, offsets: Sequence[int], most: int) -> Tensor:
    """(.., filter, value) -> (.., channel, most * value), zeros where a channel has no filter m."""
    channels, width = len(offsets) - 1, values.shape[-1]
    wide = values.new_zeros(*values.shape[:-2], channels * most, width)
    wide[..., _places(tuple(offsets), most, values.device), :] = values.detach()
    return wide.unflatten(-2, (channels, most)).flatten(-2)


def gather(wide: Tensor, offsets: Sequence[int], most: int) -> Tensor:
    """The inverse of `spread`."""
    places = _places(tuple(offsets), most, wide.device)
    return wide.unflatten(-1, (most, -1)).flatten(-3, -2)[..., places, :]


def run_bank(
    x: Tensor, coef: Tensor, state: Tensor, kinds: Sequence[int], offsets: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """A modulation bank at full rate: x (batch, channel, time) -> (batch, filter, time)."""
    batch, channels, samples = x.shape
    most = len(kinds)
    inputs = x.detach().contiguous().numpy()
    out, out_np = empty_rows(batch, offsets[-1], samples, x)
    filters, columns = bank_layout(kinds, offsets, coef.shape[-1], 0, 0)
    packed_coef = pack(spread(coef, offsets, most))
    packed_state = pack(spread(state, offsets, most))

    def one(b: int, g: int) -> None:
        part = slice(g * LANES, min((g + 1) * LANES, channels))
        run_chain(
            inputs[b, part], samples, False, part.stop - part.start, _NO_OPS, packed_coef[g],
            packed_state[b, g], STORE_BANK, filters, columns[g], 0, _NO_FRAME, out_np[b],
        )  # fmt: skip

    _over_items(one, batch, groups_of(channels))
    return out, gather(unpack(packed_state, channels), offsets, most)


def _scratch_rows(taped: int) -> int:
    """Rows of scratch for so many a sample; what is before the first sample is written down too."""
    return taped * (BLOCK + 1)


def run_op_adjoint(
    code: int, argument: int, x: Tensor, coef: Tensor, state: Tensor, gy: Tensor, gstate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `run_op` with respect to x, coef and state."""
    operation, channels = get_adjoint(code), coef.shape[0]
    ops, rows = np.array([[code, 0, 0, argument]], np.int64), np.arange(channels)[None]
    packed = (pack(coef), pack(state), pack(gstate))
    gx, gcoef = _run_adjoint(
        x, gy, ops, _NO_FILTERS, lambda part: rows[:, part], packed, channels,
        _scratch_rows(operation.taped(argument)),
    )  # fmt: skip
    if x.shape[1] != channels:
        gx = gx.sum(1, keepdim=True)
    return gx, gcoef, unpack(packed[2], channels)


def run_bank_adjoint(
    x: Tensor,
    coef: Tensor,
    state: Tensor,
    kinds: Sequence[int],
    offsets: Sequence[int],
    gy: Tensor,
    gstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `run_bank` with respect to x, coef and state."""
    channels, most = x.shape[1], len(kinds)
    filters, columns = bank_layout(kinds, offsets, coef.shape[-1], 0, 0)
    packed = tuple(pack(spread(values, offsets, most)) for values in (coef, state, gstate))
    gx, gcoef = _run_adjoint(
        x, gy, _NO_OPS, filters, lambda part: columns[part.start // LANES], packed, channels,
        _scratch_rows(max((get_filter(kind).taped for kind in kinds), default=0)),
    )  # fmt: skip
    return gx, gather(gcoef, offsets, most), gather(unpack(packed[2], channels), offsets, most)


def _run_adjoint(
    x: Tensor,
    gy: Tensor,
    ops: NDArray[np.int64],
    filters: NDArray[np.int64],
    rows_of: Callable[[slice], NDArray[np.int64]],
    packed: tuple[NDArray[Any], ...],
    channels: int,
    scratch_rows: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of the input, (batch, channel, time), and of the coefficients; packed[2] is changed
    from the gradient of the last state to that of the first."""
    coef, state, gstate = packed
    inputs, upstream = x.detach().contiguous().numpy(), gy.detach().contiguous().numpy()
    with training():
        gx, gx_np = empty_rows(x.shape[0], channels, x.shape[2], x)
    shared = x.shape[1] != channels
    gcoef = np.zeros((x.shape[0], *coef.shape), coef.dtype)

    def one(b: int, g: int) -> None:
        part = slice(g * LANES, min((g + 1) * LANES, channels))
        source = inputs[b] if shared else inputs[b, part]
        run_adjoint(
            source, upstream[b], gx_np[b, part], shared, part.stop - part.start, ops, coef[g],
            gcoef[b, g], state[b, g], gstate[b, g], filters, rows_of(part), scratch_rows,
        )  # fmt: skip

    _over_items(one, x.shape[0], groups_of(channels))
    return gx, unpack(gcoef, channels).sum(0)


@dataclass(frozen=True)
class PooledTables:
    """What the kernel needs to know of a pooled chain besides coefficients and state.

    Frames are cut from the outputs of `ops`; output m is there once sample
    m * samples_per_output + lookahead is in.
    """

    ops: NDArray[np.int64]
    filters: NDArray[np.int64]
    columns: NDArray[np.int64]
    channels: int
    width: int
    pool: int
    samples_per_frame: tuple[int, int]
    samples_per_output: int = 1
    lookahead: int = 0

    def frames_before(self, sample: int) -> int:
        """Whole frames that are there after the first `sample` samples."""
        outputs = -(-(sample - self.lookahead) // self.samples_per_output)
        return self.frames_of(max(0, outputs))

    def frames_of(self, outputs: int) -> int:
        """Whole frames in so many outputs."""
        samples, frames = self.samples_per_frame
        return outputs * frames // samples


def run_pooled(
    tables: PooledTables,
    clips: Sequence[NDArray[Any]],
    coef: NDArray[Any],
    states: Sequence[NDArray[Any]],
    start: int,
) -> list[NDArray[Any]]:
    """Waveforms to frames, every clip on its own.

    Args:
        tables: The program.
        clips: Waveforms of any lengths, (time,), or one row a channel, (channel, time).
        coef: (group, rows * LANES).
        states: Per clip (group, rows * LANES); changed in place to the state after the clip.
        start: Absolute index of the first sample of every clip (frames are counted from 0).
    Returns:
        Per clip (frames, width).
    """
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
        run_chain(
            source, source.shape[1], shared, part.stop - part.start, tables.ops, coef[g],
            states[i][g], POOL_BANK, tables.filters, tables.columns[g], tables.pool, frame, outs[i],
        )  # fmt: skip

    _over_items(one, len(clips), groups)
    return outs


def _over_items(one: Callable[[int, int], None], clips: int, groups: int) -> None:
    parallel_for(lambda item: one(item // groups, item % groups), clips * groups)
