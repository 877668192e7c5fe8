"""Attack and release: the kernel against the plain loop, chunks, gradients, and what it is for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from amtcore.errors import BackendError, ParameterError, ShapeError
from amtcore.kernels.operations.attack_release import ATTACK_RELEASE
from amtcore.kernels.operators import operator
from amtcore.stages import LoudnessIntegration, Moore2016AGC, Moore2016TemporalIntegration

from ..compare import KERNEL32, KERNEL64, Tolerance, assert_close
from .compiling import one_graph

attack_release = operator(ATTACK_RELEASE)

GRADIENT = Tolerance(1e-10, "float64 gradients by two routes", 1e-12)
DTYPES = {"float32": (torch.float32, KERNEL32), "float64": (torch.float64, KERNEL64)}
# More than one group of lanes, and a single channel.
SIZES = {"37 channels": (2, 50, 37), "1 channel": (3, 20, 1)}


def _case(size: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    batch, frames, channels = SIZES[size]
    x = torch.rand(batch, frames, channels, generator=generator, dtype=dtype)
    coef = 0.05 + 0.5 * torch.rand(channels, 2, generator=generator, dtype=dtype)
    state = torch.rand(batch, channels, generator=generator, dtype=dtype)
    return x, coef, state


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_kernel_equals_plain_loop(size: str, dtype: str) -> None:
    kind, tolerance = DTYPES[dtype]
    x, coef, state = _case(size, kind)
    before = state.clone()
    y, after = attack_release(x, coef, state, backend="cpu")
    expected, expected_after = attack_release(x, coef, state, backend="reference")
    assert_close(y, expected, tolerance)
    assert_close(after, expected_after, tolerance)
    assert torch.equal(state, before), "the caller's state must not change"


@pytest.mark.parametrize("cut", [0, 1, 25, 49, 50])
def test_two_chunks_equal_the_whole_exactly(cut: int) -> None:
    x, coef, state = _case("37 channels", torch.float32)
    whole, last = attack_release(x, coef, state)
    first, middle = attack_release(x[:, :cut], coef, state)
    second, after = attack_release(x[:, cut:], coef, middle)
    assert torch.equal(torch.cat((first, second), 1), whole)
    assert torch.equal(after, last)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradcheck(backend: str) -> None:
    x, coef, state = _case("37 channels")
    leaves = tuple(v.clone().requires_grad_() for v in (x[:1, :6, :3], coef[:3], state[:1, :3]))
    assert torch.autograd.gradcheck(
        lambda *a: attack_release(*a, backend=backend), leaves, eps=1e-7, atol=1e-6
    )


@pytest.mark.parametrize("size", SIZES)
def test_adjoint_equals_autograd_through_the_plain_loop(size: str) -> None:
    gradients = []
    for backend in ("cpu", "reference"):
        leaves = [value.requires_grad_() for value in _case(size)]
        y, last = attack_release(*leaves, backend=backend)
        (y.sin().sum() + last.square().sum()).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for got, expected in zip(*gradients, strict=True):
        assert_close(got, expected, GRADIENT)


def test_compiled_equals_eager() -> None:
    case = _case("37 channels")
    compiled = one_graph(attack_release)
    for got, expected in zip(compiled(*case), attack_release(*case), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x, c, s: (x[0], c, s), ShapeError, "expected input"),
        (lambda x, c, s: (x, c[:, :1], s), ShapeError, "coefficients"),
        (lambda x, c, s: (x, c, s[:1]), ShapeError, "expected a state of shape"),
        (lambda x, c, s: (x.float(), c, s), ShapeError, "share one dtype"),
    ],
)
def test_wrong_input_is_named(
    change: Callable[..., tuple], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        attack_release(*change(*_case("37 channels")))
    with pytest.raises(BackendError, match="backend must be one of"):
        attack_release(*_case("37 channels"), backend="fpga")


def test_step_up_and_down_follow_the_closed_form() -> None:
    agc = Moore2016AGC(attack_alpha=0.045, release_alpha=0.033, dtype=torch.float64)
    x = torch.cat((torch.ones(1, 100), torch.zeros(1, 200)), 1)
    n = np.arange(1, 201)
    rise = 1 - 0.955 ** n[:100]
    expected = np.concatenate((rise, rise[-1] * 0.967**n))
    assert_close(agc(x)[0], expected, KERNEL64)


def test_a_steady_input_stays_once_reached() -> None:
    x, rest = torch.full((1, 20), 3.7), torch.full((1, 1), 3.7)
    y, after = Moore2016AGC().stream(x, rest)
    assert torch.equal(y, x) and torch.equal(after, rest)


@pytest.mark.parametrize("stage", [Moore2016AGC, Moore2016TemporalIntegration])
def test_time_constants_do_not_depend_on_the_hop(stage: type[Moore2016AGC]) -> None:
    """Every fourth frame of 1 ms equals every frame of 4 ms, for an input that only rises."""
    fine = stage(dtype=torch.float64)(torch.ones(1, 400))[:, 3::4]
    coarse = stage(hop_length=128, dtype=torch.float64)(torch.ones(1, 100))
    assert_close(coarse, fine, KERNEL64)


def test_loudness_integration_has_the_published_rates() -> None:
    stage = LoudnessIntegration(erb_step=1.0, dtype=torch.float64)
    short, long = stage(torch.cat((torch.full((1, 300, 1), 0.5), torch.zeros(1, 300, 1)), 1))
    plain_short = plain_long = 0.0
    for t, now in enumerate([1.0] * 300 + [0.0] * 300):
        rate = 0.045 if now > plain_short else 0.02
        plain_short += rate * (now - plain_short)
        plain_long += (0.01 if plain_short > plain_long else 0.0005) * (plain_short - plain_long)
        assert float(short[0, t]) == pytest.approx(plain_short, rel=1e-9)
        assert float(long[0, t]) == pytest.approx(plain_long, rel=1e-9)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Moore2016AGC(attack_alpha=0.0), "attack_alpha must be .* between 0 and 1"),
        (lambda: Moore2016AGC(release_alpha=1.0), "release_alpha must be .* between 0 and 1"),
        (
            lambda: LoudnessIntegration(tau_attack=0.0),
            "tau_attack must be .* in seconds",
        ),
        (lambda: LoudnessIntegration(ltl_tau_release=-1.0), "ltl_tau_release must be .* above 0"),
    ],
)
def test_impossible_rates_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build()
