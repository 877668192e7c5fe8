"""Fast kernels against the plain loops: values, state, chunks, lane padding, forced backends."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from amtcore.errors import BackendError, ShapeError
from amtcore.kernels.cpu.chain_loop import LONG_BLOCK
from amtcore.kernels.operation import ChainOperation
from amtcore.kernels.operations.adaptation import ADAPTATION
from amtcore.kernels.operations.compression import BROKEN_STICK
from amtcore.kernels.operations.hair_cell import HAIR_CELL
from amtcore.kernels.operations.one_pole import ONE_POLE_CASCADE, POLE_ZERO_CASCADE
from amtcore.kernels.operations.sections import FIRST_ORDER, STATE_VARIABLE
from amtcore.kernels.operators import modulation_bank, run_step

from ..compare import KERNEL32, KERNEL64, assert_close
from ..short import but, spread
from .compiling import one_graph

# More than one lane group, the second one mostly padding, and more than one block of 128 samples.
BATCH, CHANNELS, TIME = 2, 37, 150
Case = tuple[Tensor, Tensor, Tensor, Callable[..., tuple[Tensor, Tensor]]]


def _step(operation: ChainOperation, argument: int = 0) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda *a, **k: run_step(operation, argument, *a, **k)


def _cascade(dtype: torch.dtype, channels: int = CHANNELS, order: int = 4) -> Case:
    angle = torch.rand(channels, dtype=dtype)
    coef = torch.stack((0.9 * angle.cos(), 0.9 * angle.sin(), angle), 1)
    state = torch.randn(BATCH, channels, 2 * order, dtype=dtype)
    x = torch.randn(BATCH, 1, TIME, dtype=dtype)
    return x, coef, state, _step(ONE_POLE_CASCADE, order)


def _pole_zero(dtype: torch.dtype, channels: int = CHANNELS) -> Case:
    x, coef, state, _ = _cascade(dtype, channels, 3)
    return x, coef, state, _step(POLE_ZERO_CASCADE, 3)


def _first_order(dtype: torch.dtype, channels: int = CHANNELS, *, rectify: bool) -> Case:
    x = torch.randn(BATCH, channels, TIME, dtype=dtype)
    coef = 0.9 * torch.rand(channels, 3, dtype=dtype)
    state = torch.rand(BATCH, channels, 1, dtype=dtype)
    return x, coef, state, _step(FIRST_ORDER, int(rectify))


def _state_variable(dtype: torch.dtype, channels: int = CHANNELS, *, rectify: bool) -> Case:
    g, k = torch.rand(channels, dtype=dtype), 0.5 + torch.rand(channels, dtype=dtype)
    a1 = 1 / (1 + g * (g + k))
    coef = torch.stack((a1, g * a1, g * g * a1, *torch.rand(3, channels, dtype=dtype)), 1)
    x = torch.randn(BATCH, channels, TIME, dtype=dtype)
    state = torch.randn(BATCH, channels, 2, dtype=dtype)
    return x, coef, state, _step(STATE_VARIABLE, int(rectify))


def _adaptation(dtype: torch.dtype, channels: int = CHANNELS, *, limit: bool) -> Case:
    rest = 1e-5 ** (0.5 ** torch.arange(1, 6, dtype=dtype))
    m = (1 - rest**2) * 10 - 1
    loops = torch.stack((0.02 * torch.rand(5, dtype=dtype), m, -2 / m), 1).flatten()
    fixed = torch.stack((rest[0] ** 2, rest[-1], 100 / (1 - rest[-1])))
    coef = torch.cat((fixed, loops)).repeat(channels, 1)
    x = torch.randn(BATCH, channels, TIME, dtype=dtype).square()
    state = rest.repeat(BATCH, channels, 1)
    return x, coef, state, _step(ADAPTATION, 10 + int(limit))


def _bank(dtype: torch.dtype, channels: int = CHANNELS) -> Case:
    offsets = [0]
    for channel in range(channels):
        offsets.append(offsets[-1] + channel % 4 + 1)
    coef = 0.5 * torch.rand(offsets[-1], 6, dtype=dtype)
    x = torch.randn(BATCH, channels, TIME, dtype=dtype)
    state = torch.randn(BATCH, offsets[-1], 2, dtype=dtype)
    return x, coef, state, lambda *a, **k: modulation_bank(*a, [0, 1, 1, 2], offsets, **k)


def _two_sections(dtype: torch.dtype, channels: int = CHANNELS) -> Case:
    offsets = [0]
    for channel in range(channels):
        offsets.append(offsets[-1] + channel % 2 + 1)
    rows = [_state_variable(dtype, 1, rectify=False)[1] for _ in range(2)]
    sections = [each.repeat(offsets[-1], 1) for each in rows]
    x = torch.randn(BATCH, channels, TIME, dtype=dtype)
    state = torch.randn(BATCH, offsets[-1], 4, dtype=dtype)
    run = modulation_bank
    return x, torch.cat(sections, 1), state, lambda *a, **k: run(*a, [4, 4], offsets, **k)


def _broken_stick(dtype: torch.dtype, channels: int = CHANNELS, *, knee: float) -> Case:
    """Return the state unchanged, so that an operation without state has the form of a case."""
    exponent = 0.2 + 0.5 * torch.rand(channels, dtype=dtype)
    corner = torch.full_like(exponent, knee)
    gain = 1 + torch.rand(channels, dtype=dtype)
    above = gain * knee ** (1 - exponent) if knee else gain
    coef = torch.stack((gain, above, exponent, corner), 1)
    x = torch.randn(BATCH, channels, TIME, dtype=dtype)
    state = torch.randn(BATCH, channels, 1, dtype=dtype)
    run = _step(BROKEN_STICK)
    return x, coef, state, lambda x, c, s, **k: (run(x, c, s[..., :0], **k)[0], 1.0 * s)


def _hair_cell(dtype: torch.dtype, channels: int = CHANNELS) -> Case:
    """Rows in the range of the real ones, and inputs that open and close the channels."""
    rows = torch.tensor([0.57, -3.0, 1.25, -7.0, 0.054, 0.072, 0.006, 0.147, 1e-4], dtype=dtype)
    coef = rows * (0.9 + 0.2 * torch.rand(channels, 9, dtype=dtype))
    x = torch.randn(BATCH, channels, TIME, dtype=dtype)
    x[:, :3, 100:] *= 30.0
    state = 0.01 * torch.randn(BATCH, channels, 1, dtype=dtype)
    return x, coef, state, _step(HAIR_CELL)


CASES: dict[str, Callable[..., Case]] = {
    "one_pole_cascade": _cascade,
    "one_pole_cascade_of_odd_order": partial(_cascade, order=3),
    "first_order": partial(_first_order, rectify=False),
    "first_order_rectified": partial(_first_order, rectify=True),
    "state_variable": partial(_state_variable, rectify=False),
    "state_variable_rectified": partial(_state_variable, rectify=True),
    "adaptation": partial(_adaptation, limit=False),
    "adaptation_limited": partial(_adaptation, limit=True),
    "modulation_bank": _bank,
    "pole_zero_cascade": _pole_zero,
    "two_sections_bank": _two_sections,
    "broken_stick": partial(_broken_stick, knee=0.4),
    "power_law": partial(_broken_stick, knee=0.0),
    "hair_cell": _hair_cell,
}
DTYPES = {"float32": (torch.float32, KERNEL32), "float64": (torch.float64, KERNEL64)}


@pytest.mark.parametrize(("case", "dtype"), spread(2, CASES, DTYPES))
def test_kernel_equals_plain_loop(case: str, dtype: str) -> None:
    kind, tolerance = DTYPES[dtype]
    x, coef, state, run = CASES[case](kind)
    before = state.clone()
    y, after = run(x, coef, state, backend="cpu")
    expected, expected_after = run(x, coef, state, backend="reference")
    assert_close(y, expected, tolerance, case)
    assert_close(after, expected_after, tolerance, f"{case} state")
    assert torch.equal(state, before), "the caller's state must not change"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cut", [1, 127, 128, 129, TIME - 1])
def test_two_chunks_equal_the_whole_exactly(case: str, cut: int) -> None:
    x, coef, state, run = CASES[case](torch.float32)
    whole, last = run(x, coef, state)
    first, middle = run(x[..., :cut], coef, state)
    second, after = run(x[..., cut:], coef, middle)
    assert torch.equal(torch.cat((first, second), -1), whole)
    assert torch.equal(after, last)


@pytest.mark.parametrize("case", ["first_order", "modulation_bank"])
def test_blocks_of_a_long_signal_join_exactly(case: str) -> None:
    """Full-rate output is stored LONG_BLOCK samples at a time; shorter chunks never fill one."""
    x, coef, state, run = CASES[case](torch.float32)
    x = torch.randn(BATCH, CHANNELS, 2 * LONG_BLOCK + 77)
    whole, last = run(x, coef, state)
    parts = []
    for part in x.split(LONG_BLOCK - 3, -1):
        y, state = run(part, coef, state)
        parts.append(y)
    assert torch.equal(torch.cat(parts, -1), whole)
    assert torch.equal(state, last)


#: Other arguments of operators that are in other cases as well.
SAME_OPERATOR = (
    *("one_pole_cascade_of_odd_order", "first_order_rectified", "state_variable_rectified"),
    *("adaptation_limited", "power_law"),
)


@pytest.mark.parametrize("case", but(SAME_OPERATOR, CASES))
def test_operator_is_well_formed(case: str) -> None:
    """Schema and fake kernel agree with the real one, which is what torch.compile relies on."""
    x, coef, state, run = CASES[case](torch.float64)

    def call(x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return run(x, coef, state)

    compiled = one_graph(call)
    for got, expected in zip(compiled(x, coef, state), call(x, coef, state), strict=True):
        assert torch.equal(got, expected)


def test_a_silent_tail_costs_no_accuracy() -> None:
    """States decay through the denormal range; flushing them must not show in the output."""
    x, coef, state, run = _cascade(torch.float32)
    x = torch.nn.functional.pad(x, (0, 20000))
    y, after = run(x, coef, state)
    assert y[..., -1000:].abs().max() < 1e-30
    assert torch.isfinite(after).all()


def test_forced_backends_raise_when_they_cannot_run() -> None:
    x, coef, state, run = _cascade(torch.float32)
    with pytest.raises(BackendError, match="backend must be one of"):
        run(x, coef, state, backend="fpga")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, c, s: (x[0], c, s), "expected input"),
        (lambda x, c, s: (x, c[:, :2], s), "coefficients per channel"),
        (lambda x, c, s: (x, c, s[:1]), "expected a state of shape"),
        (lambda x, c, s: (x.double(), c, s), "one dtype"),
    ],
)
def test_wrong_shapes_are_named(change: Callable[..., tuple[Tensor, ...]], message: str) -> None:
    x, coef, state, run = _cascade(torch.float32)
    with pytest.raises(ShapeError, match=message):
        run(*change(x, coef, state))
