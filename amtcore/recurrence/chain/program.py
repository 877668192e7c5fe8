"""What a model tells the fused kernel: its operations in order, and the bank at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ParameterError
from .cpu import BANK_IDENTITY, POOLS
from .runner import FILTER_COEFS, FILTER_STATES, PooledTables, bank_layout, pack, spread


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
    """A compiled chain: kernel tables, packed coefficients, and the packed state at rest."""

    tables: PooledTables
    coef: NDArray[np.floating]
    rest: NDArray[np.floating]


def frame_ratio(fs_hz: float, frame_rate_hz: float) -> tuple[int, int]:
    """Samples per frame as an exact fraction (samples, frames)."""
    if not 0 < frame_rate_hz <= fs_hz:
        raise ParameterError(
            f"the frame rate must lie above 0 and up to the sampling rate {fs_hz:g} Hz, "
            f"got {frame_rate_hz:g} Hz"
        )
    ratio = Fraction(str(fs_hz)) / Fraction(str(frame_rate_hz))
    if max(ratio.numerator, ratio.denominator) >= 2**24:
        raise ParameterError(
            f"{frame_rate_hz} frames/s at {fs_hz} Hz is no ratio of small integers; "
            "use a rounder frame rate"
        )
    return ratio.numerator, ratio.denominator


def compile_chain(
    ops: Sequence[BlockOp], bank: Bank, pool: str, fs_hz: float, frame_rate_hz: float
) -> PooledChain:
    """Lay coefficients and state of all operations side by side and build the kernel's tables."""
    if pool not in POOLS:
        raise ParameterError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
    table, coefs, states, coef_row, state_row = [], [], [], 0, 0
    for op in ops:
        table.append([op.code, coef_row, state_row, op.argument])
        coefs.append(op.coef)
        states.append(op.state)
        coef_row += op.coef.shape[1]
        state_row += op.state.shape[1]
    most, channels = len(bank.kinds), len(bank.offsets) - 1
    filters, columns = bank_layout(bank.kinds, bank.offsets, coef_row, state_row)
    coefs.append(spread(bank.coef, bank.offsets, most))
    states.append(coefs[-1].new_zeros(channels, (FILTER_STATES + 1) * most))
    tables = PooledTables(
        ops=np.array(table, np.int64).reshape(-1, 4),
        filters=filters,
        columns=columns,
        channels=channels,
        width=bank.offsets[-1],
        pool=POOLS[pool],
        samples_per_frame=frame_ratio(fs_hz, frame_rate_hz),
    )
    return PooledChain(tables, pack(torch.cat(coefs, 1)), pack(torch.cat(states, 1)))
