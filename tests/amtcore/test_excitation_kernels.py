"""Levels and patterns by the kernel that leaves out what adds nothing, against all of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from amtcore import ExcitationPattern
from amtcore.kernels.operations.excitation import (
    ERB_LEVELS,
    EXCITATION_PATTERN,
    Tables,
    plain_levels,
    plain_pattern,
)
from amtcore.kernels.operators import operator
from amtcore.kernels.vector.simd import LANES
from amtcore.stages.excitation import ERBIntegration, Moore2016ExcitationPattern

from ..compare import Tolerance, assert_close

levels_db, pattern = operator(ERB_LEVELS), operator(EXCITATION_PATTERN)

F_HZ = 15.625 * torch.arange(2, 961, dtype=torch.float64)
#: 4e-6 dB are a relative 1e-6.
LEVEL = Tolerance(0.0, "float32 sums in another order, and logarithms", 2e-5)
SOUNDS = ("flat", "steep", "two tones", "silence", "negative")


def _nodes(sound: str, frames: int, sources: int) -> Tensor:
    """Intensities over as many as 160 dB, loud and soft frames side by side."""
    generator = torch.Generator().manual_seed(0)
    level = 60.0 * torch.rand(frames, sources, generator=generator)
    level = level + torch.linspace(0.0, 40.0, frames)[:, None]
    if sound == "steep":
        level = level - torch.linspace(0.0, 100.0, sources)
    nodes = 10.0 ** (level / 10.0)
    if sound == "two tones":
        nodes = nodes * 0.0
        nodes[:, sources // 8], nodes[:, sources // 2] = 1e9, 1e-3
    if sound == "negative":
        nodes[:, 1::3] *= -0.05
    return nodes * 0.0 if sound == "silence" else nodes


def _tables(stage: Any) -> Tables:
    stage.derived("nodes_hz")
    names = ("away", "relative", "upper", "upper_blocks")
    away, line, upper, blocks = (stage.derived(name) for name in names)
    before, share = stage.derived("before"), stage.derived("share")
    return Tables(away, line, before, share, upper, blocks)


@functools.cache
def _stage(model: str) -> Any:
    """Return a stage that tests only read: its nodes take 0.1 CPU seconds."""
    if model == "moore2016":
        return Moore2016ExcitationPattern(F_HZ)
    return ExcitationPattern(F_HZ, ERBIntegration(F_HZ).fc_erb.tolist())


def _patterns(model: str, sound: str) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """The kernel's pattern, the plain pattern in double precision, and a function that makes the
    plain pattern of the nodes' magnitudes."""
    tables, sources = _tables(_stage(model)), 337
    nodes = _nodes(sound, LANES + 9, sources)
    levels = 110.0 * torch.rand(LANES + 9, sources if model == "moore2016" else 150)
    double = Tables(*(t.double() if t.is_floating_point() else t for t in tables))

    def plain(nodes: Tensor) -> Tensor:
        return plain_pattern(nodes.double(), levels.double(), double)

    return pattern(nodes, levels, tables).double(), plain(nodes), lambda: plain(nodes.abs())


@pytest.mark.parametrize("sound", SOUNDS)
@pytest.mark.parametrize("model", ["moore2016", "glasberg2002"])
def test_nothing_that_counts_is_left_out(model: str, sound: str) -> None:
    got, expected, _ = _patterns(model, sound)
    assert_close(got, expected, LEVEL)


@pytest.mark.parametrize(("model", "seed"), [("moore2016", 31), ("glasberg2002", 51)])
def test_sources_that_cancel_each_other(model: str, seed: int) -> None:
    """The sources of these two draws cancel by 35 and 44 dB in a channel; the bound is relative to
    the sources."""
    torch.manual_seed(seed)
    got, expected, magnitudes = _patterns(model, "negative")
    left = 10.0 ** ((expected - magnitudes()) / 10.0)
    assert_close((got - expected) * left, torch.zeros_like(left), LEVEL)


@pytest.mark.parametrize("sound", SOUNDS)
@pytest.mark.parametrize("places", ["between_nodes", "bands"])
def test_levels(places: str, sound: str) -> None:
    stage: Any = (Moore2016ExcitationPattern if places == "between_nodes" else ERBIntegration)(F_HZ)
    weights, nodes = stage.derived(places), _nodes(sound, LANES + 9, 337)
    expected = plain_levels(nodes.double(), weights.double())
    got = levels_db(nodes, weights, stage.derived(f"{places}_blocks"))
    assert_close(got.double(), expected, LEVEL)


def test_a_frame_does_not_depend_on_its_neighbours() -> None:
    stage = _stage("moore2016")
    for sound in ("steep", "two tones"):
        nodes = _nodes(sound, 2 * LANES + 5, 337)
        nodes[::2] = nodes[::2].flip(1)
        tables = _tables(stage)
        weights = stage.derived("between_nodes"), stage.derived("between_nodes_blocks")
        levels = levels_db(nodes, *weights)
        together = pattern(nodes, levels, tables)
        for n in (0, 1, LANES + 3, len(nodes) - 1):
            one = slice(n, n + 1)
            assert torch.equal(levels_db(nodes[one], *weights), levels[one])
            assert torch.equal(pattern(nodes[one], levels[one], tables)[0], together[n])


@pytest.mark.parametrize("strange", [torch.nan, torch.inf])
def test_numbers_that_are_none_come_out_where_the_plain_way_has_them(strange: float) -> None:
    stage = _stage("moore2016")
    tables, nodes = _tables(stage), _nodes("flat", 5, 337)
    levels = torch.full((5, 337), 60.0)
    clean = pattern(nodes, levels, tables)
    nodes[1, 200], levels[3, 100] = strange, torch.nan
    got, expected = (of(nodes, levels, tables) for of in (pattern, plain_pattern))
    assert torch.equal(got.isnan(), expected.isnan()) and got[3].isnan().any()
    assert torch.equal(got.isinf(), expected.isinf()) and not got[1].isfinite().all()
    assert torch.equal(got[[0, 2, 4]], clean[[0, 2, 4]])
    weights = stage.derived("between_nodes"), stage.derived("between_nodes_blocks")
    made = levels_db(nodes, *weights)
    assert not made[1].isfinite().any() and made[[0, 2, 3, 4]].isfinite().all()


@pytest.mark.parametrize("components", [1, 7, 40])
def test_few_components(components: int) -> None:
    stage = Moore2016ExcitationPattern(torch.linspace(200.0, 5000.0, components))
    intensity = 10.0 ** (6.0 * torch.rand(3, components))
    expected = stage(intensity.clone().requires_grad_()).detach()
    assert_close(stage(intensity), expected, LEVEL)
