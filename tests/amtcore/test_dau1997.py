"""Dau1997: its stages and the arguments that reach them; `test_model_suite` has the rest."""

from __future__ import annotations

import torch

from amtcore import Dau1997

FS = 16000


def _signal() -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return 0.05 * torch.randn(2, 1600, generator=generator)


def test_stages_are_those_of_the_interface() -> None:
    model = Dau1997(FS, return_stages=True)
    out, stages = model(_signal())
    assert list(stages) == ["filterbank", "ihc", "adaptation"]
    assert all(stage.shape == (2, 31, 1600) for stage in stages.values())
    assert torch.equal(torch.cat(out, 1), torch.cat(model.modulation(stages["adaptation"]), 1))
    assert model.distribute_gradients() is None


def test_kwargs_reach_their_stages() -> None:
    model = Dau1997(
        FS,
        filterbank_kwargs={"n": 6},
        ihc_kwargs={"method": "lindemann"},
        adaptation_kwargs={"limit": 5.0, "tau": [0.01, 0.1, 0.2, 0.4, 0.8]},
        modulation_kwargs={"Q": 1.0, "max_mfc": 200.0, "filter_type": "butterworth"},
    )
    assert model.filterbank.n == 6 and model.ihc.cutoff == 800.0
    assert float(model.adaptation.limit) == 5.0 and model.adaptation.tau[-1] == 0.8
    assert model.modulation.mfc[0][-1] <= 200.0 and model.modulation.mfc[0].numel() < 8
    assert torch.isfinite(torch.cat(model(_signal()), 1)).all()
