"""How long models remember: what a model says of itself, against what it does.

The second route is the model run over a signal and over its end alone: 95 dB of noise come first,
then near silence or none, where what is left of the noise shows most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

from amtcore.features.feature_model import Extractor
from amtcore.features.frame_model import FrameDesign, FrameExtractor, FrameGrid
from amtcore.features.mel import MelSpectrogram
from amtcore.features.registry import build_extractor
from amtcore.models import Dau1997

from ..short import but

# What remains after so many time constants: exp(-17), the rounding of float32.
TIMES, REST = 17.0, math.exp(-17)
LOUD_S, AFTER_S = 4, 2
KING = {"phase_insens": "none"}
MODELS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "dau1997": ("dau1997", 16000.0, {}),
    "osses2021": ("osses2021", 16000.0, {}),
    "king2019": ("king2019", 16000.0, {"params": KING}),
    "king2019 of low Q": ("king2019", 16000.0, {"params": KING | {"modbank_qfactor": 0.5}}),
    "paulick2024": ("paulick2024", 22050.0, {}),
    "glasberg2002": ("glasberg2002", 32000.0, {}),
    "moore2016": ("moore2016", 32000.0, {}),
    "slow loops": ("dau1997", 16000.0, {"params": {"adaptation_kwargs": {"tau": [0.9]}}}),
}


def left_over(extractor: Extractor, early_s: int, quiet: float) -> Callable[[int], float]:
    """From so many seconds after the noise on, `early_s` at most, the largest difference that it
    makes, as a part of the largest value of all."""
    fs, rng = round(extractor.fs_hz), np.random.default_rng(5)
    unit = 2e-5 if extractor.input_unit == "pa" else 1e-5
    signal = rng.standard_normal((LOUD_S + early_s + AFTER_S) * fs) * unit * 10 ** (95 / 20)
    signal[LOUD_S * fs :] *= quiet
    whole, part = (extractor.extract([x])[0] for x in (signal, signal[LOUD_S * fs :]))

    def worst(after_s: int) -> float:
        found = []
        for info in extractor.streams:
            a, b = (np.asarray(made[info.name], np.float64) for made in (whole, part))
            a = a[round(LOUD_S * info.frame_rate_hz) :]
            assert len(a) == len(b) == round((early_s + AFTER_S) * info.frame_rate_hz)
            first, frames = (round(s * info.frame_rate_hz) for s in (after_s, AFTER_S))
            apart = np.abs(a - b)[first : first + frames]
            found.append(float(apart.max() / np.abs(whole[info.name]).max()))
        return max(found)

    return worst


#: Models whose test takes seconds; two of them remember half a minute of signal and more. The
#: models dau1997 and osses2021 have the same loops, and `slow loops` has slower loops.
LENGTHY = ("glasberg2002", "moore2016", "paulick2024", "dau1997")


@pytest.mark.parametrize("name", but(LENGTHY, MODELS))
def test_what_a_model_forgets_is_forgotten(name: str) -> None:
    model, fs_hz, options = MODELS[name]
    extractor = build_extractor(model, fs_hz=fs_hz, dtype="float64", **options)
    assert extractor.memory_s is not None
    grid_s = extractor.grid_s
    early_s = grid_s * math.ceil(TIMES * extractor.memory_s / grid_s)
    silence, whisper = (left_over(extractor, early_s, quiet) for quiet in (0.0, 1e-3))
    assert silence(early_s) < REST and whisper(early_s) < REST
    # It is no idle bound: where a tenth as long was left, more remains.
    assert silence(grid_s * math.ceil(early_s / 10 / grid_s)) > REST


def test_time_constants_are_those_of_the_slowest_states() -> None:
    def memory_s(model: str, **options: Any) -> float | None:
        return build_extractor(model, fs_hz=32000, **options).memory_s

    only_short = {"short_term_loudness": {}}
    assert memory_s("glasberg2002", streams=only_short) == pytest.approx(0.0495, abs=1e-4)
    assert memory_s("glasberg2002") == pytest.approx(2.049, abs=1e-3)
    assert memory_s("moore2016") == pytest.approx(0.781, abs=1e-3)
    whole, spikes = memory_s("dau1997"), memory_s("dau1997", streams={"spikes": {"tau_mem": 0.3}})
    assert whole is not None and spikes == pytest.approx(whole + 0.3 + 0.005)
    assert memory_s("melspectrogram", params={"n_fft": 1024}) == 0.0


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("king2019", {}),
        ("king2019", {"params": KING | {"subfs": 4000}}),
        ("glasberg2002", {"streams": {"loudness_summary": {}}}),
        ("melspectrogram", {"params": {"n_fft": 1024, "top_db": 80.0}}),
        ("melspectrogram", {"params": {"n_fft": 65536}}),
    ],
    ids=["hilbert", "resampled bands", "row a clip", "maximum of the clip", "window of seconds"],
)
def test_what_needs_more_than_the_past_says_so(model: str, options: dict[str, Any]) -> None:
    assert build_extractor(model, fs_hz=32000, **options).memory_s is None


def test_a_stage_of_somebody_else_is_not_vouched_for() -> None:
    model = Dau1997(fs=16000)
    assert model.memory_s is not None
    model.ihc = nn.Identity()
    assert model.memory_s is None


@pytest.mark.parametrize(
    ("model", "fs_hz", "options", "grid_s"),
    [
        ("dau1997", 44100, {}, 1),
        ("dau1997", 44100, {"streams": {"modulation": {"frame_rate_hz": 62.5}}}, 2),
        ("paulick2024", 22050, {}, 2),  # decimated by four
        ("melspectrogram", 44100, {"params": {"n_fft": 2048, "hop_length": 512}}, 128),
        ("glasberg2002", 32000, {"streams": {"long_term_loudness": {"frame_rate_hz": 0.4}}}, 5),
    ],
)
def test_grids_begin_anew_after_whole_seconds(
    model: str, fs_hz: float, options: dict[str, Any], grid_s: int
) -> None:
    assert build_extractor(model, fs_hz=fs_hz, **options).grid_s == grid_s


def test_a_model_of_somebody_else_says_nothing_unless_it_does() -> None:
    def built(**options: Any) -> FrameExtractor:
        grids = {"level": FrameGrid(1, 160)}
        design = FrameDesign(grids, lambda signal: {}, **options)
        return FrameExtractor(MelSpectrogram(), 16000.0, design, [], {}, {})

    assert built().memory_s is None
    assert built(memory_s=0.25).memory_s == 0.25
