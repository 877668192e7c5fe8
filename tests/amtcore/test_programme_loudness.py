"""Programme loudness: stored outputs, published tests of the EBU, chunks, layouts, gradients."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from amtcore import ProgrammeLoudness
from amtcore.errors import NonFiniteError, ParameterError, ShapeError
from amtcore.features.registry import build_extractor
from amtcore.models.programme_loudness import k_weighting_rows, loudness_range
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close, relative_error
from .golden_files import DTYPES, GOLDEN, load, names

FILES = names("bs1770")
OUTPUTS = ("momentary", "short_term", "integrated", "lra", "true_peak")
CASES = [(name, key) for name in FILES for key in ("k_weighted", *OUTPUTS)]
#: In LU or dB; the K-weighted signal is stored in float32.
STORED = {"float64": Tolerance(1e-7, "arrays in float32", 1e-6),
          "float32": Tolerance(1e-7, "levels in float32", 1e-3)}  # fmt: skip
EBU = json.loads((GOLDEN / "ebu_test_cases.json").read_text())
RATES = (44100, 48000)


def _signal(name: str) -> tuple[Tensor, ProgrammeLoudness, dict[str, np.ndarray]]:
    stored = load(name)
    x = torch.from_numpy(stored["input"].T * float(stored["input_scale"]))
    return x[0] if len(x) == 1 else x, stored["fs"].item(), stored


def _meter(name: str, dtype: str) -> tuple[Tensor, ProgrammeLoudness]:
    x, fs, stored = _signal(name)
    return x, ProgrammeLoudness(fs, layout=str(stored["layout"]), dtype=DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "key"), CASES)
def test_stored_array(name: str, key: str, dtype: str) -> None:
    (x, meter), stored = _meter(name, dtype), load(name)
    if key == "k_weighted":
        (at,) = (each for each in stored if each.startswith("kweighted@"))
        got, expected = meter.k_weighted(x)[:, :: int(at.partition("@")[2])].T, stored[at]
    else:
        got, expected = meter.outputs(x, (key,))[key].flatten(), stored[key].ravel()
    assert_close(got, expected, STORED[dtype], f"{name} {key}")


@pytest.mark.parametrize("name", FILES)
def test_another_program_agrees(name: str) -> None:
    """pyloudnorm's high-pass has another gain at other rates than 48 kHz."""
    x, meter = _meter(name, "float64")
    found, stored = meter(x), load(name)
    within = 1e-6 if stored["fs"] == 48000 else 0.1
    for key in ("momentary", "integrated"):
        apart = found[key].numpy().ravel() - stored[f"{key}_pyloudnorm"].ravel()
        assert np.abs(apart).max() < within


def test_the_filters_are_those_of_the_standard() -> None:
    """Tables 1 and 2 of Annex 1, as the response to an impulse at 48 kHz."""
    shelf = (
        [1.53512485958697, -2.69169618940638, 1.19839281085285],
        [-1.69065929318241, 0.73248077421585],
    )
    high = [1.0, -2.0, 1.0], [-1.99004745483398, 0.99007225036621]
    y = np.zeros(64)
    y[0] = 1.0
    for b, a in (shelf, high):
        x, y = y, np.zeros(64)
        for t in range(64):
            past = [(x[t - k] if t >= k else 0.0, y[t - k] if t >= k else 0.0) for k in range(3)]
            y[t] = sum(b[k] * past[k][0] for k in range(3)) - a[0] * past[1][1] - a[1] * past[2][1]
    impulse = torch.zeros(64, dtype=torch.float64)
    impulse[0] = 1.0
    got = ProgrammeLoudness(48000, dtype=torch.float64).k_weighted(impulse)[0]
    assert_close(got, y, Tolerance(1e-11, "digits of the tables"))


def _tones(case: dict[str, Any], fs: int) -> Tensor:
    """Sines of 1 kHz with a running phase, channel by channel."""
    parts = case["segments"] * case.get("repeat", 1)
    levels = [torch.tensor(part["level_dbfs"], dtype=torch.float64) for part in parts]
    counts = [round(part["seconds"] * fs) for part in parts]
    gains = [
        (10 ** (level / 20))[:, None].expand(-1, n) for level, n in zip(levels, counts, strict=True)
    ]
    t = torch.arange(sum(counts), dtype=torch.float64)
    return torch.cat(gains, -1) * torch.sin(2 * math.pi * 1000 / fs * t)


@pytest.mark.parametrize("name", [name for name in EBU if "segments" in EBU[name]])
def test_ebu_loudness(name: str) -> None:
    case, fs = EBU[name], RATES[len(name) % 2]
    found = ProgrammeLoudness(fs, layout=case["layout"])(_tones(case, fs))
    checked = 0
    for key, output in (("integrated_lufs", "integrated"), ("short_term_lufs", "short_term"),
                        ("momentary_lufs", "momentary"), ("lra_lu", "lra")):  # fmt: skip
        if case.get(key) is not None:
            assert float((found[output] - case[key]).abs().max()) <= case["tolerance"]
            checked += 1
    assert checked


@pytest.mark.parametrize("fs", [44100, 48000, 96000, 192000])
@pytest.mark.parametrize("name", [name for name in EBU if "true_peak_dbtp" in EBU[name]])
def test_ebu_true_peak(name: str, fs: int) -> None:
    """The tones are relative to 48 kHz, so that higher rates see more of them."""
    case, rate = EBU[name], max(fs / 48000, 1.0)
    n = round(case["seconds"] * fs)
    t = torch.arange(n, dtype=torch.float64)
    phase = 2 * math.pi * t * case["f_over_fs"] / rate + math.radians(case["phase_deg"])
    edge = ((torch.minimum(t, n - 1 - t) / (case["fade_s"] * fs)).clamp(max=1.0) * math.pi).cos()
    x = case["amplitude"] * torch.sin(phase) * (0.5 - 0.5 * edge)
    peak = float(ProgrammeLoudness(fs)(x)["true_peak"])
    low, high = case["tolerance"]
    assert case["true_peak_dbtp"] + low <= peak <= case["true_peak_dbtp"] + high


@pytest.mark.parametrize(
    ("fs", "within"), [(8000, 0.21), (16000, 0.06), (44100, 0.01), (96000, 0.02)]
)
def test_a_sine_of_full_scale_reads_3_01_at_any_rate(fs: int, within: float) -> None:
    tone = torch.sin(2 * math.pi * 997 / fs * torch.arange(2 * fs, dtype=torch.float64))
    found = ProgrammeLoudness(fs, dtype=torch.float64)(tone)
    assert float(found["integrated"]) == pytest.approx(-3.01, abs=within)
    stereo = ProgrammeLoudness(fs, "stereo", dtype=torch.float64)
    assert float(stereo(tone)["integrated"]) == float(found["integrated"]), "never dual mono"
    both = stereo(torch.stack((tone, tone)))["integrated"]
    assert float(both - found["integrated"]) == pytest.approx(10 * math.log10(2))


def test_weights_of_channels() -> None:
    x = 0.1 * torch.randn(6, 48000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    power = [10 ** (float(ProgrammeLoudness(48000, dtype=torch.float64)(each)["integrated"]) / 10)
             for each in x]  # fmt: skip
    for layout, weights in (("5.1", (1, 1, 1, 0, 1.41, 1.41)), ((0.5,) * 6, (0.5,) * 6)):
        found = ProgrammeLoudness(48000, layout, dtype=torch.float64)(x)["integrated"]
        wanted = 10 * math.log10(sum(w * p for w, p in zip(weights, power, strict=True)))
        assert float(found) == pytest.approx(wanted, abs=1e-9)
    assert ProgrammeLoudness(48000, "5.1")(x)["true_peak"].shape == (1, 6)


@pytest.mark.parametrize("fs", [8000, 11025, 22050])
@pytest.mark.parametrize("names_", [None, ("momentary",), ("short_term", "lra"), ("true_peak",)])
def test_chunks_are_the_whole_at_odd_steps(fs: int, names_: tuple[str, ...] | None) -> None:
    """At 11025 Hz every second step is a sample longer."""
    x = torch.randn(2, round(4.27 * fs), generator=torch.Generator().manual_seed(2))
    meter = ProgrammeLoudness(fs, "stereo", lra_pad=0.5)
    whole = meter.outputs(x, names_)
    cuts = [0, 0, 1, 33, 34, fs // 10, fs // 10 + 1, 3 * fs, 3 * fs + 7, x.shape[-1]]
    parts, state = [], None
    for a, b in zip(cuts, [*cuts[1:], cuts[-1]], strict=True):
        made, state = meter.stream(x[:, a:b], state, last=a == cuts[-1], names=names_)
        parts.append(made)
    assert list(whole) == list(names_ or OUTPUTS)
    for name, values in whole.items():
        assert len(values) == meter.grids[name].n_frames(x.shape[-1])
        assert torch.equal(torch.cat([part[name] for part in parts]), values), name


def test_long_signals_are_pieces() -> None:
    x = torch.randn(8000 * 61, generator=torch.Generator().manual_seed(3))
    meter = ProgrammeLoudness(8000)
    whole, state = meter.stream(x, None, True)
    assert state.received == len(x)
    assert all(torch.equal(values, whole[name]) for name, values in meter(x).items())


def test_blocks_begin_at_whole_samples() -> None:
    """The second block of 0.4 s at 11025 Hz begins at sample 1102, not 1102.5."""
    meter = ProgrammeLoudness(11025, dtype=torch.float64)
    x = torch.randn(4410 + 1102, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    power = meter.k_weighted(x)[0].square()
    found = meter.outputs(x, ("momentary",))["momentary"][:, 0]
    wanted = [-0.691 + 10 * math.log10(float(power[a : a + 4410].mean())) for a in (0, 1102)]
    assert_close(found, wanted, Tolerance(1e-12, "order of sums"))
    assert len(meter.outputs(x[:-1], ("momentary",))["momentary"]) == 1


def test_a_batch_equals_its_items_and_gain_adds() -> None:
    x = 0.1 * torch.randn(3, 2, 8000 * 4, generator=torch.Generator().manual_seed(5))
    meter = ProgrammeLoudness(8000, "stereo")
    found = meter(x)
    assert found["true_peak"].shape == (3, 1, 2) and found["momentary"].shape == (3, 37, 1)
    for i in range(3):
        alone = meter(x[i])
        assert all(torch.equal(found[name][i], alone[name]) for name in OUTPUTS)
    louder = meter(4.0 * x)
    for name in OUTPUTS:
        gain = 0.0 if name == "lra" else 20 * math.log10(4)
        assert_close(louder[name] - found[name], torch.full_like(found[name], gain),
                     Tolerance(1e-5, "levels in float32", 1e-5))  # fmt: skip


def test_silence_and_short_clips() -> None:
    meter = ProgrammeLoudness(48000, "stereo")
    found = meter(torch.zeros(2, 4 * 48000))
    assert bool((found["momentary"] == -math.inf).all()) and len(found["short_term"]) == 11
    assert float(found["integrated"]) == -math.inf and math.isnan(float(found["lra"]))
    assert found["true_peak"].tolist() == [[-math.inf, -math.inf]]
    empty = meter(torch.zeros(2, 0))
    assert {name: len(values) for name, values in empty.items()} == dict.fromkeys(OUTPUTS, 0)
    one = meter(torch.tensor([0.5]))
    assert len(one["momentary"]) == 0 and float(one["integrated"]) == -math.inf
    assert float(one["true_peak"][0, 0]) == pytest.approx(20 * math.log10(0.5), abs=1e-4)


def test_loudness_range_counts_without_interpolation() -> None:
    levels = torch.arange(-40.0, -19.0, dtype=torch.float64)  # 21 values: places 2 and 19
    power = 10 ** ((levels + 0.691) / 10)
    assert float(loudness_range(power)) == pytest.approx(17.0)
    quiet = torch.cat((power, torch.full((50,), 1e-8, dtype=torch.float64)))
    assert float(loudness_range(quiet)) == pytest.approx(17.0), "below both gates"


def test_appended_silence_counts_for_the_range_alone() -> None:
    fs = 8000
    x = 0.1 * torch.sin(2 * math.pi * 500 / fs * torch.arange(4 * fs, dtype=torch.float64))
    plain, padded = (ProgrammeLoudness(fs, lra_pad=pad, dtype=torch.float64) for pad in (0.0, 1.5))
    one, other = plain(x), padded(x)
    appended = plain(torch.cat((x, torch.zeros(12000, dtype=torch.float64))))
    assert float(other["lra"]) == float(appended["lra"]) != float(one["lra"])
    assert all(torch.equal(one[name], other[name]) for name in OUTPUTS if name != "lra")


def test_gradients() -> None:
    """Against finite differences, away from gates and from equal peaks."""
    fs = 8000
    meter = ProgrammeLoudness(fs, "stereo", dtype=torch.float64)
    x = 0.1 * torch.randn(2, 3300, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    along = torch.randn(2, 3300, dtype=torch.float64, generator=torch.Generator().manual_seed(7))

    def value(signal: Tensor) -> Tensor:
        found = meter.outputs(signal, ("momentary", "integrated", "true_peak"))
        return sum((values.sum() for values in found.values()), torch.zeros(()))

    learner = x.clone().requires_grad_()
    value(learner).backward()
    got = float((learner.grad * along).sum())
    step = 1e-6
    with torch.no_grad():
        wanted = float(value(x + step * along) - value(x - step * along)) / (2 * step)
    assert got == pytest.approx(wanted, rel=1e-5)
    assert float(value(x)) == pytest.approx(float(value(learner).detach()), rel=1e-12)
    silent = torch.zeros(2, 3300, dtype=torch.float64, requires_grad=True)
    meter.outputs(silent, ("momentary",))["momentary"].sum().backward()
    assert bool(torch.isfinite(silent.grad).all())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"fs": 4000}, "fs must be a sampling rate"),
        ({"fs": 11026}, "multiple of 5 Hz"),
        ({"layout": "quad"}, "layout must be one of mono"),
        ({"layout": [1.0, -1.0]}, "every one of layout"),
        ({"lra_pad": -1.0}, "lra_pad"),
        ({"dtype": torch.float16}, "dtype must be"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        ProgrammeLoudness(**({"fs": 48000} | arguments))


def test_wrong_signals() -> None:
    meter = ProgrammeLoudness(48000, "stereo")
    for wrong in (torch.zeros(3, 100), torch.zeros(100, dtype=torch.int16), torch.tensor(1.0)):
        with pytest.raises(ShapeError):
            meter(wrong)
    for bad in (math.nan, math.inf):
        with pytest.raises(NonFiniteError):
            meter(torch.tensor([0.0, bad, 0.0]))
    with pytest.raises(ParameterError, match="no output 'loudness'"):
        meter.outputs(torch.zeros(100), ("loudness",))
    assert "layout='stereo'" in repr(meter) and k_weighting_rows(48000.0).shape == (2, 6)


def test_a_job_stores_silence_as_a_number() -> None:
    extractor = build_extractor("programme_loudness", fs_hz=8000, params={"layout": "stereo"},
                                streams=dict.fromkeys(OUTPUTS))  # fmt: skip
    (made,) = extractor.extract([np.zeros(8000 * 4, np.float32)])
    assert {name: float(values.max()) for name, values in made.items()} == {
        **dict.fromkeys(OUTPUTS, -120.0), "lra": 0.0}  # fmt: skip
    noise = 0.1 * np.random.default_rng(8).standard_normal((2, 8000)).astype(np.float32)
    (loud,) = extractor.extract([noise])
    own = ProgrammeLoudness(8000, "stereo")(torch.from_numpy(noise))
    assert relative_error(loud["momentary"], own["momentary"]) == 0.0


class TestProgrammeLoudness(ModelConformance):
    """Long enough for momentary and short-term blocks."""

    model, fs_hz, seconds = "programme_loudness", 8000.0, 3.4
    other_params = {"layout": "stereo"}  # noqa: RUF012


class TestProgrammeLoudnessOfChannels(ModelConformance):
    """A clip of one channel, or of all six."""

    model, seconds = "programme_loudness", 0.6
    params = {"layout": "5.1", "lra_pad": 3.0}  # noqa: RUF012
    other_params = {"layout": "5.1", "lra_pad": 1.0}  # noqa: RUF012
    streams = {"momentary": {}, "true_peak": {}}  # noqa: RUF012
