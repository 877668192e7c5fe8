"""Learning: models whose constants were moved away find them again from the outputs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amtcore import Dau1997, King2019, Paulick2024

from ..short import only
from .model_cases import leaves

FS = 16000
STEPS = 30
F64 = torch.float64

#: By model: how it is built, RMS of its input, and the factors that its constants are off by.
RECOVERIES: dict[str, tuple[Any, float, Mapping[str, float]]] = {
    "dau1997": (
        lambda **options: Dau1997(FS, 400.0, 800.0, dtype=F64, **options),
        0.03,
        {
            "filterbank.fc": 1.03,
            "filterbank.bandwidth": 1.2,
            "adaptation.tau": 1.3,
            "modulation.bandwidth_hz": 1.3,
        },
    ),
    "king2019": (
        lambda **options: King2019(FS, basef=1000.0, phase_insens="none", dtype=F64, **options),
        0.03,
        {
            "filterbank.bandwidth": 1.2,
            "compression.n": 1.3,
            "compression.knee_db": 1.2,
            "modulation_filterbank.qfactor": 0.8,
        },
    ),
    "paulick2024": (
        lambda **options: Paulick2024(
            FS, 400.0, 1000.0, 3, outerear_kwargs={"order": 64}, dtype=F64, **options
        ),
        0.2,
        {"drnl.c": 1.1, "drnl.nlin_bw": 1.2, "ihc.x0": 0.8, "adaptation.tau": 1.3},
    ),
}


def _bursts(rms: float) -> Tensor:
    """Noise that is switched on and off four times in 0.2 s."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 3200, generator=generator, dtype=F64)
    gate = (torch.arange(3200) // 400 % 2).to(F64)
    return rms * noise * (0.05 + gate)


def _output(model: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([y.flatten() for y in leaves(model(x))])


def _perturb(model: nn.Module, factors: Mapping[str, float]) -> list[nn.Parameter]:
    """Multiply constants by factors; returns what the optimiser sees of them."""
    for name, factor in factors.items():
        stage_name, _, constant = name.rpartition(".")
        stage = model.get_submodule(stage_name)
        setattr(stage, constant, factor * getattr(stage, constant).detach())
    return [model.get_parameter(f"{name}_raw") for name in factors]


@pytest.mark.parametrize("name", only(["dau1997"], RECOVERIES))
def test_perturbed_parameters_are_recovered(name: str) -> None:
    build, rms, factors = RECOVERIES[name]
    true, model, x = build(), build(learnable=True), _bursts(rms)
    goal, target = true.state_dict(), _output(true, x)
    learnt = _perturb(model, factors)

    def distances() -> dict[str, float]:
        """How far each constant is off, as the logarithm of a factor; a band of 0 Hz stays one."""
        now = {key: model.state_dict()[key] for key in factors}
        return {
            key: float((value / goal[key])[goal[key] > 0].log().abs().mean())
            for key, value in now.items()
        }

    before, losses = distances(), []
    optimiser = torch.optim.Adam(learnt, lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, STEPS)
    for _ in range(STEPS):
        optimiser.zero_grad()
        loss = (_output(model, x) - target).square().mean() / target.square().mean()
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]
    after = distances()
    assert {key: after[key] < 0.5 * before[key] for key in factors} == dict.fromkeys(factors, True)
