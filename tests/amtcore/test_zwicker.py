"""Zwicker's loudness against stored stages, the published numbers of ISO 532-1, and itself."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from amtcore import ZwickerLoudness
from amtcore.errors import NonFiniteError, ParameterError, ShapeError
from amtcore.features.frame_models import ZWICKER
from amtcore.kernels.devices import use_backend
from amtcore.kernels.operations.zwicker import (
    BANDS,
    DECAY,
    SLOPES,
    decay_reference,
    slopes_reference,
)
from amtcore.kernels.operators import operator
from amtcore.models.zwicker import FS, SHARES, loudness_level
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close
from ..short import only, spread
from .golden_files import DTYPES, load

STEADY = ("iso_b3_tone250_80", "iso_b3_tone1000_60", "iso_b3_tone4000_40")
SPECTRA = ("iso_b2_signal1", "spectra_free", "spectra_diffuse", *STEADY)
SIGNALS = ("am_noise_diffuse", "iso_b4_signal10", "iso_b4_signal13")
STAGES = {"float64": Tolerance(1e-6, "arrays stored in float32"),
          "float32": Tolerance(1e-5, "float32 after the filters")}  # fmt: skip
LOUDNESS = {"float64": Tolerance(1e-9, "order of sums"), "float32": STAGES["float32"]}
OVER_TIME = {"float64": Tolerance(1e-7, "rounding picks the branch of the decay on plateaus"),
             "float32": STAGES["float32"]}  # fmt: skip
ROUNDED = Tolerance(1e-3, "MoSQITo rounds loudness to 0.001 sone")
NO_MARGIN = Tolerance(2e-3, "MoSQITo has no margin of 0.0001 Bark at the edges of bands")
SAME64 = Tolerance(1e-12, "fused multiply-add and another order of sums", 1e-15)
#: Sone, or sone/Bark, from the published numbers; the standard allows 5 % or 0.1.
PUBLISHED = 0.02
KEYS = [(f"zwicker__{name}", key) for name in SPECTRA for key in ("core", "n", "n_spec")]
KEYS += [(f"zwicker__{name}", key) for name in STEADY for key in ("levels", "signal n")]
KEYS += [
    (f"zwicker_tv__{name}", key)
    for name in SIGNALS
    for key in ("levels@8", "core@8", "decayed@8", "n", "n_inst", "n_spec@8", "statistics")
]
#: Cases of `benchmarks.exactness`.
CASES = [case for case in KEYS if case[1] != "signal n"]


@functools.cache
def built(**arguments: Any) -> ZwickerLoudness:
    """Return a model that tests only read: the design of its filters takes 0.2 CPU seconds."""
    return ZwickerLoudness(**arguments)


def model(name: str, dtype: str = "float64") -> ZwickerLoudness:
    method = "stationary" if name.startswith("zwicker__") else "time_varying"
    return built(method=method, field=str(load(name).get("field", "free")), dtype=DTYPES[dtype])


@functools.cache
def over_time(name: str, dtype: str) -> dict[str, Tensor]:
    """Return the outputs of a model over time, and the stages before them, (frame, column)."""
    zwicker, signal = model(name, dtype), torch.from_numpy(load(name)["input"])
    powers, _ = zwicker.band_powers(signal.double().unsqueeze(0))
    levels = zwicker.band_levels(powers)
    core = zwicker.core_loudness((10 ** (levels / 10)).to(DTYPES[dtype]))
    stages = {"levels": levels[0], "core": core[0], "decayed": zwicker.decayed(core)[0][0]}
    return stages | zwicker(signal)


def of_array(name: str, key: str, dtype: str) -> tuple[Tensor | np.ndarray, np.ndarray]:
    """Return an array of the model and the stored one."""
    stored, zwicker = load(name), model(name, dtype)
    signal = torch.from_numpy(stored.get("input", np.zeros(0, np.float32)))
    if name.startswith("zwicker_tv__"):
        array, _, step = key.partition("@")
        found = over_time(name, dtype)[array]
        if key == "statistics":
            return found[0], np.append(stored["n_max"], stored["n1_n5_n10_n50"])
        return (found[:: int(step)] if step else found[:, 0]), stored[key]
    if key == "levels":
        return zwicker.band_levels(zwicker.mean_powers(signal.double().unsqueeze(0))), stored[key]
    if key == "signal n":
        return zwicker(signal)["n"][:, 0], stored["n"]
    levels = torch.from_numpy(stored["levels"])
    if key == "core":
        return zwicker.core_loudness((10 ** (levels / 10)).to(DTYPES[dtype])), stored["core"]
    n, specific = zwicker.of_levels(levels)
    return (n if key == "n" else specific), stored[key]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "key"), KEYS, ids=[f"{n}-{k}" for n, k in KEYS])
def test_stored_array(name: str, key: str, dtype: str) -> None:
    got, expected = of_array(name, key, dtype)
    bounds = STAGES
    if key in ("n", "signal n"):
        bounds = LOUDNESS
    if name.startswith("zwicker_tv__") and key in ("n", "n_inst", "statistics"):
        bounds = OVER_TIME
    assert_close(got, expected, bounds[dtype], f"{name} {key}")


@pytest.mark.parametrize("name", SIGNALS)
def test_mosqito_over_time(name: str) -> None:
    stored = load(f"zwicker_tv__{name}")
    found = over_time(f"zwicker_tv__{name}", "float64")
    assert_close(found["n"][:, 0], stored["n_mosqito"], ROUNDED)
    assert_close(found["n_inst"][:, 0], stored["n_inst_mosqito"], ROUNDED)
    assert_close(found["n_spec"][::8], stored["n_spec_mosqito@8"], NO_MARGIN)


@pytest.mark.parametrize("name", SPECTRA)
def test_mosqito_of_levels(name: str) -> None:
    stored = load(f"zwicker__{name}")
    n, specific = model(f"zwicker__{name}").of_levels(torch.from_numpy(stored["levels"]))
    assert_close(n, stored["n_mosqito"], ROUNDED)
    assert_close(specific, stored["n_spec_mosqito"], NO_MARGIN)


@pytest.mark.parametrize("dtype", DTYPES)
def test_published_numbers(dtype: str) -> None:
    """Annex B: levels (B.2), tones (B.3), pulses (B.4)."""
    for name in STEADY:
        stored = load(f"zwicker__{name}")
        found = model(f"zwicker__{name}", dtype)(torch.from_numpy(stored["input"]))
        assert abs(float(found["n"]) - stored["n_iso"]) < PUBLISHED
        assert np.abs(found["n_spec"][0].numpy() - stored["n_spec_iso"]).max() < PUBLISHED
    stored = load("zwicker__iso_b2_signal1")
    n, specific = model("zwicker__iso_b2_signal1", dtype).of_levels(
        torch.from_numpy(stored["levels"])
    )
    assert round(float(n), 3) == stored["n_iso"]
    assert np.abs(specific[0].numpy() - stored["n_spec_iso"]).max() < PUBLISHED
    stored = load("zwicker_tv__iso_b4_signal10")
    found = over_time("zwicker_tv__iso_b4_signal10", dtype)
    assert abs(float(found["n"].max()) - stored["n_max_iso"]) < PUBLISHED
    stored = load("zwicker_tv__iso_b4_signal13")
    found = over_time("zwicker_tv__iso_b4_signal13", dtype)
    assert np.abs(found["n"][:, 0].numpy() - stored["n_iso"]).max() < PUBLISHED
    at_8_5_bark = found["n_spec"][:, 84].numpy()
    assert np.abs(at_8_5_bark - stored["n_spec_at_8_5_bark_iso"]).max() < PUBLISHED


def tone(level_db: float, f_hz: float = 1000.0, fs: float = FS, seconds: float = 1.0) -> Tensor:
    t = torch.arange(round(seconds * fs), dtype=torch.float64) / fs
    return 2**0.5 * 2e-5 * 10 ** (level_db / 20) * torch.sin(2 * torch.pi * f_hz * t)


def test_a_sone_is_40_phon() -> None:
    found = built(method="stationary", dtype=torch.float64)(tone(40.0))
    assert abs(float(found["n"]) - 1.0) < 1e-3
    assert abs(float(found["level"]) - 40.0) < 0.02
    over_time = built()(tone(40.0))
    assert abs(float(over_time["level"][-1]) - 40.0) < 0.05
    sone = torch.tensor([0.0, 0.1, 0.5, 1.0, 2.0, 16.0], dtype=torch.float64)
    expected = [3.0, 40 * 0.1005**0.35, 40 * 0.5005**0.35, 40.0, 50.0, 80.0]
    np.testing.assert_allclose(loudness_level(sone), expected, rtol=1e-12)


@pytest.mark.parametrize("fs", [44100, 32000, 96000])
def test_other_rates_agree(fs: int) -> None:
    made, here = built(fs=fs), built()
    found, wanted = (m(tone(60.0, fs=m.fs, seconds=0.5)) for m in (made, here))
    assert found["n"].shape == wanted["n"].shape == (250, 1)
    assert_close(found["n"][50:], wanted["n"][50:], Tolerance(1e-3, "the resampler"))


@pytest.mark.parametrize(
    ("fs", "method"), spread(2, [44100, 48000, 32000, 96000], ["time_varying", "stationary"])
)
def test_frames_of_short_signals(fs: int, method: str) -> None:
    zwicker, hop = built(fs=fs, method=method), fs // 500
    lengths = (0, 1, 2, 3, hop - 1, hop, hop + 1, 2 * hop, 2 * hop + 1)
    for samples in lengths if method == "time_varying" else lengths[:4]:  # a row for any length
        found = zwicker(torch.zeros(samples))
        for name, grid in zwicker.grids.items():
            assert found[name].shape == (grid.n_frames(samples), grid.width), (name, samples)


def test_batches_and_extremes() -> None:
    x = torch.stack([tone(level, seconds=0.06) for level in (-200.0, 20.0, 60.0, 119.0)])
    zwicker = built(dtype=torch.float64)
    together = zwicker(x.view(2, 2, -1))
    assert together["n_spec"].shape == (2, 2, 30, 240)
    for i, signal in enumerate(x):
        for name, alone in zwicker(signal).items():
            got = together[name].flatten(0, 1)[i]
            np.testing.assert_allclose(got, alone, rtol=1e-12, atol=1e-12)
    assert not together["n"][0, 0].any() and bool((together["level"][0, 0] == 3.0).all())
    with pytest.warns(UserWarning, match="above 120 dB"):
        loud = zwicker.of_levels(torch.full((28,), 125.0))[0]
    assert bool(loud > 0)


def test_wrong_signals_are_refused() -> None:
    zwicker = built()
    with pytest.raises(NonFiniteError, match="finite"):
        zwicker(torch.tensor([0.0, torch.nan]))
    with pytest.raises(ShapeError, match="floating-point"):
        zwicker(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ShapeError, match="28 levels"):
        zwicker.of_levels(torch.zeros(27))
    with pytest.raises(ParameterError, match="no output"):
        zwicker.outputs(torch.zeros(4), ("sone",))
    with pytest.raises(ParameterError, match="whole signals"):
        built(method="stationary").stream(torch.zeros(4))


def test_wrong_arguments_are_refused() -> None:
    for wrong in ({"field": "near"}, {"method": "both"}, {"skip": -1.0}, {"fs": 0.0}):
        with pytest.raises(ParameterError, match=next(iter(wrong))):
            ZwickerLoudness(**wrong)


def noisy(frames: int, columns: int) -> Tensor:
    """Core loudness of any kind: rising, falling, 0, equal to a limit of the slopes."""
    generator = torch.Generator().manual_seed(3)
    core = 8 * torch.rand(frames, columns, generator=generator, dtype=torch.float64) ** 4
    core[core < 0.02] = 0.0
    core[::7, 3], core[::5, 8], core[1::5, 8] = 1.36, 0.0, 0.42
    core[:, 20:] = 0.0
    return core


def test_kernels_equal_the_plain_loops() -> None:
    zwicker = built(dtype=torch.float64)
    core = noisy(200, 32)
    tables = (zwicker.edges, zwicker.slope_limits, zwicker.slopes, 4)
    plain = slopes_reference(core, *tables)
    for got, wanted in zip(operator(SLOPES)(core, *tables), plain, strict=True):
        assert_close(got, wanted, SAME64)
    given = core[:40].view(2, 20, 32), zwicker.decay_coef, core[40:46].view(2, 3, 32)
    for got, wanted in zip(operator(DECAY)(*given), decay_reference(*given), strict=True):
        assert_close(got, wanted, SAME64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_for_gpus_give_the_same_bits(dtype: torch.dtype) -> None:
    """The kernels that a GPU runs, in the interpreter of its machine code."""
    zwicker = built(dtype=dtype)
    core = noisy(8, 32).to(dtype)
    decay = core[:4].view(2, 2, 32), zwicker.decay_coef, core[:6].view(2, 3, 32)
    bands = noisy(2, 30)[:, :27], zwicker.band_coef, noisy(18, 32).view(2, 9, 32)
    for operation, given in ((DECAY, decay), (BANDS, bands)):
        wanted = operator(operation)(*given)
        with use_backend("interpreted"):
            found = operator(operation)(*given)
        for got, expected in zip(found, wanted, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("method", only(["stationary"], ["time_varying", "stationary"]))
def test_gradients_are_finite_differences(method: str) -> None:
    zwicker = ZwickerLoudness(method=method, skip=0.0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    x = 0.02 * torch.randn(250, generator=generator, dtype=torch.float64)
    along = torch.randn(250, generator=generator, dtype=torch.float64)

    def total(signal: Tensor) -> Tensor:
        found = zwicker.outputs(signal, ("n", "n_spec"))
        return found["n"].sum() + (found["n_spec"] * torch.arange(240)).sum()

    leaf = x.clone().requires_grad_()
    total(leaf).backward()
    step = 1e-7
    with torch.no_grad():
        difference = (total(x + step * along) - total(x - step * along)) / (2 * step)
    np.testing.assert_allclose(float(leaf.grad @ along), float(difference), rtol=1e-4)
    assert_close(total(leaf).detach(), total(x), Tolerance(1e-9, "other sections"))


class TestZwicker(ModelConformance):
    """All streams over time, the statistics of the clip among them."""

    model = ZWICKER
    other_params = {"field": "diffuse"}  # noqa: RUF012


class TestZwickerFrames(ModelConformance):
    """Without the statistics, a long recording may be cut."""

    model = ZWICKER
    streams = {"n": {}, "n_spec": {}, "n_inst": {}, "sharpness": {}}  # noqa: RUF012
    other_params = {"field": "diffuse"}  # noqa: RUF012
    seconds = 0.6


class TestZwickerStationary(ModelConformance):
    """One row a clip, at another rate."""

    model = ZWICKER
    params = {"method": "stationary"}  # noqa: RUF012
    streams = {"n": {}, "n_spec": {}, "level": {}, "sharpness": {}}  # noqa: RUF012
    other_params = {"method": "stationary", "field": "diffuse"}  # noqa: RUF012
    fs_hz = 44100.0


def test_statistics_of_more_than_nine_hours() -> None:
    """A ramp from 1 to 0, whose quantiles are the shares."""
    n = torch.linspace(0.0, 1.0, 2**24 + 16).flip(0).unsqueeze(0)
    n_max, *exceeded = built()._statistics(n, True)[0, 0].tolist()
    assert n_max == 1.0
    assert exceeded == pytest.approx(list(SHARES.values()), abs=1e-6)
