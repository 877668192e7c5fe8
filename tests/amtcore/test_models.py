"""Dau1997 as a module: shapes, chunks, batches, precision, serialisation, compilation."""

from __future__ import annotations

import pickle
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amtcore import Dau1997

from ..compare import FLOAT32_MODULATION, assert_close

FS = 16000


def _signal(seconds: float = 0.1, batch: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return 0.05 * torch.randn(batch, int(FS * seconds), generator=generator)


MODEL = Dau1997(FS)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, 1600), max_size=6))
def test_chunks_equal_the_whole(cuts: list[int]) -> None:
    x, state, parts = _signal(), None, []
    edges = [0, *sorted(cuts), x.shape[-1]]
    for begin, end in pairwise(edges):
        out, state = MODEL.stream(x[:, begin:end], state)
        parts.append(torch.cat(out, 1))
    assert torch.equal(torch.cat(parts, -1), torch.cat(MODEL(x), 1))


def test_one_clip_equals_its_place_in_a_batch() -> None:
    x = _signal(batch=3)
    together = torch.cat(MODEL(x), 1)
    for i in range(3):
        assert torch.equal(torch.cat(MODEL(x[i]), 0), together[i])


def test_float32_against_float64() -> None:
    x = _signal(0.5)
    single, double = MODEL(x), Dau1997(FS, dtype=torch.float64)(x.double())
    assert_close(torch.cat(single, 1), torch.cat(double, 1), FLOAT32_MODULATION)


def test_stages_and_repr() -> None:
    model = Dau1997(FS, return_stages=True)
    out, stages = model(_signal())
    assert list(stages) == ["filterbank", "ihc", "adaptation"]
    assert all(stage.shape == (2, 31, 1600) for stage in stages.values())
    assert torch.equal(torch.cat(out, 1), torch.cat(model.modulation(stages["adaptation"]), 1))
    assert "num_channels=31" in repr(model) and "preset=dau1997" in repr(model)
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


@pytest.mark.parametrize("copy", ["pickle", "state_dict", "double_and_back"])
def test_copies_compute_the_same(copy: str) -> None:
    model = Dau1997(FS, learnable=copy == "state_dict")
    if copy == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    elif copy == "state_dict":
        twin = Dau1997(FS, learnable=True)
        twin.load_state_dict(model.state_dict())
    else:
        twin = Dau1997(FS).double().float()
        assert twin.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(torch.cat(twin(_signal()), 1), torch.cat(model(_signal()), 1))


def test_compiled_equals_eager() -> None:
    compiled = torch.compile(MODEL, fullgraph=True, backend="aot_eager")
    x = _signal(0.05)
    assert torch.equal(torch.cat(compiled(x), 1), torch.cat(MODEL(x), 1))


def test_reference_backend_agrees() -> None:
    x = _signal(0.02, 1)
    slow = Dau1997(FS)
    for stage in (slow.filterbank, slow.ihc, slow.adaptation, slow.modulation):
        stage.backend = "reference"
    assert_close(torch.cat(slow(x), 1), torch.cat(MODEL(x), 1), FLOAT32_MODULATION)
