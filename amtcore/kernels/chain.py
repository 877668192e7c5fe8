"""A chain as data: its steps, the filters that end it, and how its frames are laid out.

Nothing runs here: `cpu` and `gpu` have each their own way of running a chain.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
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
from amtcore.kernels.pooling import ADJOINT_BLOCK, POOLS
from amtcore.kernels.registry import get_operation
from amtcore.kernels.vector.arrays import groups_of, pack, unpack
from amtcore.kernels.vector.simd import LANES

#: Operations of a chain in order, each with its argument.
Steps = tuple[tuple[ChainOperation, int], ...]


@dataclass(frozen=True)
class ChainStep:
    """An operation with its integer argument, coefficients, and state before the first sample.

    `coef` is (channel, coefficient) and `state` (channel, values).
    """

    operation: ChainOperation
    argument: int
    coef: Tensor
    state: Tensor


@dataclass(frozen=True)
class FilterBank:
    """The filters that end a chain: kinds of a channel's m-th filter, and `coef` (filter, value).

    The `offsets` (channel + 1) cut the filters into channels.
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


def scratch_rows(steps: Steps, kinds: Iterable[int]) -> int:
    """Return the scratch rows of an adjoint's block: for each sample, and the state before it."""
    taped = [operation.taped(argument) for operation, argument in steps]
    taped += [get_filter(kind).taped for kind in kinds]
    return max(taped, default=0) * (ADJOINT_BLOCK + 1)


def _filter_rows(
    kinds: Sequence[int], coefs: int, coef_row: int, state_row: int
) -> NDArray[np.int64]:
    """Return the table of a bank's filters, (m, 4); see `modulation_filters`."""
    for kind in kinds:
        get_filter(kind)
    states = filter_states(coefs)
    frames = state_row + states * len(kinds)
    rows = [(kind, coef_row + coefs * m, state_row + states * m, frames + m)
            for m, kind in enumerate(kinds)]  # fmt: skip
    return np.array(rows, np.int64).reshape(-1, 4)


def _columns(offsets: Sequence[int], most: int) -> NDArray[np.int64]:
    """Return the output column of each lane's filters, (group, m, lane), -1 for none."""
    columns = np.full((groups_of(len(offsets) - 1), most, LANES), -1, np.int64)
    for channel, (begin, end) in enumerate(pairwise(offsets)):
        columns[channel // LANES, : end - begin, channel % LANES] = range(begin, end)
    return columns


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


@dataclass(frozen=True, eq=False)
class ChainTables:
    """The layout of a chain: steps, filters, and frames.

    Frames are cut from the outputs of the steps. Output m is complete once sample
    m * samples_per_output + lookahead has arrived. `rows` holds the first coefficient row and the
    first state row of each step. Without a `pool` the chain keeps all outputs, at full
    rate. A bank alone has the `offsets` of its filters.
    """

    steps: Steps
    rows: tuple[tuple[int, int], ...]
    filters: NDArray[np.int64]
    columns: NDArray[np.int64]
    channels: int
    width: int
    pool: int | None = None
    samples_per_frame: tuple[int, int] = (1, 1)
    samples_per_output: int = 1
    lookahead: int = 0
    offsets: tuple[int, ...] = ()

    def pack(self, values: Tensor) -> Tensor:
        """Pack coefficients or states in lanes: (.., channel, value), or (.., filter, value)."""
        if self.offsets:
            values = pad_filters(values, self.offsets, len(self.filters))
        return pack(values)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return packed values as `pack` takes them."""
        values = unpack(packed, self.channels)
        if not self.offsets:
            return values
        most = len(self.filters)
        places = _places(self.offsets, most, values.device)
        return values.unflatten(-1, (most, -1)).flatten(-3, -2)[..., places, :]

    def frames_before(self, sample: int) -> int:
        """Return the number of frames that `sample` samples complete."""
        outputs = -(-(sample - self.lookahead) // self.samples_per_output)
        return self.frames_of(max(0, outputs))

    def frames_of(self, outputs: int) -> int:
        """Return the number of whole frames in `outputs` outputs."""
        samples, frames = self.samples_per_frame
        return outputs * frames // samples


@functools.lru_cache(maxsize=64)
def tables_of_steps(steps: Steps | str, channels: int) -> ChainTables:
    """Return the layout of operations, coefficients and states side by side; all keep the rate."""
    steps = steps_of(steps)
    for operation, argument in steps:
        if operation.rate(argument) != Rate():
            raise ParameterError(f"operations at full rate must keep it: {operation.name} does not")
    filters, columns = _filter_rows((), 0, 0, 0), _columns(range(channels + 1), 1)
    return ChainTables(steps, first_rows(steps), filters, columns, channels, channels)


@functools.lru_cache(maxsize=64)
def tables_of_bank(kinds: tuple[int, ...], offsets: tuple[int, ...], coefs: int) -> ChainTables:
    """Return the layout of a filter bank at full rate; arguments as in `FilterBank`."""
    filters, columns = _filter_rows(kinds, coefs, 0, 0), _columns(offsets, len(kinds))
    return ChainTables((), (), filters, columns, len(offsets) - 1, offsets[-1], offsets=offsets)


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
        filters=_filter_rows(bank.kinds, each, coef_rows, state_rows),
        columns=_columns(bank.offsets, most),
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
    coef, rest = (pack(torch.cat(rows, 1)).numpy() for rows in (coefs, states))
    return ChainPlan(tables, coef, rest, tail)
