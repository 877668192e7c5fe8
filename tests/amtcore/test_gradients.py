"""Hand-written adjoints of the recurrences: gradcheck in float64, and the plain loop's autograd.

Other families have theirs beside their other tests: fir in `test_ears`, lif in `test_lif`, roex in
`test_loudness_skirts`, attack_release in its own file; models are in `test_model_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amtcore import DRNLFilterbank
from amtcore.kernels.operators import can_fuse, modulation_bank, rest_state, run_fused, run_ops

from ..compare import Tolerance, assert_close
from ..short import but
from .test_recurrences import CASES

#: Banks whose plain loop takes seconds; `test_gradcheck_of_a_bank` stays.
SLOW = ("modulation_bank", "two_sections_bank")
GRADIENT = Tolerance(1e-10, "float64 gradients by two routes", 1e-12)


def _small(case: str) -> tuple[tuple[Tensor, ...], Callable[..., tuple[Tensor, Tensor]]]:
    """Few channels and samples, away from kinks of rectifier and floor."""
    x, coef, state, run = CASES[case](torch.float64)
    x = x[:1, :2, :6]
    x = torch.where(x.abs() < 0.05, 0.1, x)
    return (x, coef[:2], state[:1, :2]), run


# A bank's filters cut across channels; banks have a test of their own below.
@pytest.mark.parametrize("case", [name for name in CASES if "bank" not in name])
def test_gradcheck(case: str) -> None:
    inputs, run = _small(case)
    leaves = tuple(value.clone().requires_grad_() for value in inputs)
    assert torch.autograd.gradcheck(lambda *a: run(*a), leaves, eps=1e-7, atol=1e-5, rtol=1e-4)


def _gradients(case: str, backend: str, chunked: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    x, coef, state, run = CASES[case](torch.float64)
    # Time steps of the plain loop are nodes of a graph, and so are the filters of a bank.
    if "bank" in case:  # one clip, a step more than a block
        x, state = x[:1, ..., :129], state[:1]
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


@pytest.mark.parametrize("case", but(SLOW, CASES))
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


#: Kinds of modulation filter (low-pass, real part, modulus twice; two sections) and offsets.
BANKS = {"one_pole": ([0, 1, 2, 2], [0, 2, 6]), "two_sections": ([4, 4], [0, 1, 3])}


@pytest.mark.parametrize("bank", BANKS)
def test_gradcheck_of_a_bank(bank: str) -> None:
    kinds, offsets = BANKS[bank]
    sections = 2 if bank == "two_sections" else 1
    coef = 0.1 + 0.5 * torch.rand(offsets[-1], 6 * sections, dtype=torch.float64)
    x = torch.randn(2, 2, 4, dtype=torch.float64)
    state = 1.0 + torch.rand(2, offsets[-1], 2 * sections, dtype=torch.float64)
    leaves = tuple(value.requires_grad_() for value in (x, coef, state))
    assert torch.autograd.gradcheck(lambda *a: modulation_bank(*a, kinds, offsets), leaves)


def test_fused_operations_refuse_a_gradient() -> None:
    """Stages do not use them where one is asked for; a gradient of zero would go unnoticed."""
    bank = DRNLFilterbank([500.0, 1000.0], 16000, dtype=torch.float64)
    x = torch.randn(1, 1, 20, dtype=torch.float64, requires_grad=True)
    ops = bank.block_ops(bank.num_channels)
    state = torch.zeros(1, 2, sum(op.state.shape[1] for op in ops), dtype=torch.float64)
    assert not can_fuse(x, ops)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        run_fused(x, ops, state)[0].sum().backward()


def test_a_gradient_goes_back_through_the_state_alone() -> None:
    """A chunk of silence after a signal wants no gradient of its own."""
    bank = DRNLFilterbank([500.0, 1000.0], 16000, dtype=torch.float64)
    ops, x = bank.block_ops(2), torch.zeros(1, 1, 20, dtype=torch.float64)
    rest = rest_state(ops, 1)
    state = (1e-6 * torch.rand(rest.shape, dtype=torch.float64)).requires_grad_()
    assert can_fuse(x, ops) and not can_fuse(x, ops, state)
    y, after = run_ops(x, ops, state)
    (y.sum() + after.sum()).backward()
    plain = state.detach().clone().requires_grad_()
    y, after = run_ops(x, ops, plain, backend="reference")
    (y.sum() + after.sum()).backward()
    assert_close(state.grad, plain.grad, GRADIENT)
