"""A chain as data: its steps, the filters that end it, and how its frames are laid out.

Nothing runs here: `cpu` and `gpu` have each their own way of running a chain.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import ParameterError, ShapeError
from amtcore.kernels.operation import ChainOperation, Rate
from amtcore.kernels.operations.modulation_filters import (
    BANK_IDENTITY,
    FILTER_COEFS,
    filter_states,
    get_filter,
)
from amtcore.kernels.pooling import POOLS
from amtcore.kernels.registry import get_operation
from amtcore.kernels.vector.lanes import groups_of, pack
from amtcore.kernels.vector.simd import LANES

#: Operations of a chain in order, each with its argument.
Steps = tuple[tuple[ChainOperation, int], ...]


@dataclass(frozen=True)
class ChainStep:
    """One step of a chain.

    Args:
        operation: What it does.
        argument: Integer argument of the operation.
        coef: (channel, coefficient).
        state: (channel, values), the state before the first sample.
    """

    operation: ChainOperation
    argument: int
    coef: Tensor
    state: Tensor


@dataclass(frozen=True)
class FilterBank:
    """The filters that end a chain, several per channel.

    Args:
        kinds: What the m-th filter of every channel is.
        coef: (filter, FILTER_COEFS).
        offsets: (channel + 1), cuts the filters into channels.
    """

    kinds: tuple[int, ...]
    coef: Tensor
    offsets: tuple[int, ...]


def identity_bank(channels: int, like: Tensor) -> FilterBank:
    """Return one identity filter a channel, to pool a stage that has no filter bank."""
    coef = like.new_zeros(channels, FILTER_COEFS)
    return FilterBank((BANK_IDENTITY,), coef, tuple(range(channels + 1)))


def text_of(steps: Steps) -> str:
    """Return steps as an operator takes them: "adaptation:11,hair_cell:0"."""
    return ",".join([f"{operation.name}:{argument}" for operation, argument in steps])


@functools.lru_cache(maxsize=256)
def _named_steps(text: str) -> Steps:
    pairs = [each.split(":") for each in text.split(",")]
    return tuple((get_operation(name), int(argument)) for name, argument in pairs)


def steps_of(steps: Steps | str) -> Steps:
    """Return steps of `text_of`, or the steps as they are."""
    return _named_steps(steps) if isinstance(steps, str) else steps


@functools.lru_cache(maxsize=256)
def first_rows(steps: Steps) -> tuple[tuple[int, int], ...]:
    """Return the first coefficient row and the first state row of every step."""
    rows, coef, state = [], 0, 0
    for operation, argument in steps:
        rows.append((coef, state))
        coef += operation.coefficients(argument)
        state += operation.states(argument)
    return tuple(rows)


def check_keeps_rate(steps: Steps) -> None:
    """Raise if an operation has fewer outputs than samples."""
    for operation, argument in steps:
        if operation.rate(argument) != Rate():
            raise ParameterError(f"operations at full rate must keep it: {operation.name} does not")


def check_sizes(ops: Sequence[ChainStep]) -> None:
    """Raise if an operation would read coefficients or states of another operation."""
    for op in ops:
        operation = op.operation
        expected = operation.coefficients(op.argument), operation.states(op.argument)
        got = op.coef.shape[1], op.state.shape[1]
        if got != expected:
            raise ShapeError(
                f"{operation.name}: expected {expected[0]} coefficients and {expected[1]} state "
                f"values a channel for the argument {op.argument}, got {got[0]} and {got[1]}"
            )


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
    """Return the index of each filter when every channel has `most` places."""
    counts = [end - begin for begin, end in pairwise(offsets)]
    places = [c * most + m for c, count in enumerate(counts) for m in range(count)]
    return torch.tensor(places, dtype=torch.int64).to(device)


def pad_filters(values: Tensor, offsets: Sequence[int], most: int) -> Tensor:
    """(.., filter, value) -> (.., channel, most * value), zeros where a channel has no filter m."""
    channels, width = len(offsets) - 1, values.shape[-1]
    wide = values.new_zeros(*values.shape[:-2], channels * most, width)
    wide[..., _places(tuple(offsets), most, values.device), :] = values.detach()
    return wide.unflatten(-2, (channels, most)).flatten(-2)


def unpad_filters(wide: Tensor, offsets: Sequence[int], most: int) -> Tensor:
    """The inverse of `pad_filters`."""
    places = _places(tuple(offsets), most, wide.device)
    return wide.unflatten(-1, (most, -1)).flatten(-3, -2)[..., places, :]


@dataclass(frozen=True)
class ChainTables:
    """The layout of a pooled chain: steps, filters, and frames.

    Frames are cut from the outputs of the steps. Output m is complete once sample
    m * samples_per_output + lookahead has arrived. `rows` holds the first coefficient row and the
    first state row of each step.
    """

    steps: Steps
    rows: tuple[tuple[int, int], ...]
    filters: NDArray[np.int64]
    columns: NDArray[np.int64]
    channels: int
    width: int
    pool: int
    samples_per_frame: tuple[int, int]
    samples_per_output: int = 1
    lookahead: int = 0

    def frames_before(self, sample: int) -> int:
        """Return the number of frames that `sample` samples complete."""
        outputs = -(-(sample - self.lookahead) // self.samples_per_output)
        return self.frames_of(max(0, outputs))

    def frames_of(self, outputs: int) -> int:
        """Return the number of whole frames in `outputs` outputs."""
        samples, frames = self.samples_per_frame
        return outputs * frames // samples


@dataclass(frozen=True)
class ChainPlan:
    """A chain ready for a device: tables, packed coefficients, and the packed state at rest.

    `tail` holds the steps from the first look-ahead on, such as a decimation. At the end of a
    signal these steps take zeros in the place of samples.
    """

    tables: ChainTables
    coef: NDArray[np.floating]
    rest: NDArray[np.floating]
    tail: ChainTables | None = None

    @property
    def hops(self) -> tuple[Fraction, Fraction]:
        """Samples of the signal from one output to the next, and from one frame to the next."""
        stride = Fraction(self.tables.samples_per_output)
        return stride, stride * Fraction(*self.tables.samples_per_frame)

    def n_frames(self, n_samples: int) -> int:
        """Return the number of whole frames in `n_samples` samples."""
        return self.tables.frames_of(n_samples // self.tables.samples_per_output)

    def zeros_after(self, samples: int) -> int:
        """Return how many zeros must follow a clip of `samples` samples to complete its frames."""
        outputs, tables = samples // self.tables.samples_per_output, self.tables
        if self.tail is None or outputs == 0:
            return 0
        return tables.lookahead + (outputs - 1) * tables.samples_per_output + 1 - samples


def frame_ratio(fs_hz: float, frame_rate_hz: float, stride: int = 1) -> tuple[int, int]:
    """Return outputs per frame as a fraction (outputs, frames), one output in `stride` samples."""
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


def compile_chain(
    ops: Sequence[ChainStep], bank: FilterBank, pool: str, fs_hz: float, frame_rate_hz: float
) -> ChainPlan:
    """Lay coefficients and state of all operations side by side and build the kernel's tables."""
    if pool not in POOLS:
        raise ParameterError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
    check_sizes(ops)
    steps = tuple((op.operation, op.argument) for op in ops)
    coefs, states = [op.coef for op in ops], [op.state for op in ops]
    coef_rows, state_rows = (sum(t.shape[1] for t in rows) for rows in (coefs, states))
    most, channels, each = len(bank.kinds), len(bank.offsets) - 1, bank.coef.shape[1]
    filters, columns = bank_layout(bank.kinds, bank.offsets, each, coef_rows, state_rows)
    coefs.append(pad_filters(bank.coef, bank.offsets, most))
    states.append(coefs[-1].new_zeros(channels, (filter_states(each) + 1) * most))
    rates = [operation.rate(argument) for operation, argument in steps]
    slower = [k for k, rate in enumerate(rates) if rate != Rate()]
    if len(slower) > 1:
        raise ParameterError(
            "a chain has one operation at most that lowers the rate or looks ahead"
        )
    stride, lookahead = rates[slower[0]] if slower else (1, 0)
    tables = ChainTables(
        steps=steps,
        rows=first_rows(steps),
        filters=filters,
        columns=columns,
        channels=channels,
        width=bank.offsets[-1],
        pool=POOLS[pool],
        samples_per_frame=frame_ratio(fs_hz, frame_rate_hz, stride),
        samples_per_output=stride,
        lookahead=lookahead,
    )
    tail = None
    if slower:
        tail = replace(tables, steps=steps[slower[0] :], rows=tables.rows[slower[0] :])
    return ChainPlan(tables, pack(torch.cat(coefs, 1)), pack(torch.cat(states, 1)), tail)
