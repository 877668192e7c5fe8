"""The integrate-and-fire kernels against the plain loop: values, gradients, chunks, lanes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from amtcore.errors import BackendError, ParameterError, ShapeError
from amtcore.kernels.operations import lif as operation
from amtcore.kernels.operations.lif import LIF, spike_count
from amtcore.kernels.operators import operator
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import get_num_threads, set_num_threads

from ..compare import Tolerance, assert_close
from ..short import but, drawn, only, spread
from .compiling import one_graph

lif = operator(LIF)

GRADIENT = {
    torch.float64: Tolerance(1e-10, "float64 gradients by two routes", 1e-12),
    torch.float32: Tolerance(1e-5, "float32 sums over time in another order", 1e-6),
}
#: Neurons and synapses: one lane group and part of another, each with a kernel of its own.
SIZES = [(LANES + 5, 1), (LANES + 5, 3), (3, 2)]
Inputs = tuple[Tensor, Tensor, Tensor]


def _inputs(neurons: int, synapses: int, dtype: torch.dtype, steps: int = 70) -> Inputs:
    """Random neurons that fire about once a step, some far below their threshold, from a state."""
    torch.manual_seed(0)
    drive = torch.linspace(0.0, 0.5, neurons, dtype=dtype).repeat_interleave(synapses)
    x = drive * torch.rand(2, steps, neurons * synapses, dtype=dtype)
    own = torch.rand(4, neurons, dtype=dtype)
    rows = torch.stack((0.8 + 0.19 * own[0], 0.02 * own[1] - 0.01, 0.5 + own[2], 0.1 + own[3]), 1)
    beta = 0.5 + 0.4 * torch.rand(neurons, synapses, dtype=dtype)
    state = torch.rand(2, neurons, 1 + synapses, dtype=dtype) - 0.2
    return x, torch.cat((rows, beta), 1), state


@pytest.mark.parametrize(
    ("size", "dtype", "most"), spread(2, SIZES, [torch.float32, torch.float64], [math.inf, 2.0])
)
def test_kernel_equals_plain_loop_exactly(
    size: tuple[int, int], dtype: torch.dtype, most: float
) -> None:
    inputs = _inputs(*size, dtype)
    before = inputs[2].clone()
    fast = lif(*inputs, most, record=True, backend="cpu")
    slow = lif(*inputs, most, record=True, backend="reference")
    for name, got, expected in zip(("spikes", "vmem", "isyn", "state"), fast, slow, strict=True):
        assert torch.equal(got, expected), name
    assert torch.equal(inputs[2], before), "the caller's state must not change"
    assert 0.1 < float(fast[0].mean()) and float(fast[0].max()) <= most
    assert torch.equal(lif(*inputs, most)[0], fast[0]), "recording must not change the spikes"


def _gradients(inputs: Inputs, record: bool, cuts: tuple[int, ...] = (), **options: str) -> Inputs:
    leaves = [value.clone().requires_grad_() for value in inputs]
    x, coef, state = leaves
    edges, parts = (0, *cuts, x.shape[1]), []
    for begin, end in pairwise(edges):
        *values, state = lif(x[:, begin:end], coef, state, math.inf, record, **options)
        parts.append(values if record else values[:1])
    generator = torch.Generator().manual_seed(1)
    loss = state.square().sum()
    for signals in zip(*parts, strict=True):
        whole = torch.cat(signals, 1)
        weight = torch.randn(whole.shape, generator=generator, dtype=whole.dtype)
        loss = loss + (weight * whole).sum()
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("dtype", but([torch.float32], [torch.float32, torch.float64]), ids=str)
@pytest.mark.parametrize(("size", "record"), spread(2, SIZES, [False, True]))
def test_adjoint_equals_autograd_through_the_plain_loop(
    size: tuple[int, int], dtype: torch.dtype, record: bool
) -> None:
    inputs = _inputs(*size, dtype)
    fast, slow = (_gradients(inputs, record, backend=name) for name in ("cpu", "reference"))
    for name, got, expected in zip(("x", "coef", "state"), fast, slow, strict=True):
        assert_close(got, expected, GRADIENT[dtype], name)
    assert not fast[1][:, 3].any(), "the window has no gradient"


@pytest.mark.parametrize("cuts", [(1,), (16, 32), (33, 50)])
def test_gradients_flow_through_the_carried_state(cuts: tuple[int, ...]) -> None:
    inputs = _inputs(5, 2, torch.float64)
    for got, expected in zip(_gradients(inputs, True, cuts), _gradients(inputs, True), strict=True):
        assert_close(got, expected, GRADIENT[torch.float64])


def test_gradcheck_below_the_window() -> None:
    """Where nothing fires the neuron is linear and its gradients are the true ones."""
    x, coef, state = _inputs(3, 2, torch.float64, steps=6)
    coef = torch.cat((coef[:, :2], coef[:, 2:3] + 10.0, coef[:, 3:]), 1)
    leaves = tuple(value.clone().requires_grad_() for value in (x, coef, state))
    assert not lif(*leaves, math.inf)[0].any()
    assert torch.autograd.gradcheck(lambda *a: lif(*a, math.inf, True)[1:], leaves)


def _tangent_loop(x: Tensor, coef: Tensor, state: Tensor, at: Inputs, weight: Tensor) -> Tensor:
    """Weighted spikes of a loop whose floor is replaced by its tangent where the window is open.

    count = n0 + v / threshold - v0 / threshold0, with n0, v0 from a run of the plain neuron at
    `at`: a smooth function whose true derivative is what the surrogate gradient claims to be.
    """
    v, isyn, v0, isyn0 = state[..., 0], state[..., 1:], at[2][..., 0], at[2][..., 1:]
    beta, beta0, total = coef[:, 4:], at[1][:, 4:], x.new_zeros(())
    for t in range(x.shape[1]):
        isyn = beta * (isyn + x[:, t].unflatten(-1, beta.shape))
        isyn0 = beta0 * (isyn0 + at[0][:, t].unflatten(-1, beta.shape))
        v = coef[:, 0] * v + isyn.sum(-1) + coef[:, 1]
        v0 = at[1][:, 0] * v0 + isyn0.sum(-1) + at[1][:, 1]
        count0 = torch.where(v0 >= at[1][:, 2], torch.floor(v0 / at[1][:, 2]), 0.0)
        is_open = v0 >= at[1][:, 2] - at[1][:, 3]
        count = count0 + torch.where(is_open, v / coef[:, 2] - v0 / at[1][:, 2], 0.0)
        v, v0 = v - count * coef[:, 2], v0 - count0 * at[1][:, 2]
        total = total + (weight[:, t] * count).sum()
    return total


def test_surrogate_gradient_is_the_slope_of_the_tangent() -> None:
    at = _inputs(4, 2, torch.float64, steps=12)
    weight = torch.randn(2, 12, 4, dtype=torch.float64)
    leaves = [value.clone().requires_grad_() for value in at]
    spikes = lif(*leaves, math.inf)[0]
    assert 0 < float((spikes > 0).double().mean()) < 1
    gradients = torch.autograd.grad((spikes * weight).sum(), leaves)
    for index, gradient in enumerate(gradients):
        direction = torch.randn_like(at[index])
        if index == 1:
            direction[:, 3] = 0.0
        ends = []
        for step in (1e-6, -1e-6):
            moved = [value + step * direction if i == index else value for i, value in
                     enumerate(at)]  # fmt: skip
            ends.append(_tangent_loop(*moved, at, weight))
        slope = float(ends[0] - ends[1]) / 2e-6
        assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-6)


def test_spike_count_and_its_gradient_by_hand() -> None:
    v = torch.tensor([0.2, 0.6, 1.0, 2.4, 9.0], dtype=torch.float64, requires_grad=True)
    threshold = torch.tensor([1.0, 1.0, 1.0, 0.8, 1.0], dtype=torch.float64, requires_grad=True)
    count = spike_count(v, threshold, torch.full_like(v, 0.5), 3.0)
    assert count.tolist() == [0, 0, 1, 2, 3], "0.8 goes only 2.99.. times into the double 2.4"
    count.sum().backward()
    assert v.grad.tolist() == pytest.approx([0, 1, 1, 1.25, 1])
    assert threshold.grad.tolist() == pytest.approx([0, -0.6, -1, -2.4 / 0.64, -9])


@pytest.mark.parametrize(("neurons", "synapses"), SIZES)
@drawn(15, derandomize=True)
@given(cuts=st.lists(st.integers(0, 70), max_size=5))
def test_chunks_equal_the_whole_exactly(neurons: int, synapses: int, cuts: list[int]) -> None:
    x, coef, state = _inputs(neurons, synapses, torch.float32)
    whole = lif(x, coef, state, math.inf)
    edges, parts = [0, *sorted(cuts), 70], []
    for begin, end in pairwise(edges):
        spikes, _, _, state = lif(x[:, begin:end], coef, state, math.inf)
        parts.append(spikes)
    assert torch.equal(torch.cat(parts, 1), whole[0])
    assert torch.equal(state, whole[-1])


def test_threads_and_large_outputs_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(4 * LANES, 1, torch.float32)
    expected, gradients = lif(*inputs, math.inf, True), _gradients(inputs, True)
    monkeypatch.setattr(operation, "STREAM_BYTES", 0)
    threads = get_num_threads()
    try:
        for count in (1, 3, 8):
            set_num_threads(count)
            got, got_gradients = lif(*inputs, math.inf, True), _gradients(inputs, True)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            assert all(torch.equal(a, b) for a, b in zip(got_gradients, gradients, strict=True))
            assert all(values.data_ptr() % 64 == 0 for values in got[:3])
    finally:
        set_num_threads(threads)


def test_large_outputs_with_rows_that_cannot_be_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(LANES + 5, 1, torch.float32)
    expected = lif(*inputs, math.inf, True)
    monkeypatch.setattr(operation, "STREAM_BYTES", 0)
    got = lif(*inputs, math.inf, True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_no_steps_and_no_batch() -> None:
    x, coef, state = _inputs(3, 2, torch.float32)
    spikes, vmem, isyn, last = lif(x[:, :0], coef, state, math.inf, True)
    assert spikes.shape == vmem.shape == (2, 0, 3) and isyn.shape == (2, 0, 3, 2)
    assert torch.equal(last, state)
    assert lif(x[:0], coef, state[:0], math.inf)[0].shape == (0, 70, 3)


@pytest.mark.parametrize("record", only([True], [False, True]))
def test_compiled_equals_eager(record: bool) -> None:
    """Schema and fake kernels agree with the real ones, forward and backward."""
    inputs = _inputs(5, 2, torch.float64)

    def loss(x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        return lif(x, coef, state, math.inf, record)

    compiled = one_graph(loss)
    results = []
    for call in (loss, compiled):
        leaves = [value.clone().requires_grad_() for value in inputs]
        outputs = call(*leaves)
        sum(y.square().sum() for y in outputs).backward()
        results.append([*outputs, *(leaf.grad for leaf in leaves)])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    ("which", "value", "message"),
    [
        (0, math.nan, r"data must be finite, got nan at index \(1, 5, 2\) and 0 more"),
        (0, -math.inf, r"data must be finite, got -inf at index \(1, 5, 2\)"),
        (2, math.nan, "state must be finite"),
        (1, math.nan, "coefficient must be finite"),
    ],
)
def test_values_that_are_not_finite(which: int, value: float, message: str, backend: str) -> None:
    inputs = [part.clone() for part in _inputs(3, 2, torch.float32)]
    inputs[which][(1, 5, 2) if which == 0 else (1, 2)] = value
    with pytest.raises(ParameterError, match=message):
        lif(*inputs, math.inf, backend=backend)


def test_overflow_is_told_from_bad_input() -> None:
    x, coef, state = _inputs(3, 1, torch.float32)
    with pytest.raises(ParameterError, match="overflowed"):
        lif(torch.full_like(x, 3e38), coef, state, math.inf)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, c, s: (x[0], c, s), "expected input"),
        (lambda x, c, s: (x[..., :5], c, s), "3 neurons \\* 2 synapses"),
        (lambda x, c, s: (x, c, s[:1]), "expected a state of shape"),
        (lambda x, c, s: (x.double(), c, s), "one dtype"),
    ],
)
def test_wrong_shapes_are_named(change, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ShapeError, match=message):
        lif(*change(*_inputs(3, 2, torch.float32)), math.inf)


def test_forced_backends_raise_when_they_cannot_run() -> None:
    with pytest.raises(BackendError, match="backend must be one of"):
        lif(*_inputs(3, 2, torch.float32), math.inf, backend="fpga")
