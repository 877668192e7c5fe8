"""Hand-written adjoints: gradcheck in float64, the plain loop's autograd, and learning."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amtcore import Dau1997

from ..compare import Tolerance, assert_close
from .test_recurrences import CASES

GRADIENT = Tolerance(1e-10, "float64 gradients by two routes", 1e-12)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _small(case: str) -> tuple[tuple[Tensor, ...], Callable[..., tuple[Tensor, Tensor]]]:
    """Few channels and samples, away from kinks of rectifier and floor."""
    x, coef, state, run = CASES[case](torch.float64)
    x = x[:1, :3, :7]
    x = torch.where(x.abs() < 0.05, 0.1, x)
    return (x, coef[:3], state[:1, :3]), run


# A bank's filters cut across channels; banks are compared with the plain loop below.
@pytest.mark.parametrize("case", [name for name in CASES if "bank" not in name])
def test_gradcheck(case: str) -> None:
    inputs, run = _small(case)
    leaves = tuple(value.clone().requires_grad_() for value in inputs)
    assert torch.autograd.gradcheck(lambda *a: run(*a), leaves, eps=1e-7, atol=1e-5, rtol=1e-4)


def _gradients(case: str, backend: str, chunked: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    x, coef, state, run = CASES[case](torch.float64)
    leaves = [value.clone().requires_grad_() for value in (x, coef, state)]
    if chunked:
        first, middle = run(leaves[0][..., :100], *leaves[1:], backend=backend)
        second, last = run(leaves[0][..., 100:], leaves[1], middle, backend=backend)
        y = torch.cat((first, second), -1)
    else:
        y, last = run(*leaves, backend=backend)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    ((y * weight).sum() + last.square().sum()).backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("case", CASES)
def test_adjoint_equals_autograd_through_the_plain_loop(case: str) -> None:
    for name, got, expected in zip(
        ("x", "coef", "state"), _gradients(case, "cpu"), _gradients(case, "reference"), strict=True
    ):
        assert_close(got, expected, GRADIENT, f"{case} {name}")


@pytest.mark.parametrize("case", CASES)
def test_gradients_flow_through_the_carried_state(case: str) -> None:
    for got, expected in zip(
        _gradients(case, "cpu", chunked=True), _gradients(case, "cpu"), strict=True
    ):
        assert_close(got, expected, GRADIENT, case)


def test_model_gradients_reach_every_parameter_and_the_input() -> None:
    model = Dau1997(16000, fhigh=1000.0, learnable=True, dtype=torch.float64)
    x = (0.05 * torch.randn(2, 400, dtype=torch.float64)).requires_grad_()
    torch.cat(model(x), 1).square().mean().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all() and x.grad.abs().max() > 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


def test_directional_derivative_of_the_model() -> None:
    model = Dau1997(16000, flow=300.0, fhigh=900.0, dtype=torch.float64)
    x = 0.05 * torch.randn(1, 300, dtype=torch.float64)
    direction = torch.randn_like(x)

    def loss(signal: Tensor) -> Tensor:
        return torch.cat(model(signal), 1).square().mean()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    step = 1e-7
    difference = (loss(x + step * direction) - loss(x - step * direction)) / (2 * step)
    assert float((leaf.grad * direction).sum()) == pytest.approx(float(difference), rel=1e-5)


def test_compiled_training_step_equals_eager() -> None:
    gradients = []
    for compiled in (False, True):
        model = Dau1997(16000, fhigh=1000.0, learnable=True)
        call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        x = 0.05 * torch.sin(torch.arange(400.0) / 3).repeat(2, 1)
        torch.cat(call(x), 1).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for got, expected in zip(*gradients, strict=True):
        assert_close(got, expected, Tolerance(1e-5, "float32 reductions in another order"))
