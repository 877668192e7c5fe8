"""Learning is stable: constants stay within bounds, outputs finite, whatever the optimiser does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from amtcore import AdaptLoop
from amtcore.stages.constants import (
    DECIBELS,
    HasConstants,
    Limit,
    Range,
    StableDenominator,
    around,
    frequencies,
)
from tests.short import some

from ..compare import Tolerance, assert_close
from ..short import only
from .constant_cases import BANDS, CASES, FS, Case, constants
from .loudness_golden import one_thread  # noqa: F401

NOTHING_TO_LEARN = ("Resampler", "Moore2016Spectrum", "MultiResolutionFFT")
LEARNERS = [name for name in CASES if name not in NOTHING_TO_LEARN]
#: Those whose step takes a few milliseconds, and the model of the documentation's example.
QUICK = (
    "AdaptLoop", "BrokenStickCompression", "PowerCompression", "SquaringExpansion",
    "ButterworthFilter", "GammatoneFilterbank", "IHCEnvelope", "IHCPaulick2024",
    "ModulationFilterbank", "ERBIntegration", "ExcitationPattern", "SpecificLoudness",
    "LoudnessIntegration", "Moore2016AGC", "Moore2016BinauralLoudness", "HeadphoneFilter",
    "MiddleEarFilter", "OuterMiddleEarFilter", "LoudnessEar", "LIFExodus", "Dau1997",
)  # fmt: skip
STAGES = [name for name in LEARNERS if issubclass(CASES[name].kind, HasConstants)]
LIMITS: dict[str, Limit] = {
    "around": around(2e-8),
    "decibels": DECIBELS,
    "frequencies": frequencies(16000),
    "closed": Range(0.0, 1.0),
    "scaled": Range(-10.0, 10.0, 0.05),
}
F64 = torch.float64


def _learn(case: Case, rate: float, steps: int) -> nn.Module:
    """Adam drives all outputs towards 0."""
    model = case.build(learnable=True)
    with torch.no_grad():
        sizes = [y.square().mean().clamp(min=1e-30) for y in case.outputs(model)]
    optimiser = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
    for _ in range(steps):
        optimiser.zero_grad()
        outputs = case.outputs(model)
        loss = sum(
            (y.square().mean() / size for y, size in zip(outputs, sizes, strict=True)),
            torch.zeros(()),
        )
        loss.backward()
        optimiser.step()
    assert math.isfinite(float(loss.detach()))
    return model


def _bounds(limit: Limit, value: Tensor) -> bool:
    """Whether a value is one of those that a constant may have."""
    if isinstance(limit, Range):
        ends = torch.tensor([limit.lowest, limit.highest]).to(value)
        return bool(((value >= ends[0]) & (value <= ends[1])).all())
    poles = torch.tensor(_roots(value.tolist()))
    return bool((poles.abs() < 1.0).all())


def _roots(a: list[float]) -> list[complex]:
    if len(a) == 2:
        return [-a[1] / a[0]]
    root = complex(a[1] ** 2 - 4 * a[0] * a[2]) ** 0.5
    return [(-a[1] + root) / (2 * a[0]), (-a[1] - root) / (2 * a[0])]


def _assert_stable(case: Case, model: nn.Module) -> None:
    for key, stage, name in constants(model):
        value = getattr(stage, name).detach()
        assert torch.isfinite(value).all() and _bounds(stage.limit_of(name), value), key
    model.zero_grad()
    outputs = case.outputs(model)
    sum((y.sum() for y in outputs), torch.zeros(())).backward()
    assert all(torch.isfinite(y).all() for y in outputs)
    for key, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all(), key
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), key


@pytest.mark.parametrize("name", NOTHING_TO_LEARN)
def test_these_have_no_parameter(name: str) -> None:
    assert list(CASES[name].build(learnable=True).parameters()) == []


@pytest.mark.long  # the next tests go as far and farther in larger steps
@pytest.mark.parametrize("name", QUICK)
def test_a_thousand_steps_at_the_usual_rate(name: str) -> None:
    _assert_stable(CASES[name], _learn(CASES[name], 1e-3, 1000))


# In `make test` each class is in one of these two tests.
@pytest.mark.parametrize("name", only(QUICK[::2], LEARNERS))
def test_as_far_in_fewer_and_larger_steps(name: str) -> None:
    """Adam moves a parameter by up to rate times steps: as far as a thousand steps of 1e-3."""
    _assert_stable(CASES[name], _learn(CASES[name], 0.05, 20))


@pytest.mark.parametrize("name", only(QUICK[1::2], LEARNERS))
def test_steps_a_hundred_times_too_large(name: str) -> None:
    _assert_stable(CASES[name], _learn(CASES[name], 0.1, 20))


@pytest.mark.parametrize("end", [-1e4, 1e4], ids=["lowest", "highest"])
@pytest.mark.parametrize("name", some(3, STAGES))
def test_every_constant_on_its_bound(name: str, end: float) -> None:
    """One constant after another at its very end, the others as they are."""
    case = CASES[name]
    for key, _, _ in constants(case.build(learnable=True)):
        model = case.build(learnable=True)
        with torch.no_grad():
            model.get_parameter(f"{key}_raw").fill_(end)
        _assert_stable(case, model)


@pytest.mark.parametrize("name", LIMITS)
def test_a_range_is_inverted_and_never_left(name: str) -> None:
    limit = LIMITS[name]
    assert isinstance(limit, Range)
    share = torch.tensor([1e-6, 0.1, 0.5, 0.9], dtype=F64)
    values = limit.lowest + (limit.highest - limit.lowest) * share
    raw = limit.raw(values).requires_grad_()
    assert_close(limit.value(raw).detach(), values, Tolerance(1e-12, "rounding"), name)
    span = limit.highest - limit.lowest
    assert torch.autograd.gradcheck(lambda r: limit.value(r) / span, (raw,), atol=1e-9)
    ends = limit.value(torch.tensor([-math.inf, -1e30, 1e30, math.inf], dtype=F64))
    assert ends.tolist() == [limit.lowest, limit.lowest, limit.highest, limit.highest]
    bounds = torch.tensor([limit.lowest, limit.highest], dtype=F64)
    assert torch.isfinite(limit.raw(bounds)).all() and torch.equal(
        limit.within(limit.value(limit.raw(bounds))), bounds
    )


@pytest.mark.parametrize("a", [[1.0, -0.87], [2.0, 1.2], [1.0, -1.7991, 0.8178], [0.5, 0.4, 0.3]])
def test_a_denominator_is_inverted_and_stays_stable(a: list[float]) -> None:
    limit = StableDenominator()
    value = torch.tensor(a, dtype=F64)
    limit.check("a", value)
    raw = limit.raw(value).requires_grad_()
    assert_close(limit.value(raw).detach(), value, Tolerance(1e-12, "rounding"))
    assert torch.autograd.gradcheck(limit.value, (raw,))
    for far in torch.cartesian_prod(*([torch.tensor([-1e4, 0.3, 1e4], dtype=F64)] * len(a))):
        assert max(abs(root) for root in _roots(limit.value(far).tolist())) < 1.0
        limit.check("a", limit.value(far))


@pytest.mark.parametrize("raw", [[0.3, -1.2], [-2.0, 0.4, 1.7], [4.0, -3.0, -0.1]])
def test_the_gradient_by_a_denominator_follows_that_by_its_raw_values(raw: list[float]) -> None:
    limit, at = StableDenominator(), torch.tensor(raw, dtype=F64)
    slopes = torch.autograd.functional.jacobian(limit.value, at)
    of_value = torch.arange(1.0, len(raw) + 1, dtype=F64)
    got = limit.gradient(at, slopes.T @ of_value)
    assert_close(got, of_value, Tolerance(1e-9, "rounding of small slopes"))
    held = at.index_fill(0, torch.tensor(1), 40.0)
    assert torch.isfinite(limit.gradient(held, of_value)).all()
    assert limit.gradient(held, of_value)[1] == 0.0


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_hard_limiter_has_gradients_below_its_onset(backend: str) -> None:
    """With an overshoot of 0.006 its exponential overflows float32 where the limiter is off."""
    stage = AdaptLoop(FS, limit=1.96, learnable=True, backend=backend)
    x = BANDS[..., :60].clone()
    x[..., 30:] = 0.0
    leaf = x.requires_grad_()
    y = stage(leaf)
    y.square().sum().backward()
    assert torch.isfinite(y).all() and torch.isfinite(leaf.grad).all()
    for key, parameter in stage.named_parameters():
        assert torch.isfinite(parameter.grad).all() and parameter.grad.any(), key
