"""Loudness models by one kernel, for numbers alone: the stages' own numbers, bit by bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from amtcore import Glasberg2002, Moore2016
from amtcore.models.frame_blocks import BLOCK_FRAMES
from amtcore.models.loudness import Loudness, LoudnessModel

from ..short import spread
from .loudness_golden import noise, one_thread, tone  # noqa: F401

#: A block, and some frames of another.
SAMPLES = 32 * BLOCK_FRAMES + 900
FINITE, STRANGE = (
    ("noise", "tone", "half silent", "very loud"),
    ("no number", "infinite", "overflows"),
)


def _signal(sound: str) -> Tensor:
    """(2, time): ears that hear different things."""
    x = noise(2, SAMPLES)
    if sound == "tone":
        x = tone(1000.0, 60.0)[:SAMPLES].repeat(2, 1) * torch.tensor([[1.0], [0.01]])
    elif sound == "half silent":
        x[0, 1000:] = x[1, :4000] = 0.0
    elif sound == "very loud":
        x *= 1e4
    elif sound == "no number":
        x[0, 3000] = torch.nan
    elif sound == "infinite":
        x[0, 3000] = torch.inf
    elif sound == "overflows":
        x[0, 3000:3010] = 1e18
    return x


@functools.cache
def _model(kind: type[LoudnessModel]) -> LoudnessModel:
    """Return a model that tests only read."""
    return kind()


def _loudness(model: LoudnessModel, x: Tensor, by_stages: bool, **kwargs: Any) -> Loudness:
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        if by_stages:
            patch.setattr(type(model), "_kernel", lambda _: None)
        else:
            assert model._kernel() is not None
        return model.stream_loudness(x, **kwargs)[0]


def _assert_same(got: Loudness, expected: Loudness) -> None:
    for name in ("short", "long", "specific"):
        torch.testing.assert_close(
            getattr(got, name), getattr(expected, name), rtol=0.0, atol=0.0, equal_nan=True
        )


@pytest.mark.parametrize(("ears", "sound"), spread(2, [1, 2], [*FINITE, *STRANGE]))
def test_kernel_gives_the_bits_of_the_stages(ears: int, sound: str) -> None:
    x = _signal(sound)
    model = _model(Moore2016 if ears == 2 else Glasberg2002)
    x = x if ears == 2 else x[0]
    got, expected = (_loudness(model, x, by_stages, last=True) for by_stages in (False, True))
    assert got.short.shape == (1, SAMPLES // 32 + 1)
    assert bool(got.short.isfinite().all()) == (sound in FINITE)
    _assert_same(got, expected)


def test_signals_side_by_side_and_one_signal_at_both_ears() -> None:
    model, x = _model(Moore2016), _signal("noise")
    batch = torch.stack((x, x.flip(0), 0.1 * x))
    together = _loudness(model, batch, False, last=True)
    _assert_same(together, _loudness(model, batch, True, last=True))
    alone = _loudness(model, x, False, last=True)
    assert torch.equal(together.specific[:1], alone.specific)
    _assert_same(*(_loudness(model, batch[:1, :1], way, last=True) for way in (False, True)))


def test_a_stream_may_change_between_the_ways() -> None:
    model, x = _model(Moore2016), noise(2, 10000)
    whole = _loudness(model, x, False, last=True)
    with torch.no_grad():
        first, state = model.stream_loudness(x[:, :9000])
    assert first.short.shape[1] == BLOCK_FRAMES
    second = _loudness(model, x[:, 9000:], True, state=state, last=True)
    assert torch.equal(torch.cat((first.long, second.long), 1), whole.long)


def test_stages_without_a_kernel_go_by_themselves() -> None:
    """Hops that cut windows, double precision, few channels, a forced backend."""
    few = {"erb_lower": 10.0, "erb_upper": 12.0}
    for model in (
        Moore2016(spectrum_kwargs={"hop_length": 48}),
        Moore2016(dtype=torch.float64),
        Moore2016(excitation_kwargs=few),
        Moore2016(excitation_kwargs={"backend": "cpu"}),
    ):
        assert model._kernel() is None
        with torch.no_grad():
            assert model.stream_loudness(noise(2, 3000), None, True)[0].short.isfinite().all()
