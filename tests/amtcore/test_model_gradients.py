"""Gradients of every model, by its input and each parameter, against differences of its output.

Central differences in float64 know nothing of adjoint kernels. Spikes are counts, whose gradient
is a surrogate: `test_lif` compares it with the slope of what it stands for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ..short import but, only
from .loudness_golden import one_thread  # noqa: F401
from .model_cases import CASES, FEW_CHANNELS, leaves

F64 = torch.float64
LOUDNESS = ("moore2016", "glasberg2002")
NAMES = [name for name in CASES if name != "lif_exodus"]
#: Short enough that few samples are within a step of a kink, long enough for cancellation.
STEP = 1e-7
#: What the step and the rounding of a loss near 10 leave.
ABSOLUTE = 1e-8
#: The start of the hair cell's pre-charging is forgotten 50 ms later.
FORGOTTEN = {"ihc.V_rest_raw"}


def _signal(name: str) -> Tensor:
    """Noise that falls by 30 dB, so that release follows attack.

    By more, and some component of a spectrum would be within a step of the 60 dB below the loudest
    where it is dropped.
    """
    samples, loud = (4000, 640) if name in LOUDNESS else (400, 200)
    x = CASES[name].signal(1, samples=samples, dtype=F64)
    x[..., loud:] *= 0.03
    return x


class _Loss:
    """Weighted sum and sum of squares of all outputs of a model, relative to their size."""

    def __init__(self, model: Any, x: Tensor) -> None:
        self._model = model
        with torch.no_grad():
            outputs = leaves(model(x))
        self._sizes = [y.square().mean().sqrt() for y in outputs]
        self._weights = [_normal(y, seed) for seed, y in enumerate(outputs)]

    def __call__(self, x: Tensor) -> Tensor:
        parts = zip(leaves(self._model(x)), self._weights, self._sizes, strict=True)
        return sum(
            ((w * y).mean() / size + y.square().mean() / size.square() for y, w, size in parts),
            x.new_zeros(()),
        )


def _normal(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype)


def _slope(loss: _Loss, x: Tensor, moved: Tensor, direction: Tensor) -> float:
    """Central difference of the loss as one of its tensors moves along a direction."""
    with torch.no_grad():
        moved += STEP * direction
        above = float(loss(x))
        moved -= 2 * STEP * direction
        below = float(loss(x))
        moved += STEP * direction
    return (above - below) / (2 * STEP)


@pytest.mark.parametrize("name", but(["jepsen2008", "king2019_resampled", "moore2016"], NAMES))
def test_slopes_along_a_direction_of_the_input_and_of_every_parameter(name: str) -> None:
    few = FEW_CHANNELS.get(name, {})
    model, x = CASES[name].build(learnable=True, dtype=F64, **few), _signal(name)
    loss, leaf = _Loss(model, x), x.clone().requires_grad_()
    loss(leaf).backward()
    moved = {"input": x, **{key: p.data for key, p in model.named_parameters()}}
    gradients = {"input": leaf.grad, **{key: p.grad for key, p in model.named_parameters()}}
    for key, value in moved.items():
        # A step of 1 in a parameter is a few times its constant, whatever the unit.
        size = CASES[name].rms if key == "input" else 1.0
        direction = size * _normal(value, 100)
        gradient = float((gradients[key] * direction).sum())
        assert gradient == pytest.approx(
            _slope(loss, x, value, direction), rel=1e-5, abs=ABSOLUTE
        ), key
        assert (abs(gradient) > 100 * ABSOLUTE) == (key not in FORGOTTEN), key


# The test above has a direction of the input of each model.
@pytest.mark.parametrize(
    "name", only(["dau1997"], [name for name in NAMES if name not in LOUDNESS])
)
def test_gradcheck_of_the_input(name: str) -> None:
    """A dozen mixtures of all outputs by every sample; loudness has too many samples a frame."""
    case = CASES[name]
    model, unit = case.build(dtype=F64), case.signal(1, samples=25, dtype=F64) / case.rms

    def outputs(unit: Tensor) -> Tensor:
        return torch.cat([y.flatten() for y in leaves(model(case.rms * unit))])

    with torch.no_grad():
        y = outputs(unit)
        mixtures = _normal(y.new_empty(12, len(y)), 1) / y.norm()

    def call(unit: Tensor) -> Tensor:
        return mixtures @ outputs(unit)

    assert torch.autograd.gradcheck(call, (unit.requires_grad_(),), eps=STEP, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in LOUDNESS])
def test_extremes_have_finite_gradients(name: str) -> None:
    """Silence, denormals and a clipped signal at 140 dB SPL; loudness has more of its own."""
    model, case = CASES[name].build(learnable=True), CASES[name]
    square = 200.0 * torch.sign(case.signal(1, samples=300))
    for x in (0.0 * square, 1e-41 * torch.sign(square), square):
        leaf = x.requires_grad_()
        model.zero_grad()
        outputs = leaves(model(leaf))
        sum(y.sum() for y in outputs).backward()
        assert all(torch.isfinite(y).all() for y in outputs)
        assert torch.isfinite(leaf.grad).all()
        for key, parameter in model.named_parameters():
            assert torch.isfinite(parameter.grad).all(), key
