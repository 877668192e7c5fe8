"""Lower skirts of the ear's filters: the kernel against the plain formula, and its gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amtcore.errors import BackendError, ShapeError
from amtcore.kernels.operations.lower_skirt import ITEM_FRAMES, LOWER_SKIRT
from amtcore.kernels.operators import operator

from ..compare import Tolerance, assert_close
from .compiling import one_graph

lower_skirt = operator(LOWER_SKIRT)

DTYPES = {
    "float32": (torch.float32, Tolerance(1e-6, "other summation order", 1e-9)),
    "float64": (torch.float64, Tolerance(1e-13, "other summation order", 1e-15)),
}
FRAMES = ITEM_FRAMES + 3
Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _case(dtype: torch.dtype = torch.float64, frames: int = FRAMES, components: int = 101) -> Case:
    """Some components missing, some filters below, between, exactly at and above components."""
    generator = torch.Generator().manual_seed(0)
    f_hz = 100.0 * torch.arange(1, components + 1, dtype=dtype)
    fc_hz = torch.tensor([50.0, 100.0, 101.0, 950.0, 3000.0, 3333.0, 20000.0], dtype=dtype)
    shape = (frames, components)
    intensity = torch.rand(shape, generator=generator, dtype=dtype)
    intensity = intensity * (torch.rand(shape, generator=generator) > 0.4)
    slope = 0.2 + torch.rand(shape, generator=generator, dtype=dtype)
    return intensity, slope, 4.0 / (25.0 + 0.1 * fc_hz), fc_hz, f_hz


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_equals_plain_formula(dtype: str) -> None:
    kind, tolerance = DTYPES[dtype]
    case = _case(kind)
    assert_close(lower_skirt(*case), lower_skirt(*case, backend="reference"), tolerance)


def test_one_component_by_hand() -> None:
    """1 kHz into filters at 1.2, 1.0 and 0.9 kHz: only the first one is above it."""
    fc_hz, rate = torch.tensor([900.0, 1000.0, 1200.0]), torch.tensor([0.03, 0.03, 0.02])
    one, f_hz = torch.ones(1, 1), torch.tensor([1000.0])
    got = lower_skirt(2.0 * one, 0.5 * one, rate, fc_hz, f_hz)
    assert got[0, :2].tolist() == [0.0, 0.0]
    assert float(got[0, 2]) == pytest.approx(2.0 * (1 + 2.0) * 2.718281828**-2.0, rel=1e-6)


def test_a_frame_does_not_depend_on_its_neighbours() -> None:
    case = _case(torch.float32)
    together = lower_skirt(*case)
    for n in (0, 1, FRAMES - 1):
        alone = lower_skirt(case[0][n : n + 1], case[1][n : n + 1], *case[2:])
        assert torch.equal(alone[0], together[n])


def test_nothing_gives_nothing() -> None:
    intensity, *rest = _case()
    assert lower_skirt(torch.zeros_like(intensity), *rest).abs().max() == 0.0
    assert lower_skirt(intensity[:0], rest[0][:0], *rest[1:]).shape == (0, 7)


def test_gradcheck() -> None:
    intensity, slope, rate, fc_hz, f_hz = _case(frames=2, components=7)
    leaves = tuple(v.clone().requires_grad_() for v in (intensity + 0.1, slope, rate))
    assert torch.autograd.gradcheck(lambda *a: lower_skirt(*a, fc_hz, f_hz), leaves, eps=1e-6)


def test_adjoint_equals_autograd_through_the_plain_formula() -> None:
    gradients = []
    for backend in ("cpu", "reference"):
        intensity, slope, rate, fc_hz, f_hz = _case()
        leaves = [v.clone().requires_grad_() for v in (intensity, slope, rate)]
        y = lower_skirt(*leaves, fc_hz, f_hz, backend=backend)
        y.square().sum().backward()
        # What is not there gets no gradient from the kernel.
        leaves[0].grad[intensity == 0] = 0.0
        gradients.append([leaf.grad for leaf in leaves])
    for got, expected in zip(*gradients, strict=True):
        assert_close(got, expected, Tolerance(1e-12, "float64 gradients by two routes"))


def test_compiled_equals_eager() -> None:
    case = _case(torch.float32)
    compiled = one_graph(lower_skirt)
    assert torch.equal(compiled(*case), lower_skirt(*case))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda i, s, *r: (i[:, :5], s, *r), ShapeError, "components"),
        (lambda i, s, *r: (i, s[:1], *r), ShapeError, "components"),
        (lambda i, s, r, *f: (i, s, r[:2], *f), ShapeError, "one rate a filter"),
        (lambda i, s, *r: (i.float(), s, *r), ShapeError, "share one dtype"),
    ],
)
def test_wrong_input_is_named(
    change: Callable[..., tuple], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lower_skirt(*change(*_case()))
    with pytest.raises(BackendError, match="backend must be one of"):
        lower_skirt(*_case(), backend="fpga")
