"""Nodes that stand for the components between two channels."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from amtcore import Glasberg2002, Moore2016
from amtcore.scales import cam_space
from amtcore.stages.excitation import (
    NODES,
    Array,
    ERBIntegration,
    Moore2016ExcitationPattern,
    Nodes,
    nodes_of,
)
from benchmarks.loudness import signal_of

from ..compare import Tolerance, assert_close
from ..short import only, spread
from .loudness_golden import one_thread, tone  # noqa: F401

F_HZ = 15.625 * np.arange(2, 961)
FC_HZ = cam_space(1.75, 39.0, 0.25)


def _at_nodes(intensity: Array, nodes: Nodes) -> Array:
    pieces = [intensity[a:b] if w is None else intensity[a:b] @ w for a, b, w in nodes.parts()]
    return np.concatenate(pieces)


@pytest.mark.parametrize("nodes", only([NODES], [2, 3, 4]))
def test_polynomials_between_two_channels_are_summed_exactly(nodes: int) -> None:
    made = nodes_of(F_HZ, FC_HZ, nodes)
    rng = np.random.default_rng(0)
    uneven, even = rng.random(len(F_HZ)), np.ones(len(F_HZ))
    for low, high in pairwise(FC_HZ):
        here, there = ((f >= low) & (f < high) for f in (F_HZ, made.f_hz))
        assert there.sum() == min(here.sum(), nodes)
        for intensity, degree in ((uneven, nodes - 1), (even, 2 * nodes - 1)):
            w, at = (((f - low) / (high - low)) ** degree for f in (F_HZ, made.f_hz))
            got = (_at_nodes(intensity, made) * at)[there].sum()
            assert got == pytest.approx((intensity * w)[here].sum(), rel=1e-9)


def test_components_far_apart_are_their_own_nodes() -> None:
    nodes = nodes_of(F_HZ, FC_HZ)
    assert len(nodes.f_hz) == 337 and (np.diff(nodes.f_hz) > 0).all()
    np.testing.assert_array_equal(nodes.f_hz[:90], F_HZ[:90])
    parts = nodes.parts()
    assert (
        parts[-1][1] == len(F_HZ)
        and parts[0][2] is None
        and [a for a, _, _ in parts[1:]] == [b for _, b, _ in parts[:-1]]
    )
    few = F_HZ[::40]
    for f_hz, fc_hz in ((few, FC_HZ), (F_HZ[:NODES], FC_HZ[-1:]), (few[:0], FC_HZ)):
        nodes = nodes_of(f_hz, fc_hz)
        np.testing.assert_array_equal(nodes.f_hz, f_hz)
        assert nodes.parts() == [(0, len(f_hz), None)]


@functools.cache
def _model(build: type, dtype: torch.dtype) -> Any:
    return build(return_stages=True, dtype=dtype)


@pytest.mark.parametrize(
    ("build", "sound"), spread(2, [Moore2016, Glasberg2002], ["noise", "speech", "tone"])
)
def test_loudness_is_that_of_single_components(build: type, sound: str) -> None:
    """In float64 every component is weighted for itself."""
    exact, quick = (_model(build, kind) for kind in (torch.float64, torch.float32))
    x = tone(5000.0, 40.0, 0.2) if sound == "tone" else torch.from_numpy(signal_of(sound, 1, 0.3))
    # Of a single frame, where nothing evens out: instantaneous specific loudness, all channels.
    name = "inst_spec_loud_left" if build is Moore2016 else "specific_loudness"
    got, expected = (model(x)[1][name].double() for model in (quick, exact))
    assert_close(got, expected, Tolerance(2e-5, "three nodes between two channels"))
    assert_close(got.sum(-1), expected.sum(-1), Tolerance(3e-6, "sums of these"))


@pytest.mark.parametrize("stage", [Moore2016ExcitationPattern, ERBIntegration])
def test_a_stage_of_another_type_has_nodes_as_if_built_so(stage: type) -> None:
    f_hz = torch.from_numpy(F_HZ)
    intensity = torch.rand(3, len(F_HZ), generator=torch.Generator().manual_seed(0)).double()
    single, double = stage(f_hz), stage(f_hz, dtype=torch.float64)
    expected = double(intensity)
    assert single.at_nodes(intensity.float()).shape == (3, 337)
    assert_close(single.double()(intensity), expected, Tolerance(1e-6, "constants in float32"))
    assert double.float()(intensity.float()).shape == expected.shape
    assert double.at_nodes(intensity.float()).shape == (3, 337)
