"""Kernels of the loudness models for calls without gradients, against torch's own functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from amtcore import Moore2016BinauralLoudness
from amtcore.kernels.torch_state import can_compute
from amtcore.kernels.vector.arrays import new_rows, rows_of
from amtcore.kernels.vector.simd import LANES
from amtcore.stages.excitation import Moore2016ExcitationPattern
from amtcore.stages.loudness import Moore2016SpecificLoudness, SpecificLoudness

from ..compare import Tolerance, assert_close

F64 = torch.float64
F_HZ = 15.625 * torch.arange(2, 961, dtype=torch.float64)
SINGLE = Tolerance(5e-7, "float32 sums in another order")
LAW = Tolerance(2e-6, "float32 exponentials and logarithms")


def _spectra(frames: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return 10.0 ** (8.0 * torch.rand(2, frames, len(F_HZ), generator=generator))


@pytest.mark.parametrize("frames", [1, 5, 150])
def test_nodes(frames: int) -> None:
    stage, spectra = Moore2016ExcitationPattern(F_HZ), _spectra(frames)
    least = 10.0 ** (2.0 + 4.0 * torch.rand(1, frames, 1))
    with_gradients = spectra.clone().requires_grad_()
    assert can_compute(spectra) and not can_compute(with_gradients)
    for limit in (None, least):
        expected = stage.at_nodes(with_gradients, limit).detach()
        together = torch.stack(list(spectra.permute(2, 0, 1))).permute(1, 2, 0)
        for layout in (spectra, together):  # by frame and by component
            assert_close(stage.at_nodes(layout, limit), expected, SINGLE)
    one = stage.at_nodes(spectra[:, -1:], least[:, -1:])
    assert torch.equal(one, stage.at_nodes(spectra, least)[:, -1:])


def test_components_that_are_no_numbers_stay_so() -> None:
    stage, spectra = Moore2016ExcitationPattern(F_HZ), _spectra(3)
    spectra[0, 1, 700] = torch.nan
    nodes = stage.at_nodes(spectra, torch.full((1,), torch.nan))
    assert nodes[0, 1].isnan().any() and not nodes[1].isnan().any()


@pytest.mark.parametrize("law", [Moore2016SpecificLoudness, SpecificLoudness])
@pytest.mark.parametrize("channels", [1, 31, 33, 150])
def test_specific_loudness(law: type, channels: int) -> None:
    stage = law(torch.linspace(50.0, 15000.0, channels).tolist())
    levels = torch.linspace(-100.0, 150.0, 301)[:, None] + torch.linspace(0.0, 1.0, channels)
    expected = stage(levels.clone().requires_grad_()).detach()
    got = stage(levels)
    assert_close(got, expected, LAW)
    # Soft ones have as many digits.
    torch.testing.assert_close(got, expected, rtol=4e-6, atol=0.0)
    levels[7, 0] = torch.nan
    again = stage(levels)
    assert again[7, 0].isnan() and int(again.isnan().sum()) == 1
    assert torch.equal(again[8:], got[8:])


@pytest.mark.parametrize("channels", [2, 33, 150])
@pytest.mark.parametrize("frames", [1, 150])
def test_inhibition(frames: int, channels: int) -> None:
    """Ears of very different loudness, alike, and silent, against float64."""
    generator, exact = torch.Generator().manual_seed(0), Moore2016BinauralLoudness(dtype=F64)
    left, right = 10.0 ** (-6.0 * torch.rand(2, 1, frames, channels, generator=generator))
    right[0, frames // 3 : frames // 2], right[0, :1] = 0.0, left[0, :1]
    stage = Moore2016BinauralLoudness()
    expected = exact.inhibited(left.double(), right.double())
    for got, wanted in zip(stage.inhibited(left, right), expected, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=2e-6, atol=0.0)
    one = stage.inhibited(left[:, -1:], right[:, -1:])
    assert torch.equal(one[0], stage.inhibited(left, right)[0][:, -1:])


def test_inhibition_of_what_is_no_number() -> None:
    stage, ears = Moore2016BinauralLoudness(), torch.rand(2, 3, 150)
    ears[0, 1, 5] = torch.nan
    got = stage.inhibited(*ears)
    expected = stage.inhibited(ears[0].clone().requires_grad_(), ears[1])
    for values, plain in zip(got, expected, strict=True):
        assert torch.equal(values.isnan(), plain.isnan()) and values[1].isnan().all()


def test_rows_of_frames_are_read_where_they_lie() -> None:
    flat, pitch, rows = new_rows(3, 4 * LANES)
    assert pitch % LANES == 0 and pitch // LANES % 2 and pitch >= 4 * LANES
    rows.copy_(torch.arange(rows.numel(), dtype=torch.float32).view(rows.shape))
    for part, shares in ((rows, True), (rows[: 2 * LANES], True), (rows[:5], False)):
        again, step = rows_of(part)
        assert np.shares_memory(again, flat) == shares
        for value in range(3):
            wanted = part[:, value].numpy()
            np.testing.assert_array_equal(again[value * step :][: len(part)], wanted)
    again, step = rows_of(rows[:5].contiguous())  # frame by frame: a copy, filled with silence
    assert again[2 * step : 2 * step + 6].tolist() == [*rows[:5, 2].tolist(), 0.0]
