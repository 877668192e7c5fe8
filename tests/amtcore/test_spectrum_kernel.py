"""Running spectra from few sums: what they leave out, and the kernel against its plain form."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from amtcore import Moore2016Spectrum, MultiResolutionFFT
from amtcore.kernels.operations import running_spectrum
from amtcore.kernels.operations.running_spectrum import RUNNING_POWERS, Factors
from amtcore.kernels.operators import operator
from amtcore.kernels.vector.simd import LANES
from amtcore.stages.spectrum import LEFT_OUT, can_factor, factors_of

from ..compare import Tolerance, assert_close

powers = operator(RUNNING_POWERS)

WINDOWS, HOP = (1024, 512, 64), 32
#: Of a frame's strongest component: float32 sums of some hundred samples, squared.
SINGLE = Tolerance(0.0, "float32 sums in another order", 3e-6)


@functools.cache
def _transforms() -> list[tuple[np.ndarray, np.ndarray]]:
    """Of windows of 16 hops and less, with components enough for several groups of the last."""
    made = []
    for length, f in zip(WINDOWS, ((3, 6), (6, 30), (200, 298)), strict=True):
        place = np.arange(length // 2) + 0.5
        angle = np.outer(np.arange(*f), place) * (2 * math.pi / WINDOWS[0])
        hann = 0.5 + 0.5 * np.cos(2 * math.pi * place / (length - 1))
        made.append((np.cos(angle) * hann, np.sin(angle) * hann))
    return made


def _plain(x: np.ndarray) -> np.ndarray:
    """(sample,) -> (frame, component), every product in full."""
    half, rows = WINDOWS[0] // 2, []
    for at in range(half, len(x) - half + 1, HOP):
        row = []
        for cosines, sines in _transforms():
            after = x[at : at + cosines.shape[1]]
            before = x[at - cosines.shape[1] : at][::-1]
            row.append((cosines @ (after + before)) ** 2 + (sines @ (after - before)) ** 2)
        rows.append(np.concatenate(row))
    return np.stack(rows)


def _noise(samples: int, rows: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, samples, generator=generator, dtype=torch.float64)


def _single(factors: Factors) -> Factors:
    return Factors(factors.basis.float(), factors.values.float(), factors.plan)


def test_what_is_left_out_is_half_a_digit_of_the_whole_transform() -> None:
    factors, x = factors_of(_transforms(), HOP), _noise(WINDOWS[0] + 7 * HOP)
    ranks = factors.plan[:, running_spectrum.RANK]
    assert ranks[0] == 0 and 0 < ranks[-1] < HOP
    got, expected = (
        running_spectrum.reference(x, factors)[0].sqrt().numpy(),
        np.sqrt(_plain(x[0].numpy())),
    )
    # Cosines and sines, the functions of a block and those of a group.
    length = max(np.linalg.norm(m, axis=1).max() for pair in _transforms() for m in pair)
    loudest = float(x.unfold(1, WINDOWS[0], HOP).norm(dim=2).max())
    assert np.abs(got - expected).max() < 4 * math.sqrt(2) * LEFT_OUT * length * loudest


@pytest.mark.parametrize("frames", [1, 5, LANES, 4 * LANES + 3])
def test_kernel_equals_its_plain_form(frames: int) -> None:
    factors, x = factors_of(_transforms(), HOP), _noise(WINDOWS[0] + (frames - 1) * HOP + 3, 2)
    expected = running_spectrum.reference(x, factors)
    assert expected.shape == (2, frames, 125)
    got = powers(x.float(), _single(factors), 125, frames).double()
    most = expected.amax(-1, keepdim=True)
    assert_close(got / most, expected / most, SINGLE)


def test_a_frame_does_not_depend_on_its_place_or_neighbours() -> None:
    factors = _single(factors_of(_transforms(), HOP))
    x = _noise(WINDOWS[0] + 139 * HOP, 3).float()
    together = powers(x, factors, 125, 140)
    for row, frame in ((0, 0), (1, 3), (1, 133), (2, 139)):
        alone = powers(x[row : row + 1, frame * HOP :][:, : WINDOWS[0]], factors, 125, 1)
        assert torch.equal(alone[0, 0], together[row, frame])


@pytest.mark.parametrize("stage", [Moore2016Spectrum, MultiResolutionFFT])
def test_stages_without_gradients_equal_those_with(stage: Any) -> None:
    spectrum, x = stage(), _noise(2048 + 40 * 32, 2).float()[None]
    exact = stage(dtype=torch.float64).intensities(x.double())
    most = exact.amax(-1, keepdim=True)
    for values in (spectrum.intensities(x), spectrum.intensities(x.requires_grad_()).detach()):
        assert_close(values.double() / most, exact / most, SINGLE)


def test_hops_that_cut_windows_otherwise_take_the_products() -> None:
    assert can_factor(WINDOWS, HOP) and not can_factor(WINDOWS, 48)
    spectrum, x = Moore2016Spectrum(hop_length=48), _noise(2048 + 5 * 48).float()[None]
    exact = Moore2016Spectrum(hop_length=48, dtype=torch.float64).intensities(x.double())
    most = exact.amax(-1, keepdim=True)
    assert_close(spectrum.intensities(x).double() / most, exact / most, SINGLE)


def test_samples_that_are_no_numbers_stay_in_their_frames() -> None:
    spectrum, x = Moore2016Spectrum(), _noise(2048 + 70 * 32).float()[None]
    x[0, 0, 40] = torch.nan
    got, expected = (
        values.detach().isnan().all(-1)
        for values in (spectrum.intensities(x), spectrum.intensities(x.clone().requires_grad_()))
    )
    assert torch.equal(got, expected)
    some = spectrum.intensities(x).isnan().any(-1)
    assert some[0, 0, :2].all() and not some[0, 0, 2:].any()
