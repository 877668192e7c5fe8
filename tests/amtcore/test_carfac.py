"""CARFAC against stored stages, a plain loop, and its properties."""

from __future__ import annotations

import functools
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from amtcore import CARFAC
from amtcore.errors import ParameterError, ShapeError, StateError
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close
from . import plain_carfac
from .golden_files import DTYPES, load, names

FILES = [name for name in names("carfac") if name != "carfac__design"]
STAGES = ("bm", "nap", "ohc_za", "agc_zb", "agc")
CASES = list(product(FILES, STAGES))
#: Poles near the unit circle at low frequencies; feedback amplifies rounding.
TOLERANCES = {
    "float64": dict.fromkeys(STAGES, Tolerance(1e-8, "feedback")),
    "float32": {
        **dict.fromkeys(STAGES, Tolerance(1e-3, "single-precision resonators")),
        "ohc_za": Tolerance(2e-3, "single-precision resonators"),
        "agc_zb": Tolerance(1e-5, "a constant part that dominates"),
    },
}
DESIGN = Tolerance(1e-10, "cancellation in the parabola of gains")
SAME = Tolerance(1e-11, "another order of sums")
LOW_HZ = 4000.0


def build(name: str, dtype: str, **more: Any) -> CARFAC:
    """Build the model of a stored file."""
    stored = load(name)
    health = stored["param_ohc_health"].tolist()
    return CARFAC(
        float(stored["fs"]),
        n_ears=stored["input"].ndim,
        ihc=str(stored["param_ihc"]),
        linear=bool(stored["param_linear"]),
        delay_per_stage=bool(stored["param_delay_buffer"]),
        ohc_health=None if set(health) == {1.0} else health,
        dtype=DTYPES[dtype],
        **more,
    )


@functools.cache
def stages(name: str, dtype: str) -> dict[str, Tensor]:
    """All stages of a stored input; the loop is opened where the file says so."""
    stored = load(name)
    x = torch.tensor(stored["input"].T, dtype=DTYPES[dtype])
    opened = int(stored["param_open_loop_from"])
    if opened < 0:
        return build(name, dtype)(x)
    first, state = build(name, dtype).stages(x[:opened])
    second, _ = build(name, dtype, open_loop=True).stages(x[opened:], state)
    return {key: torch.cat((first[key], second[key]), -1) for key in first}


def noise(*shape: int, rms: float = 0.02, seed: int = 1) -> Tensor:
    """Noise in float64; an RMS of 0.02 is 70 dB SPL."""
    return rms * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_stored_array(name: str, stage: str, dtype: str) -> None:
    """Time courses of stored channels; RMS, mean or last value of all channels."""
    stored, made, compared = load(name), stages(name, dtype), 0
    for key in stored:
        ear, plain = None, key
        for i in range(stored["input"].ndim):
            if f"_ear{i}" in key:
                ear, plain = i, key.replace(f"_ear{i}", "")
        if plain.startswith("agc_stage") and stage == "agc":
            values, number = made["agc_memory"], int(plain[len("agc_stage")])
            rows = (values if ear is None else values[ear])[number - 1].T
        elif plain.startswith(stage) and stage != "agc":
            values = made[stage]
            rows = (values if ear is None else values[ear]).T
        else:
            continue
        _, _, step = plain.partition("@")
        rows = rows.double()
        if plain.endswith("_rms"):
            got = rows.square().mean(0).sqrt()
        elif plain.endswith("_mean"):
            got = rows.mean(0)
        elif plain.endswith("_last"):
            got = rows[-1]
        else:
            first = int(step) - 1 if stage == "agc" else 0
            got = rows[first :: int(step)][:, stored["sel"]]
        assert_close(got, stored[key], TOLERANCES[dtype][stage], f"{name} {key}")
        compared += 1
    assert compared >= 2


@pytest.mark.parametrize("fs", [8000, 16000, 22050, 44100, 48000])
def test_stored_design(fs: int) -> None:
    stored, model = load("carfac__design"), CARFAC(fs, dtype=torch.float64)
    coef = plain_carfac.rows_of(model.coef, model.n_channels)
    assert_close(model.fc, stored[f"pole_freqs_{fs}"], DESIGN)
    for row, name in enumerate(("a0", "c0", "h", "r1", "zr", "ga", "gb", "gc")):
        assert_close(coef[row], stored[f"{name}_{fs}"], DESIGN, name)
    start = plain_carfac.rows_of(model.start, model.n_channels)[0]
    assert_close(start[4], stored[f"g0_{fs}"], DESIGN)
    numbers = model.numbers.numpy()
    assert_close(numbers[2], stored[f"ac_coeff_{fs}"], DESIGN)
    assert_close(numbers[3], stored[f"detect_scale_{fs}"], DESIGN)
    lowpass, out1, in1, out2, in2, gain, rest, *resting = stored[f"ihc_two_cap_{fs}"]
    assert_close(numbers[5:], [lowpass, gain, rest, out1, in1, out2, in2], DESIGN)
    assert_close(start[11:14, 0], [*resting, rest], DESIGN)
    one_cap = CARFAC(fs, ihc="one_cap", dtype=torch.float64)
    lowpass, out, into, gain, rest, resting = stored[f"ihc_one_cap_{fs}"]
    assert_close(one_cap.numbers[5:10], [lowpass, gain, rest, out, into], DESIGN)
    for stage in range(4):
        rate, taps, iterations, low, middle, high, mix = stored[f"agc{stage + 1}_{fs}"]
        ends = [low, low, middle, high, high] if taps == 5 else [0, low, middle, high, 0]
        assert_close(model.agc[stage], [rate, *ends, mix], DESIGN, f"stage {stage}")
        assert int(model.counts[stage, 2]) == iterations


@pytest.mark.parametrize(
    ("fs", "ears", "more"),
    [
        (LOW_HZ, 1, {}),  # smoothing in several iterations
        (LOW_HZ, 3, {}),
        (7000.0, 1, {"delay_per_stage": True}),
        (LOW_HZ, 1, {"linear": True, "open_loop": True}),
        (LOW_HZ, 1, {"ohc_health": 0.3}),
        (LOW_HZ, 2, {"ohc_health": 0.3, "health_start": "ohc_health"}),
        (LOW_HZ, 2, {"ohc_health": [[0.2], [0.9]]}),
        (LOW_HZ, 2, {"audiogram": {250: 10, 1000: 60}}),
        (LOW_HZ, 2, {"agc_kwargs": {"decimation": [5, 3], "time_constants": [0.003, 0.02],
                                    "agc1_scales": [1.0, 1.2], "agc2_scales": [1.5, 2.0],
                                    "stage_gain": 1.5}}),
    ],
)  # fmt: skip
def test_as_the_plain_loop(fs: float, ears: int, more: dict[str, Any]) -> None:
    model = CARFAC(fs, n_ears=ears, dtype=torch.float64, **more)
    x = noise(ears, 330, rms=0.2)  # five steps of the slowest gain control
    made = model(x if ears > 1 else x[0])
    for name, wanted in plain_carfac.run(model, x.numpy()).items():
        assert_close(made[name], wanted if ears > 1 else wanted[0], SAME, name)


def test_iterations_of_the_smoothing() -> None:
    assert CARFAC(LOW_HZ).counts[:, 2].max() > 1


def test_silence_stays_silent() -> None:
    made = CARFAC(dtype=torch.float64)(torch.zeros(4000, dtype=torch.float64))
    assert made["bm"].abs().max() == 0
    assert made["nap"].abs().max() < 1e-14
    assert made["agc_memory"].abs().max() < 1e-14


def test_linear_in_open_loop() -> None:
    model = CARFAC(linear=True, open_loop=True, dtype=torch.float64)
    x, y = noise(2, 1000)
    assert_close(model(x - 3.0 * y)["bm"], model(x)["bm"] - 3.0 * model(y)["bm"], SAME)


@pytest.mark.parametrize("u", [0.0, 0.5, 1.0])
def test_gain_at_0_hz_is_one(u: float) -> None:
    """A constant of 1 leaves every channel as 1; the high-pass of 20 Hz is switched off."""
    model = CARFAC(
        16000, linear=True, open_loop=True, ohc_health=u, car_kwargs={"ac_corner_hz": 0.0},
        dtype=torch.float64,
    )  # fmt: skip
    settled = model(torch.ones(20000, dtype=torch.float64))["bm"][:, -1]
    np.testing.assert_allclose(settled, 1.0, atol=1e-9)


@pytest.mark.parametrize("ears", [2, 3])
def test_equal_ears_are_one_ear(ears: int) -> None:
    x = noise(2000)
    one = CARFAC(16000, dtype=torch.float64)(x)
    both = CARFAC(16000, n_ears=ears, dtype=torch.float64)(x)
    for name, wanted in one.items():
        for ear in range(ears):
            assert_close(both[name][ear], wanted, SAME, name)


def test_ears_are_coupled() -> None:
    """A loud sound in one ear lowers the response of the other ear."""
    soft, loud = noise(2, 8000)
    model = CARFAC(16000, n_ears=2, dtype=torch.float64)
    alone = model(torch.stack((soft, soft)))["nap"][0, :, -2000:].mean()
    beside = model(torch.stack((soft, 30.0 * loud)))["nap"][0, :, -2000:].mean()
    assert beside < alone


def test_health_in_open_loop_acts_from_the_start() -> None:
    x = noise(1000, rms=0.005)
    sick = CARFAC(16000, open_loop=True, ohc_health=0.0, dtype=torch.float64)
    assert "health_start=ohc_health" in repr(sick)
    well = CARFAC(16000, open_loop=True, health_start="healthy", dtype=torch.float64)
    forced = CARFAC(16000, open_loop=True, ohc_health=0.0, health_start="healthy",
                    dtype=torch.float64)  # fmt: skip
    assert sick(x)["bm"].square().mean() < 0.5 * well(x)["bm"].square().mean()
    assert torch.equal(forced(x)["bm"], well(x)["bm"])


def test_compression() -> None:
    """The response to a tone grows by far less than the tone, and less without healthy cells."""
    t = torch.arange(6000, dtype=torch.float64) / 16000
    tone = torch.sin(2 * torch.pi * 1000 * t)

    def growth(**more: Any) -> float:
        model = CARFAC(16000, dtype=torch.float64, **more)
        levels = [model(a * tone)["bm"][:, -2000:].square().mean().sqrt() for a in (1e-3, 1e-1)]
        return float(levels[1] / levels[0])

    assert growth() < 60 < growth(linear=True, open_loop=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_frames_are_means_of_samples(dtype: str) -> None:
    fs, x = 22050, noise(2, 5000).to(DTYPES[dtype])
    model = CARFAC(fs, n_ears=2, frame_rate_hz=130.0, dtype=DTYPES[dtype])
    hop, every, frames = fs / 130.0, model(x), model.outputs(x)
    bounds = [int(np.ceil(i * hop)) for i in range(int(5000 / hop) + 1)]
    memory = every["agc_memory"][:, 0].repeat_interleave(8, -1)
    before = torch.nn.functional.pad(memory, (8, 0))[..., :5000]  # acts from the next sample on
    wanted = {"nap": every["nap"], "bm": every["bm"].square(), "agc": before}
    for name, values in wanted.items():
        means = torch.stack([values[..., a:b].mean(-1) for a, b in pairwise(bounds)])
        means = means.sqrt() if name == "bm" else means
        tolerance = Tolerance(1e-12 if dtype == "float64" else 2e-5, "another order of sums")
        assert_close(frames[name], means.flatten(1), tolerance, name)
    assert list(model.outputs(x, ("agc",))) == ["agc"]


@pytest.mark.parametrize("cuts", [(0, 1, 9), (3, 64, 500), (777,)])
def test_chunks_have_the_bits_of_the_whole(cuts: tuple[int, ...]) -> None:
    x, model = noise(2, 2, 1000).float(), CARFAC(16000, n_ears=2)
    whole, state, parts = model(x), None, []
    for part in torch.tensor_split(x, cuts, -1):
        made, state = model.stages(part, state)
        parts.append(made)
    for name, wanted in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts], -1), wanted), name


def test_a_batch_is_its_clips() -> None:
    x, model = noise(2, 3, 900).float(), CARFAC(16000)
    together = model(x)
    for i, j in product(range(2), range(3)):
        alone = model(x[i, j])
        for name, values in together.items():
            assert torch.equal(values[i, j], alone[name])


@pytest.mark.parametrize("rms", [1e-8, 1e-4, 1.0, 300.0])
def test_levels_of_30_to_150_db_are_finite(rms: float) -> None:
    for ihc in ("two_cap", "one_cap", "just_hwr"):
        made = CARFAC(16000, ihc=ihc)(noise(3000, rms=rms).float())
        assert all(values.isfinite().all() for values in made.values())


def test_not_a_number_is_not_hidden() -> None:
    x = noise(200).float()
    x[100] = torch.nan
    for ihc in ("two_cap", "one_cap", "just_hwr"):
        made = CARFAC(16000, ihc=ihc)(x)
        assert made["bm"][:, 100:].isnan().all() and made["nap"][:, 100:].isnan().all()
        assert made["bm"][:, :100].isfinite().all()


@pytest.mark.parametrize("samples", [0, 1, 7, 8])
def test_short_signals(samples: int) -> None:
    made = CARFAC(16000)(torch.zeros(samples))
    assert made["bm"].shape == (65, samples)
    assert made["agc_memory"].shape == (4, 65, samples // 8)


@pytest.mark.parametrize(
    ("fs", "channels"),
    [(8000, 53), (16000, 65), (22050, 71), (32000, 77), (44100, 83), (48000, 84)],
)
def test_number_of_channels(fs: int, channels: int) -> None:
    assert CARFAC(fs).n_channels == len(CARFAC(fs).fc) == channels


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"fs": 0}, "sampling rate"),
        ({"fs": 100}, "4 channels or more"),
        ({"agc_kwargs": {"agc2_scales": [200.0] * 4}}, "passes"),
        ({"n_ears": 0}, "n_ears"),
        ({"ihc": "three_cap"}, "two_cap, one_cap, just_hwr"),
        ({"ohc_health": 1.5}, "between 0 and 1"),
        ({"ohc_health": [0.5, 0.5]}, "ears and channels"),
        ({"health_start": "ill"}, "health_start"),
        ({"frame_rate_hz": 30000.0}, "at most fs"),
        ({"car_kwargs": {"zeta": 1}}, "no argument 'zeta'"),
        ({"car_kwargs": {"min_pole_hz": -1}}, "min_pole_hz"),
        ({"agc_kwargs": {"decimation": [8]}}, "one length"),
        ({"ihc": "just_hwr", "ihc_kwargs": {"tau_lpf": 1e-4}}, "has none"),
    ],
)
def test_refused_arguments(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        CARFAC(**wrong)


def test_refused_signals_and_states() -> None:
    model = CARFAC(16000, n_ears=2)
    with pytest.raises(ShapeError, match="2, time"):
        model(torch.zeros(3, 100))
    with pytest.raises(ShapeError, match="int64"):
        CARFAC(16000)(torch.zeros(100, dtype=torch.int64))
    _, state = model.stages(torch.zeros(2, 100))
    with pytest.raises(StateError):
        model.stages(torch.zeros(4, 2, 100), state)
    with pytest.raises(StateError):
        CARFAC(16000, n_ears=2, dtype=torch.float64).stages(torch.zeros(2, 100), state)
    assert list(model.stages(torch.zeros(2, 100), None, ("nap",))[0]) == ["nap"]
    with pytest.raises(ParameterError, match="no stage"):
        model.stages(torch.zeros(2, 100), None, ("spikes",))
    with pytest.raises(ParameterError, match="no output"):
        model.outputs(torch.zeros(2, 100), ("spikes",))


class TestCARFAC(ModelConformance):
    """The model as jobs run it."""

    model, fs_hz = "carfac", 16000
    other_params = {"ihc": "one_cap"}  # noqa: RUF012


class TestCARFACOfTwoEars(ModelConformance):
    """Two ears, at a rate whose frames are no whole number of samples."""

    model, fs_hz = "carfac", 22050
    params, other_params = {"n_ears": 2}, {"n_ears": 2, "linear": True}
