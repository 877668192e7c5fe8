"""The stages do what their papers say: tones pass or die, levels map, states rest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.signal
import torch

from amtcore import AdaptLoop, GammatoneFilterbank, IHCEnvelope, ModulationFilterbank
from amtcore.errors import ParameterError
from amtcore.stages.adaptation import PRESETS as ADAPTATION_PRESETS
from amtcore.stages.hair_cells import PRESETS as HAIR_CELL_PRESETS

from ..compare import FLOAT64, assert_close

FS = 16000


def _tone(f_hz: float, seconds: float = 0.5) -> torch.Tensor:
    t = torch.arange(int(FS * seconds), dtype=torch.float64) / FS
    return torch.sin(2 * math.pi * f_hz * t)


def test_gammatone_gain_is_one_at_the_centre_and_falls_off() -> None:
    fc = [500.0, 1000.0, 2000.0]
    bank = GammatoneFilterbank(fc, FS, dtype=torch.float64)
    for i, f_hz in enumerate(fc):
        steady = bank(_tone(f_hz))[:, -2000:].abs().amax(-1)
        assert steady[i] == pytest.approx(1.0, rel=0.01)
        assert all(steady[j] < 0.02 for j in range(3) if j != i)


def test_gammatone_bandwidth_is_one_erb() -> None:
    """The equivalent rectangular bandwidth of the power response is that of the ear at fc."""
    bank = GammatoneFilterbank([1000.0], FS, dtype=torch.float64)
    impulse = torch.zeros(FS, dtype=torch.float64)
    impulse[0] = 1.0
    power = torch.fft.rfft(bank(impulse)[0]).abs().square()
    assert float(power.sum() / power.max()) == pytest.approx(24.7 + 1000 / 9.265, rel=0.01)


@pytest.mark.parametrize("method", [m for m, p in HAIR_CELL_PRESETS.items() if p.cutoff_hz])
def test_hair_cell_low_pass_is_scipys(method: str) -> None:
    preset = HAIR_CELL_PRESETS[method]
    x = torch.randn(2, 3, 800, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if method == "bernstein1999":
        weight = np.abs(scipy.signal.hilbert(x.numpy()))
        rectified = np.maximum(weight ** (0.23 - 1) * x.numpy(), 0) ** 2
    else:
        rectified = np.maximum(x.numpy(), 0)
    b, a = scipy.signal.butter(preset.order, preset.cutoff_hz / (FS / 2))
    expected = rectified
    for _ in range(preset.iterations):
        expected = scipy.signal.lfilter(b, a, expected)
    got = IHCEnvelope(FS, method=method, dtype=torch.float64)(x)
    assert_close(got, expected, FLOAT64, method)


def test_hilbert_envelope_of_a_modulated_tone() -> None:
    envelope = 1 + 0.5 * _tone(4.0)
    got = IHCEnvelope(FS, method="hilbert", dtype=torch.float64)(
        (envelope * _tone(2000)).view(1, 1, -1)
    )
    assert_close(got[0, 0], envelope, FLOAT64)


def test_whole_signal_methods_refuse_to_stream() -> None:
    with pytest.raises(ParameterError, match="cannot stream"):
        IHCEnvelope(FS, method="hilbert").stream(torch.zeros(1, 2, 10))


@pytest.mark.parametrize("preset", ADAPTATION_PRESETS)
def test_adaptation_maps_steady_levels(preset: str) -> None:
    loop = AdaptLoop(FS, preset=preset, dtype=torch.float64)
    x = torch.stack((torch.zeros(6 * FS), torch.ones(6 * FS))).double()
    y = loop(x)
    assert y[0].abs().max() < 1e-9
    assert float(y[1, -1]) == pytest.approx(100.0, rel=0.02)


def test_adaptation_limits_overshoot() -> None:
    step = torch.cat((torch.zeros(FS), torch.full((FS,), 0.1))).double().unsqueeze(0)
    peaks = {limit: float(AdaptLoop(FS, limit=limit, dtype=torch.float64)(step).max())
             for limit in (0.0, 10.0, 5.0)}  # fmt: skip
    assert peaks[0.0] > 5 * peaks[10.0] > 5 * peaks[5.0]


def test_adaptation_min_level_per_channel() -> None:
    levels = [1e-5, 1e-3]
    torch.manual_seed(0)
    x = torch.rand(1, 2, 500) * 0.1
    both = AdaptLoop(FS, min_level=levels)(x)
    for channel, level in enumerate(levels):
        alone = AdaptLoop(FS, min_level=level)(x[:, channel : channel + 1])
        assert torch.equal(both[:, channel : channel + 1], alone)


@pytest.mark.parametrize("f_mod", [5.0, 16.667, 77.16])
def test_modulation_filter_peaks_at_its_rate(f_mod: float) -> None:
    bank = ModulationFilterbank(FS, [4000.0], dtype=torch.float64)
    out = bank(_tone(f_mod, 2.0).view(1, 1, -1))[0][0, :, -FS:]
    power = out.square().mean(-1)
    strongest = int(power[1:].argmax()) + 1
    assert bank.mfc[0][strongest] == pytest.approx(f_mod, rel=1e-3)


def test_butterworth_modulation_filters_are_scipys() -> None:
    bank = ModulationFilterbank(FS, [4000.0], filter_type="butterworth", dtype=torch.float64)
    x = torch.randn(1, 1, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    out = bank(x)[0][0]
    sos = scipy.signal.butter(2, 2.5, fs=FS, output="sos")
    assert_close(out[0], scipy.signal.sosfilt(sos, x[0, 0].numpy()), FLOAT64, "low-pass")
    for i, mfc in enumerate(bank.mfc[0].tolist()[1:], 1):
        width = 5.0 if mfc < 10 else mfc / 2
        edges = [mfc - width / 2, mfc + width / 2]
        sos = scipy.signal.butter(1, edges, "bandpass", fs=FS, output="sos")
        assert_close(out[i], scipy.signal.sosfilt(sos, x[0, 0].numpy()), FLOAT64, f"{mfc} Hz")


def test_low_pass_in_front_of_modulation_filters_is_scipys() -> None:
    x = torch.randn(1, 1, 800, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    settings = {"preset": "jepsen2008", "dtype": torch.float64}
    b, a = scipy.signal.butter(1, 200.0 / (FS / 2))
    smooth = torch.from_numpy(scipy.signal.lfilter(b, a, x.numpy()))
    bare = ModulationFilterbank(FS, [1000.0], lowpass_cutoff=0.0, **settings)
    bank = ModulationFilterbank(FS, [1000.0], lowpass_cutoff=200.0, **settings)
    assert_close(bank(x)[0], bare(smooth)[0], FLOAT64)
    assert ModulationFilterbank(FS, [1000.0], preset="jepsen2008").lowpass_cutoff == 150.0
    assert ModulationFilterbank(FS, [1000.0]).lowpass_cutoff == 0.0


def test_jepsen_range_ends_at_a_quarter_of_the_channel() -> None:
    bank = ModulationFilterbank(FS, [80.0, 200.0, 4000.0], preset="jepsen2008")
    assert [len(mfc) for mfc in bank.mfc] == [4, 6, 8]
    assert all(float(mfc[-1]) <= limit for mfc, limit in zip(bank.mfc, (20, 50, 150), strict=True))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: GammatoneFilterbank([9000.0], FS), "half the sampling rate"),
        (lambda: GammatoneFilterbank([], FS), "non-empty"),
        (
            lambda: GammatoneFilterbank([100.0], FS, n=0),
            "n must be .* between 1 and 32",
        ),
        (lambda: GammatoneFilterbank([100.0], -1), "sampling rate in Hz above 0"),
        (lambda: GammatoneFilterbank([100.0], FS, dtype=torch.float16), "dtype must be"),
        (lambda: IHCEnvelope(FS, method="dau"), "method must be one of"),
        (lambda: IHCEnvelope(FS, order=3), "order must be a whole number between 1 and 2"),
        (lambda: AdaptLoop(FS, preset="dau"), "preset must be one of"),
        (
            lambda: AdaptLoop(FS, tau=[0.1, 0.0]),
            "tau must be .* at most 10 s",
        ),
        (lambda: AdaptLoop(FS, limit=1.00001), "too close to 1"),
        (lambda: AdaptLoop(FS, min_level=0.0), "between 0 and 1"),
        (lambda: ModulationFilterbank(FS, [100.0], Q=0.5), "above 0.5"),
        (lambda: ModulationFilterbank(FS, [100.0], preset="dau"), "preset must be one of"),
        (
            lambda: ModulationFilterbank(FS, [100.0], lowpass_cutoff=-1.0),
            "at least 0 Hz",
        ),
        (lambda: ModulationFilterbank(FS, [100.0], filter_type="fir"), "filter_type must be"),
    ],
)
def test_bad_arguments(build, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ParameterError, match=message):
        build()
