"""One channel's output saved alone is as large as it is, and its values are those of the bank."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor

from amtcore import Dau1997, ModulationFilterbank, Moore2016, Osses2021, Paulick2024
from amtcore.kernels.operators import modulation_bank
from amtcore.stages.modulation import can_separate

from ..short import spread
from .compiling import one_graph

FS = 16000
MODELS = {
    "dau1997": lambda **k: Dau1997(FS, 300.0, 1500.0, **k),
    "osses2021": lambda **k: Osses2021(FS, 300.0, 1500.0, **k),
    "paulick2024": lambda **k: Paulick2024(FS, 300.0, 1500.0, 5, **k),
}


def _saved_bytes(value: Tensor) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def _noise(*shape: int) -> Tensor:
    return 0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "batch", "learnable"), spread(3, MODELS, [None, 1, 3], [False, True])
)
def test_a_saved_channel_is_as_large_as_it_is(
    name: str, batch: int | None, learnable: bool
) -> None:
    model = MODELS[name](learnable=learnable)
    x = _noise(*(() if batch is None else (batch,)), 4000)
    for outputs in (model(x), model.stream(x)[0]):
        for channel in (outputs[0], outputs[-1]):
            assert channel.untyped_storage().nbytes() == channel.nbytes
            assert _saved_bytes(channel.detach()) < channel.nbytes + 3000


def test_a_saved_ear_is_as_large_as_it_is() -> None:
    _, stages = Moore2016(return_stages=True)(_noise(1, 2, 3200))
    for name, values in stages.items():
        saved = values.untyped_storage().nbytes()
        assert saved <= values.nbytes, name


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_separate_outputs_and_gradients_are_those_of_the_plain_bank(batch: int) -> None:
    """Value by value, state by state, with ragged channels and unused outputs."""
    bank = ModulationFilterbank(FS, [80.0, 300.0, 2000.0], preset="paulick2024", learnable=True)
    twin = copy.deepcopy(bank)
    x, y = (_noise(batch, 3, 400).requires_grad_() for _ in range(2))
    chunk, (_, state) = bank.stream(x)
    before = torch.zeros(batch, twin.offsets[-1], 2)
    inside = y
    if twin.lowpass_cutoff:
        from amtcore.kernels.operations.sections import FIRST_ORDER
        from amtcore.kernels.operators import run_step

        inside, _ = run_step(FIRST_ORDER, 0, y, twin.block_ops(3)[0].coef, torch.zeros(batch, 3, 1))
    plain, after = modulation_bank(inside, twin.coefficients(), before, twin.kinds, twin.offsets)
    assert torch.equal(torch.cat(chunk, 1), plain) and torch.equal(state, after)
    last, first = slice(twin.offsets[-2], None), slice(0, twin.offsets[1])
    (chunk[-1].square().sum() + 2 * chunk[0].sum() + state.sum()).backward()
    (plain[:, last].square().sum() + 2 * plain[:, first].sum() + after.sum()).backward()
    assert torch.allclose(x.grad, y.grad, rtol=1e-5, atol=1e-7)
    for mine, theirs in zip(bank.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_where_memory_cannot_be_looked_at_channels_are_views() -> None:
    bank = ModulationFilterbank(FS, [300.0, 2000.0])
    x = _noise(2, 2, 300)
    expected = bank(x)
    mapped = torch.func.vmap(bank)(x)
    compiled = one_graph(bank)(x)
    for outputs in (mapped, compiled):
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert can_separate(x) and not can_separate(x.to("meta")) and not can_separate(x[:0])


def test_outputs_may_be_changed_in_place() -> None:
    """They do not overlap."""
    outputs = Dau1997(FS, 300.0, 1500.0)(_noise(2, 500))
    kept = [y.clone() for y in outputs]
    outputs[0].zero_()
    assert all(torch.equal(a, b) for a, b in zip(outputs[1:], kept[1:], strict=True))
