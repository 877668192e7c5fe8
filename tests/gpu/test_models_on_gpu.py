"""Every model on CUDA tensors: the CPU's numbers, its gradients, streams, compilation, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.amtcore.model_cases import CASES, in_chunks, leaves, whole
from tests.compare import Tolerance, assert_close
from tests.gpu.conftest import refusing_to_wait

pytestmark = pytest.mark.gpu
#: Transforms and matrix products are another library's on a GPU.
LIBRARIES = Tolerance(1e-4, "single-precision transforms and products of another library", 1e-6)
LIBRARIES64 = Tolerance(1e-9, "transforms and products of another library, through onsets", 1e-12)
#: Gradients of constants are sums over all channels and signals.
SUMS = Tolerance(1e-4, "single-precision sums in another order", 1e-6)
SUMS64 = Tolerance(1e-9, "sums in another order", 1e-12)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
EXACT = [name for name, case in CASES.items() if case.exact]


def assert_same(name: str, dtype: str, got: Any, expected: Any) -> None:
    """Bit for bit in float32 where nothing but our kernels computes."""
    for a, b in zip(leaves(got), leaves(expected), strict=True):
        assert a.is_cuda and a.dtype == b.dtype
        if CASES[name].exact and dtype == "float32":
            assert torch.equal(a.cpu(), b), f"differs by {(a.cpu() - b).abs().max():.1e}"
        else:
            bound = LIBRARIES if dtype == "float32" else LIBRARIES64
            assert_close(a.detach().cpu(), b.detach(), bound)


def assert_same_here(name: str, got: Tensor, expected: Tensor) -> None:
    """Two ways on the device; libraries may choose another algorithm for another batch."""
    if CASES[name].exact:
        assert torch.equal(got, expected)
    else:
        assert_close(got.detach().cpu(), expected.detach().cpu(), LIBRARIES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_outputs_are_those_of_the_cpu(name: str, dtype: str, device: torch.device) -> None:
    case, kind = CASES[name], DTYPES[dtype]
    x = case.signal(3, dtype=kind)
    with torch.no_grad():
        expected = whole(case.build(dtype=kind))(x)
        got = whole(case.build(dtype=kind).to(device))(x.to(device))
    assert_same(name, dtype, got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_cpu(name: str, dtype: str, device: torch.device) -> None:
    case, kind = CASES[name], DTYPES[dtype]
    results = []
    for place in (torch.device("cpu"), device):
        model = case.build(dtype=kind, learnable=True).to(place)
        x = case.signal(2, dtype=kind).to(place).requires_grad_()
        outputs = leaves(whole(model)(x))
        loss = sum((y.square().sum() for y in outputs), torch.zeros((), device=place))
        results.append(torch.autograd.grad(loss, (x, *model.parameters()), allow_unused=True))
    for expected, got in zip(*results, strict=True):
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            assert_close(got.cpu(), expected, SUMS if dtype == "float32" else SUMS64)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.streams])
def test_chunks_equal_the_whole_exactly(name: str, device: torch.device) -> None:
    case = CASES[name]
    model, x = case.build().to(device), case.signal(2).to(device)
    n = x.shape[case.input_axis]
    with torch.no_grad():
        expected = case.traces(whole(model)(x))
        got = in_chunks(case, model, x, [1, n // 3, n // 3])
    for mine, (wanted, _) in zip(got, expected, strict=True):
        assert_same_here(name, mine, wanted)


def _captured(call: Any, x: Tensor) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A graph of one call, after the runs on a side stream that torch wants before a capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call(x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = leaves(call(x))
    return graph, outputs


@pytest.mark.parametrize("name", CASES)
def test_a_call_is_captured_into_a_graph(name: str, device: torch.device) -> None:
    case = CASES[name]
    call, x = whole(case.build().to(device)), case.signal(2).to(device)
    with torch.no_grad():
        graph, outputs = _captured(call, x)
        x.mul_(0.5)
        graph.replay()
        for got, expected in zip(outputs, leaves(call(x)), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("name", CASES)
def test_nothing_waits_for_the_device(name: str, device: torch.device) -> None:
    """Forward and backward, after a first call that loads kernels."""
    case = CASES[name]
    model = case.build(learnable=True).to(device)
    call, x = whole(model), case.signal(2).to(device).requires_grad_()

    def step() -> None:
        sum((y.square().sum() for y in leaves(call(x))), x.new_zeros(())).backward()

    step()
    torch.cuda.synchronize()
    with refusing_to_wait():
        step()


@pytest.mark.parametrize("name", CASES)
def test_compiled_training_step_equals_eager(name: str, device: torch.device) -> None:
    """One graph without breaks, forward and backward."""
    torch._dynamo.reset()
    case = CASES[name]
    model = case.build(learnable=True).to(device)
    call, x = whole(model), case.signal(2).to(device)
    results = []
    for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        leaf = x.clone().requires_grad_()
        outputs = leaves(function(leaf))
        loss = sum((y.square().sum() for y in outputs), x.new_zeros(()))
        results.append((outputs, torch.autograd.grad(loss, (leaf, *model.parameters()))))
    (got, got_gradients), (expected, expected_gradients) = results
    for a, b in zip(got, expected, strict=True):
        assert_same_here(name, a, b)
    for a, b in zip(got_gradients, expected_gradients, strict=True):
        assert_close(a.cpu(), b.cpu(), SUMS)


@pytest.mark.filterwarnings("ignore")
def test_a_model_is_compiled_by_torch(device: torch.device) -> None:
    """With torch's own code generator around our kernels."""
    torch._dynamo.reset()
    case = CASES["dau1997"]
    model, x = case.build().to(device), case.signal(2).to(device)
    with torch.no_grad():
        got = torch.compile(model, fullgraph=True)(x)
        for a, b in zip(leaves(got), leaves(model(x)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", EXACT)
def test_two_streams_do_not_meet(name: str, device: torch.device) -> None:
    """Calls on two streams at once, each on signals that its own stream has just made."""
    case = CASES[name]
    call = whole(case.build().to(device))
    signals = [case.signal(2).to(device) * scale for scale in (1.0, 0.3)]
    with torch.no_grad():
        expected = [leaves(call(x)) for x in signals]
        streams = [torch.cuda.Stream() for _ in signals]
        torch.cuda.synchronize()
        got: list[list[Tensor]] = [[], []]
        for _ in range(5):
            for k, (stream, x) in enumerate(zip(streams, signals, strict=True)):
                with torch.cuda.stream(stream):
                    got[k] = leaves(call(x.clone()))
    torch.cuda.synchronize()
    for mine, wanted in zip(got, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, wanted, strict=True))
