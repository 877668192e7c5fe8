"""What a model tells the fused kernel: its operations in order, and the bank at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import ParameterError, ShapeError
from amtcore.kernels.fused.cpu import POOLS
from amtcore.kernels.fused.filters import BANK_IDENTITY, FILTER_COEFS
from amtcore.kernels.fused.operations import DECIMATE, get_operation
from amtcore.kernels.fused.runner import (
    PooledTables,
    bank_layout,
    filter_states,
    run_pooled,
    spread,
)
from amtcore.kernels.vector.lanes import pack


@dataclass(frozen=True)
class BlockOp:
    """One recurrence of a chain.

    Args:
        code: Operation code of the kernel.
        argument: Its integer argument.
        coef: (channel, rows).
        state: (channel, values), the state before the first sample.
    """

    code: int
    argument: int
    coef: Tensor
    state: Tensor


@dataclass(frozen=True)
class Bank:
    """The filters that end a chain, several per channel.

    Args:
        kinds: What the m-th filter of every channel is.
        coef: (filter, FILTER_COEFS).
        offsets: (channel + 1), cuts the filters into channels.
    """

    kinds: tuple[int, ...]
    coef: Tensor
    offsets: tuple[int, ...]


def identity_bank(channels: int, like: Tensor) -> Bank:
    """One filter a channel that changes nothing: for pooling a stage without a bank."""
    coef = like.new_zeros(channels, FILTER_COEFS)
    return Bank((BANK_IDENTITY,), coef, tuple(range(channels + 1)))


@dataclass(frozen=True)
class PooledChain:
    """A compiled chain: kernel tables, packed coefficients, and the packed state at rest.

    Where the operations look ahead (a decimation does), `tail` are the ones from there on: at the
    end of a signal they are fed the zeros that follow it.
    """

    tables: PooledTables
    coef: NDArray[np.floating]
    rest: NDArray[np.floating]
    tail: PooledTables | None = None

    @property
    def hops(self) -> tuple[Fraction, Fraction]:
        """Samples of the signal from one output to the next, and from one frame to the next."""
        stride = Fraction(self.tables.samples_per_output)
        return stride, stride * Fraction(*self.tables.samples_per_frame)

    def n_frames(self, n_samples: int) -> int:
        """Whole frames in so many samples."""
        return self.tables.frames_of(n_samples // self.tables.samples_per_output)

    def push(
        self, clips: Sequence[NDArray[Any]], states: Sequence[NDArray[Any]], start: int
    ) -> list[NDArray[Any]]:
        """Frames that these samples complete; see `run_pooled`."""
        return run_pooled(self.tables, clips, self.coef, states, start)

    def fresh(self, clips: int) -> list[NDArray[Any]]:
        """States of so many clips before their first sample."""
        return [self.rest.copy() for _ in range(clips)]

    def finish(self, states: Sequence[NDArray[Any]], samples: Sequence[int]) -> list[NDArray[Any]]:
        """Frames of each clip that were waiting for what follows the last of so many samples."""
        frames = []
        for state, count in zip(states, samples, strict=True):
            silence = np.zeros(self.zeros_after(count), self.coef.dtype)
            frames += run_pooled(self.tail or self.tables, [silence], self.coef, [state], count)
        return frames

    def zeros_after(self, samples: int) -> int:
        """How many zeros after a clip of so many samples the last of its frames needs."""
        outputs, tables = samples // self.tables.samples_per_output, self.tables
        if self.tail is None or outputs == 0:
            return 0
        return tables.lookahead + (outputs - 1) * tables.samples_per_output + 1 - samples


def frame_ratio(fs_hz: float, frame_rate_hz: float, stride: int = 1) -> tuple[int, int]:
    """Outputs per frame as a fraction (outputs, frames), an output every `stride` samples."""
    if not 0 < frame_rate_hz <= fs_hz / stride:
        raise ParameterError(
            f"the frame rate must lie above 0 and up to the output's rate {fs_hz / stride:g} Hz, "
            f"got {frame_rate_hz:g} Hz"
        )
    ratio = Fraction(str(fs_hz)) / Fraction(str(frame_rate_hz)) / stride
    if max(ratio.numerator, ratio.denominator) >= 2**24:
        raise ParameterError(
            f"{frame_rate_hz} frames/s at {fs_hz} Hz is no ratio of small integers; "
            "use a rounder frame rate"
        )
    return ratio.numerator, ratio.denominator


def _check_sizes(op: BlockOp) -> None:
    """Raises where an operation would read another's coefficients or state, or is none."""
    operation = get_operation(op.code)
    expected = operation.coefs(op.argument), operation.values(op.argument)
    got = op.coef.shape[1], op.state.shape[1]
    if got != expected:
        raise ShapeError(
            f"{operation.name}: expected {expected[0]} coefficients and {expected[1]} state values "
            f"a channel for the argument {op.argument}, got {got[0]} and {got[1]}"
        )


def lay_out(ops: Sequence[BlockOp]) -> tuple[NDArray[np.int64], list[Tensor], list[Tensor]]:
    """Kernel table of a program, and its coefficients and states side by side."""
    table, coef_row, state_row = [], 0, 0
    for op in ops:
        _check_sizes(op)
        table.append([op.code, coef_row, state_row, op.argument])
        coef_row += op.coef.shape[1]
        state_row += op.state.shape[1]
    return (
        np.array(table, np.int64).reshape(-1, 4),
        [op.coef for op in ops],
        [op.state for op in ops],
    )


def compile_chain(
    ops: Sequence[BlockOp], bank: Bank, pool: str, fs_hz: float, frame_rate_hz: float
) -> PooledChain:
    """Lay coefficients and state of all operations side by side and build the kernel's tables."""
    if pool not in POOLS:
        raise ParameterError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
    table, coefs, states = lay_out(ops)
    coef_rows, state_rows = (sum(t.shape[1] for t in rows) for rows in (coefs, states))
    most, channels, each = len(bank.kinds), len(bank.offsets) - 1, bank.coef.shape[1]
    filters, columns = bank_layout(bank.kinds, bank.offsets, each, coef_rows, state_rows)
    coefs.append(spread(bank.coef, bank.offsets, most))
    states.append(coefs[-1].new_zeros(channels, (filter_states(each) + 1) * most))
    at = next((k for k, op in enumerate(ops) if op.code == DECIMATE), None)
    taps, stride = (1, 1) if at is None else divmod(ops[at].argument, 2**16)
    tables = PooledTables(
        ops=table,
        filters=filters,
        columns=columns,
        channels=channels,
        width=bank.offsets[-1],
        pool=POOLS[pool],
        samples_per_frame=frame_ratio(fs_hz, frame_rate_hz, stride),
        samples_per_output=stride,
        lookahead=taps // 2,
    )
    tail = None if at is None else replace(tables, ops=table[at:])
    return PooledChain(tables, pack(torch.cat(coefs, 1)), pack(torch.cat(states, 1)), tail)
