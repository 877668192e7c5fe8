"""Glasberg2002: an independent implementation's loudness, the sone, chunks, gradients."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from amtcore import Glasberg2002
from amtcore.errors import ParameterError
from amtcore.stages.spectrum import GLASBERG2002_WINDOW_LOG10
from tests.short import but, spread

from ..compare import Tolerance, assert_close
from .loudness_golden import FILES, load, noise, one_thread, tone  # noqa: F401

DTYPES = {"float64": torch.float64, "float32": torch.float32}
#: Bound on the steady part, and by how many frames the other program's are late.
WITHIN, LATE_FRAMES = 0.08, 95
STEADY = [name for name in FILES if name.startswith(("tone", "noise"))]
SINGLE = Tolerance(1e-4, "single-precision spectra")


@functools.cache
def _model(dtype: str = "float64", fs: int = 32000, return_stages: bool = False) -> Glasberg2002:
    return Glasberg2002(fs=fs, return_stages=return_stages, dtype=DTYPES[dtype])


@functools.cache
def _loudness(name: str, dtype: str, amplitude: float = 1.0) -> dict[str, np.ndarray]:
    model = _model(dtype, return_stages=True)
    long, stages = model(amplitude * torch.from_numpy(load(name)["input"]))
    return {"inst": stages["inst"].numpy(), "stl": stages["stl"].numpy(), "ltl": long.numpy()}


@pytest.mark.parametrize("trace", ["inst", "stl", "ltl"])
@pytest.mark.parametrize(("name", "dtype"), spread(2, STEADY, DTYPES))
def test_steady_sounds(name: str, trace: str, dtype: str) -> None:
    got = _loudness(name, dtype)[trace][300:500]
    stored = load(name)[f"glasberg_ward_{trace}"][300 + LATE_FRAMES : 500 + LATE_FRAMES]
    assert float(np.median(got)) == pytest.approx(float(np.median(stored)), rel=WITHIN)


@pytest.mark.parametrize("trace", ["inst", "stl", "ltl"])
@pytest.mark.parametrize(("name", "dtype"), spread(2, ["am4k", "burst100ms_70"], DTYPES))
def test_changing_sounds(name: str, trace: str, dtype: str) -> None:
    got = _loudness(name, dtype)[trace][: 600 - LATE_FRAMES]
    stored = load(name)[f"glasberg_ward_{trace}"][LATE_FRAMES:]
    assert_close(got, stored, Tolerance(WITHIN, "another implementation, 1 ms grid"))


@pytest.mark.parametrize("trace", ["inst", "stl", "ltl"])
@pytest.mark.parametrize(("name", "dtype"), spread(2, FILES, DTYPES))
def test_whole_traces_but_for_the_gain(name: str, trace: str, dtype: str) -> None:
    """With all power of a windowed tone, as the other program has it, every frame agrees."""
    missing = 10 ** ((0.426 - GLASBERG2002_WINDOW_LOG10) / 2)
    got = _loudness(name, dtype, missing)[trace][: 600 - LATE_FRAMES]
    stored = load(name)[f"glasberg_ward_{trace}"][LATE_FRAMES:]
    bound = 0.02 if name == "tone100_60" else 0.005
    assert_close(got, stored, Tolerance(bound, "filter of the ear at the onset"), name)


@pytest.mark.parametrize("fs", but([48000], [16000, 32000, 44100, 48000]))
def test_one_sone_is_1_khz_at_40_db(fs: int) -> None:
    model = _model("float32", fs, return_stages=True)
    long, stages = model(tone(1000.0, 40.0, 2.0, fs))
    assert float(stages["stl"][300:450].mean()) == pytest.approx(1.0, abs=0.02)
    assert float(long[-200:-100].mean()) == pytest.approx(1.0, abs=0.02)


def test_a_soft_sound_beside_a_loud_one_far_away_is_heard() -> None:
    """No component is dropped for being much softer than another one (Moore2016 drops it)."""
    loud, soft = tone(100.0, 95.0), tone(6000.0, 30.0)
    model = _model("float32", return_stages=True)
    sounds = {"both": loud + soft, "soft": soft}
    levels = {name: model(x)[1]["excitation"][300] for name, x in sounds.items()}
    channel = int((model.fc - 6000.0).abs().argmin())
    assert float(levels["soft"][channel]) > 20.0
    assert float(levels["both"][channel] - levels["soft"][channel]) == pytest.approx(0.0, abs=1.0)


def test_phon_of_a_1_khz_tone_is_its_level() -> None:
    model = _model(return_stages=True)
    _, stages = model(tone(1000.0, 33.0))
    loudness = stages["stl"][300:450].mean()
    assert float(model.compute_loudness_level(loudness)) == pytest.approx(33.0, abs=0.02)


@pytest.mark.parametrize("level", [0.0, 1e-40, 200.0])
def test_extremes_are_finite_with_finite_gradients(level: float) -> None:
    model = Glasberg2002(learnable=True)
    x = (level * torch.sign(noise(5000))).requires_grad_()
    long = model(x)
    long.sum().backward()
    assert torch.isfinite(long).all() and torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    assert (float(long.detach().max()) < 1e-12) == (level < 1.0)


def test_stages_are_those_of_the_interface() -> None:
    model = Glasberg2002(return_stages=True, erb_kwargs={"erb_step": 0.5})
    long, stages = model(noise(2, 2000))
    shapes = {name: tuple(values.shape) for name, values in stages.items()}
    bands = model.erb_integration.n_erb_bands
    assert bands == 75 == len(model.get_erb_frequencies())
    trace, pattern, spectrum = (2, 63), (2, 63, bands), (2, 63, 959)
    assert shapes == {
        "stl": trace, "specific_loudness": pattern, "excitation": pattern,
        "erb_excitation": pattern, "psd": spectrum, "freqs": (959,), "inst": trace,
    }  # fmt: skip
    assert long.shape == trace
    specific = model.specific_loudness(stages["excitation"])
    assert_close(stages["specific_loudness"], specific, SINGLE)
    assert_close(stages["inst"], specific.sum(-1), SINGLE)  # 2 ears, steps of 0.5 Cam
    assert_close(model.loudness_integration(specific)[1], long, SINGLE)


def test_channel_spacing_does_not_change_loudness() -> None:
    x = noise(8000)
    coarse = Glasberg2002(erb_kwargs={"erb_step": 0.5})(x)
    assert_close(coarse, _model("float32")(x), Tolerance(0.02, "sum over fewer channels"))


def test_channels_can_be_limited_in_frequency() -> None:
    model = Glasberg2002(erb_kwargs={"f_min": 80.0, "f_max": 12000.0})
    fc = model.get_erb_frequencies()
    assert float(fc[0]) == pytest.approx(80.0) and 11500 < float(fc[-1]) <= 12000


def test_learnable_parameters_by_component() -> None:
    assert _model().get_learnable_parameters() == {}
    groups = Glasberg2002(learnable=True).get_learnable_parameters()
    assert {"multi_fft", "erb_integration", "excitation_pattern", "specific_loudness",
            "loudness_integration"} <= set(groups)  # fmt: skip
    assert groups["loudness_integration"]["tau_attack"] == pytest.approx(0.0217, abs=1e-4)
    assert groups["erb_integration"]["bandwidth_scale"] == 1.0
    assert groups["specific_loudness"]["C"] == pytest.approx(0.047)
    assert groups["multi_fft"]["n_ffts"] == [2048, 1024, 512, 256, 128, 64]
    model = _model()
    assert model.reset_state() is None and "hop_length=32" in repr(model)
    assert model.get_parameters() == {"fs": 32000.0, "learnable": False, "return_stages": False}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Glasberg2002(fs=0), ParameterError, "fs must be"),
        (lambda: Glasberg2002(excitation_kwargs={"upper_slope_per_db": 0.1}), ParameterError, "0"),
    ],
)
def test_wrong_input_is_named(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
