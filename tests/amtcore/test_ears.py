"""Ear filters against scipy's designs, their own tables, and tones; FIR kernels by two routes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.signal
import torch
from torch import Tensor

from amtcore import Osses2021, Paulick2024
from amtcore.errors import ParameterError, ShapeError
from amtcore.filter_design import fir2, minimum_phase, resample_taps
from amtcore.kernels.operations.fir import FIR
from amtcore.kernels.operators import operator
from amtcore.stages.ears import (
    FIELD_TYPES,
    MIDDLE_EAR_TYPES,
    MIDDLE_EARS,
    PHASE_TYPES,
    HeadphoneFilter,
    MiddleEarFilter,
    OuterMiddleEarFilter,
    transfer_db,
)
from amtcore.stages.fir import FirStage
from amtcore.tables import load_table

from ..compare import FLOAT64, KERNEL32, KERNEL64, Tolerance, assert_close
from ..short import only, spread
from .compiling import one_graph

fir = operator(FIR)

FS = 16000
GRADIENT = Tolerance(1e-9, "float64 gradients by two routes", 1e-12)


def _noise(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _tone(f_hz: float, samples: int, fs: float = FS) -> Tensor:
    return torch.sin(2 * math.pi * f_hz / fs * torch.arange(samples, dtype=torch.float64))


# --- the FIR family ---


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("taps", "stride"), [(1, 1), (17, 1), (513, 1), (81, 4), (7, 3), (64, 2)])
def test_fir_kernel_equals_the_sum_over_taps(taps: int, stride: int, dtype: str) -> None:
    kind, tolerance = {
        "float32": (torch.float32, KERNEL32), "float64": (torch.float64, KERNEL64)
    }[dtype]  # fmt: skip
    x, h = _noise(3, 1500, dtype=kind), _noise(taps, dtype=kind, seed=1)
    got = fir(x, h, stride)
    assert_close(got, fir(x, h, stride, backend="reference"), tolerance, "plain sum")
    whole = scipy.signal.lfilter(h.double().numpy(), 1, x.double().numpy())
    assert_close(got, whole[:, taps - 1 :: stride], tolerance, "scipy")


@pytest.mark.parametrize("stride", [1, 4])
def test_fir_segments_join(stride: int) -> None:
    """A long row is cut into segments of 32768 outputs for the threads."""
    x, h = _noise(2, 40_000 * stride), _noise(9, seed=1)
    whole = scipy.signal.lfilter(h.numpy(), 1, x.numpy())[:, 8::stride]
    assert_close(fir(x, h, stride), whole, KERNEL64)


@pytest.mark.parametrize("stride", [1, 4])
def test_fir_gradcheck(stride: int) -> None:
    x, h = _noise(2, 23).requires_grad_(), _noise(6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, h: fir(x, h, stride), (x, h))


@pytest.mark.parametrize("stride", [1, 3])
def test_fir_gradients_equal_autograd_through_the_plain_sum(stride: int) -> None:
    gradients = []
    for backend in ("cpu", "reference"):
        x, h = _noise(2, 700).requires_grad_(), _noise(65, seed=1).requires_grad_()
        fir(x, h, stride, backend=backend).square().sum().backward()
        gradients.append((x.grad, h.grad))
    for got, expected in zip(*gradients, strict=True):
        assert_close(got, expected, GRADIENT)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize(("first", "count"), [(-8, 300), (-3, 40), (7, 60), (-700, 5), (900, 3)])
def test_fir_meets_silence_around_the_signal(
    first: int, count: int, stride: int, backend: str
) -> None:
    x, h = _noise(2, 500), _noise(9, seed=1)
    silence = torch.zeros(2, 2000, dtype=x.dtype)
    around = torch.cat((silence, x, silence), -1)[:, 2000 + first :]
    wanted = fir(around, h, stride, count=count)
    assert torch.equal(fir(x, h, stride, first, count), wanted)
    assert_close(fir(x, h, stride, first, count, backend), wanted, KERNEL64)


@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize(("first", "count"), [(-4, 9), (3, 5), (-2, 14)])
def test_fir_gradcheck_around_the_signal(first: int, count: int, stride: int) -> None:
    x, h = _noise(2, 23).requires_grad_(), _noise(6, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, h: fir(x, h, stride, first, count), (x, h))


def test_fir_of_nothing_is_nothing() -> None:
    assert fir(_noise(2, 4), _noise(5)).shape == (2, 0)
    with pytest.raises(ShapeError, match="input's dtype"):
        fir(_noise(2, 8), _noise(5, dtype=torch.float32))


# --- design ---


@pytest.mark.parametrize("order", [64, 510, 4094])
def test_fir2_is_scipys(order: int) -> None:
    f_hz = torch.tensor([0.0, 500.0, 1200.0, 5000.0, 8000.0], dtype=torch.float64)
    gain = torch.tensor([0.0, 1.0, 3.0, 0.2, 0.0], dtype=torch.float64)
    points = 512 if order <= 512 else 4096
    expected = scipy.signal.firwin2(order + 1, f_hz.numpy(), gain.numpy(), nfreqs=points + 1, fs=FS)
    assert_close(fir2(order, f_hz, gain, FS), expected, FLOAT64)


@pytest.mark.parametrize(("up", "down"), [(1, 4), (1, 3), (10, 441), (3, 2)])
def test_resampling_low_pass_is_scipys(up: int, down: int) -> None:
    half = 10 * max(up, down)
    expected = up * scipy.signal.firwin(2 * half + 1, 1 / max(up, down), window=("kaiser", 5.0))
    assert_close(resample_taps(up, down), expected, FLOAT64)


@pytest.mark.parametrize("order", [510, 512])
def test_minimum_phase_keeps_the_magnitude_and_comes_early(order: int) -> None:
    f_hz = torch.tensor([0.0, 500.0, 1000.0, 3000.0, 8000.0], dtype=torch.float64)
    gain = torch.tensor([0.3, 1.0, 2.0, 0.3, 0.1], dtype=torch.float64)
    linear = fir2(order, f_hz, gain, FS)
    early = minimum_phase(linear)
    fine = 1024
    folded = Tolerance(1e-4, "the cepstrum folds onto itself after 513 points")
    assert_close(torch.fft.fft(early, fine).abs(), torch.fft.fft(linear, fine).abs(), folded)
    energy, later = (h.square().cumsum(0) for h in (early, linear))
    assert (energy >= later - 1e-3 * later[-1]).all() and energy[20] > 0.9 * energy[-1]


# --- the filters ---


def _steady_gain(stage: FirStage, f_hz: float, fs: float) -> tuple[float, float]:
    """Gain of a tone and how far the output is from that gain times the input."""
    x = _tone(f_hz, 12000, fs)
    y = stage(x)
    middle = slice(5000, 7000)
    gain = float((y[middle] * x[middle]).sum() / x[middle].square().sum())
    return gain, float((y - gain * x)[middle].abs().max())


@pytest.mark.parametrize("f_hz", [250.0, 1000.0, 2721.273584, 4441.534834])
def test_zero_phase_gives_the_tables_gain_and_no_delay(f_hz: float) -> None:
    table = load_table("headphone_pralong_carlile_1996")
    expected = np.interp(f_hz, table["frequency_hz"], table["amplitude_gain"])
    stage = HeadphoneFilter(FS, order=1024, phase_type="zero", dtype=torch.float64)
    gain, residue = _steady_gain(stage, f_hz, FS)
    assert gain == pytest.approx(expected, rel=0.05) and residue < 2e-3


def test_delay_options_are_one_response_with_three_delays() -> None:
    x = _noise(1500)
    taps = HeadphoneFilter(FS, phase_type="amt", dtype=torch.float64).fir_coeffs.numpy()
    causal = scipy.signal.lfilter(taps, 1, np.concatenate((x.numpy(), np.zeros(257))))
    for phase_type, advance in (("amt", 257), ("zero", 256)):
        stage = HeadphoneFilter(FS, phase_type=phase_type, dtype=torch.float64)
        assert stage.advance == advance
        assert_close(stage(x), causal[advance : advance + 1500], FLOAT64, phase_type)
        late = HeadphoneFilter(
            FS, phase_type=phase_type, compensate_delay=False, dtype=torch.float64
        )
        assert_close(late(x), causal[:1500], FLOAT64, phase_type)
    assert HeadphoneFilter(FS, phase_type="minimum").advance == 0


@pytest.mark.parametrize("fs", [8000, 16000, 20000, 22050, 44100, 96000])
@pytest.mark.parametrize("filter_type", MIDDLE_EAR_TYPES)
def test_middle_ear_peaks_at_0_db(filter_type: str, fs: int) -> None:
    stage = MiddleEarFilter(fs, filter_type, dtype=torch.float64)
    f_hz, response = stage.get_frequency_response(16384)
    level = 20 * torch.log10(response.abs())
    assert float(level[:-1].max()) == pytest.approx(0.0, abs=1e-6)
    assert 400 < float(f_hz[level.argmax()]) < 1300
    plain = MiddleEarFilter(fs, filter_type, normalize_gain=False, dtype=torch.float64)
    x = _noise(400)
    scaled = plain(x) * 10 ** (stage.gain_normalization / 20)
    assert_close(stage(x), scaled, FLOAT64)


#: Orders and rates at which filters are compared with independent designs.
_ORDERS, _RATES = (2, 4, 6, 8, 14, 30, 64, 200, 510, 512, 514, 1022), (4000, 16000, 48000, 192000)


@pytest.mark.parametrize(("ear", "fs"), spread(4, ["headphone", *MIDDLE_EAR_TYPES], _RATES))
def test_every_order_and_phase_is_the_table_by_scipys_designs(ear: str, fs: int) -> None:
    """Compare designs where the gain is within 40 dB of its peak.

    The phase options have one magnitude. Taps are scipy's `firwin2`, and its `minimum_phase` of
    these taps on a grid of 32768 points.
    """

    @functools.cache
    def build(order: int, phase_type: str, dtype: torch.dtype = torch.float64) -> Any:
        options: dict[str, Any] = {"order": order, "phase_type": phase_type, "dtype": dtype}
        if ear == "headphone":
            return HeadphoneFilter(fs, **options)
        return MiddleEarFilter(fs, ear, normalize_gain=False, **options)

    for order in (*_ORDERS, 1, 3, 7, 511):
        phases = ("amt",) if order % 2 else PHASE_TYPES
        if order % 2 and ear != "headphone":
            continue
        linear = build(order, "amt" if ear == "headphone" else "zero").fir_coeffs.numpy()
        points = build(order, phases[0]).frequency_data
        f_hz, gain = np.pad(points.numpy(), ((1, 0), (0, 0))).T
        if f_hz[-1] < fs / 2:
            f_hz, gain = np.append(f_hz, fs / 2), np.append(gain, 0.0)
        if order % 2:
            gain[-1] = 0.0  # an odd order has none there, and firwin2 wants that said
        grid = max(512, 2 ** math.ceil(math.log2(order)) if order > 512 else 0) + 1
        if order + 1 < grid:  # else scipy has no such filter; golden data have order 512
            table = scipy.signal.firwin2(order + 1, f_hz, gain, nfreqs=grid, fs=fs)
            shape = linear / np.abs(linear).max() * np.abs(table).max()
            assert_close(shape, table, Tolerance(1e-9, "float64 designs by two hands", 1e-9))
        wanted = np.abs(np.fft.rfft(linear, 2**15))
        inside = wanted > 0.01 * wanted.max()
        for phase in phases:
            taps = build(order, phase).fir_coeffs.numpy()
            got = np.abs(np.fft.rfft(taps, 2**15))
            off_db = 20 * np.log10(got[inside] / wanted[inside])
            assert np.abs(off_db).max() < 0.6, f"order {order}, {phase}: {off_db.max()} dB"
            if phase == "minimum":
                early = scipy.signal.minimum_phase(linear, "homomorphic", 2**15, half=False)
                assert np.linalg.norm(taps - early) < 0.05 * np.linalg.norm(early), order
            single = build(order, phase, torch.float32).fir_coeffs.double().numpy()
            assert np.linalg.norm(single - taps) < 1e-5 * np.linalg.norm(taps), (order, phase)


@pytest.mark.parametrize("order", only([6], [2, 6, 14, 64]))
def test_gradients_of_minimum_phase_designs_of_any_order(order: int) -> None:
    for build in (HeadphoneFilter, MiddleEarFilter):
        stage = build(48000, order=order, learnable=True, dtype=torch.float64)
        before, x = stage.gains.detach().clone(), _noise(1, order + 6)

        def output(gains: Tensor, stage: FirStage = stage, x: Tensor = x) -> Tensor:
            return torch.func.functional_call(stage, {"gains": gains}, (x,))

        scale = before.abs().max()
        gains = (before / scale).requires_grad_()
        assert torch.autograd.gradcheck(lambda g: output(g * scale), (gains,), atol=1e-5)  # noqa: B023


def test_stapes_velocity_of_goode() -> None:
    """At 600 Hz and 104 dB SPL the stapes moves 0.229 um from peak to peak."""
    stage = MiddleEarFilter(44100, phase_type="zero", normalize_gain=False, dtype=torch.float64)
    gain, _ = _steady_gain(stage, 600.0, 44100)
    peak_pa = 20e-6 * 10 ** (104 / 20) * math.sqrt(2)
    assert gain * peak_pa == pytest.approx(2 * math.pi * 600 * 0.22909e-6 * 2, rel=0.05)


@pytest.mark.parametrize("fs", [32000, 44100, 96000])
@pytest.mark.parametrize("field_type", FIELD_TYPES)
@pytest.mark.parametrize("compensation_type", MIDDLE_EARS)
def test_outer_middle_ear_is_the_tables_db_end_to_end(
    compensation_type: str, field_type: str, fs: int
) -> None:
    stage = OuterMiddleEarFilter(fs, compensation_type, field_type, dtype=torch.float64)
    f_hz, level = stage.get_frequency_response(65536)
    inside = (f_hz >= 80) & (f_hz <= 15000)
    expected = transfer_db(f_hz[inside].numpy(), compensation_type, field_type)
    assert np.abs(level[inside].numpy() - expected).max() < 0.1
    gain, residue = _steady_gain(stage, 1000.0, fs)
    at_1k = float(transfer_db(np.array([1000.0]), compensation_type, field_type)[0])
    assert 20 * math.log10(gain) == pytest.approx(at_1k, abs=0.01) and residue < 1e-4


def test_the_two_middle_ears_differ_at_1250_hz() -> None:
    levels = []
    for kind in MIDDLE_EARS:
        f_hz, level = OuterMiddleEarFilter(32000, kind).get_transfer_function()
        levels.append(float(level[f_hz == 1250.0]))
    assert levels == pytest.approx([3.2 - 3.2, 3.2 - 4.5], abs=1e-5)


def _stages(phase_type: str) -> list[FirStage]:
    return [
        HeadphoneFilter(FS, 64, phase_type),
        MiddleEarFilter(FS, "jepsen2008", 64, phase_type),
        OuterMiddleEarFilter(FS, order=128),
    ]


@pytest.mark.parametrize("phase_type", PHASE_TYPES)
@pytest.mark.parametrize("cuts", [[], [1], [10, 40, 41], [33, 33, 500, 690]])
def test_chunks_equal_the_whole_exactly(cuts: list[int], phase_type: str) -> None:
    x = _noise(2, 3, 700, dtype=torch.float32)
    for stage in _stages(phase_type):
        state, parts, edges = None, [], [0, *cuts, 700]
        for begin, end in pairwise(edges):
            y, state = stage.stream(x[..., begin:end], state, end == 700)
            parts.append(y)
            ready = 0 if end < stage.advance else end - stage.advance
            assert sum(p.shape[-1] for p in parts) == (700 if end == 700 else ready)
        assert torch.equal(torch.cat(parts, -1), stage(x))


@pytest.mark.parametrize("phase_type", PHASE_TYPES)
def test_learnable_gains_redesign_the_filter_in_the_graph(phase_type: str) -> None:
    x = _noise(2, 300)
    # Mixtures of all outputs: gradcheck runs the design backward once for each mixture.
    mixtures = _noise(8, 40, seed=1)
    for build in (
        lambda **k: HeadphoneFilter(FS, 32, phase_type, **k),
        lambda **k: MiddleEarFilter(FS, "jepsen2008", 32, phase_type, **k),
    ):
        fixed = build(dtype=torch.float64)
        stage = build(learnable=True, dtype=torch.float64)
        assert_close(stage(x).detach(), fixed(x), FLOAT64)
        before = stage.gains.detach().clone()

        def output(gains: Tensor, stage: FirStage = stage) -> Tensor:
            return mixtures @ torch.func.functional_call(stage, {"gains": gains}, (x[0, :40],))

        scale = before.abs().max()
        gains = (before / scale).requires_grad_()
        assert torch.autograd.gradcheck(lambda g: output(g * scale), (gains,), atol=1e-5)  # noqa: B023
        with torch.no_grad():
            stage.gains *= 2.0
        expected = fixed(x) * (2.0 if stage.__class__ is HeadphoneFilter else 1.0)
        assert_close(stage(x).detach(), expected, FLOAT64)


@pytest.mark.parametrize(
    ("build", "fs"),
    [
        (HeadphoneFilter, 44100),
        (OuterMiddleEarFilter, 44100),
        pytest.param(MiddleEarFilter, 44100, marks=pytest.mark.long),  # the design of the first
        *(
            pytest.param(build, 8000, marks=pytest.mark.long)
            for build in (HeadphoneFilter, MiddleEarFilter, OuterMiddleEarFilter)
        ),
    ],
)
def test_learnable_filters_compile_to_one_graph(build: Callable[..., FirStage], fs: int) -> None:
    """Where a table ends below half the rate, and where it ends there."""
    x, stage = _noise(1, 200), build(fs, order=64, learnable=True, dtype=torch.float64)
    results = []
    for call in (one_graph(stage), stage):
        y = call(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), list(stage.parameters()))))
    for got, expected in zip(*results, strict=True):
        assert_close(got.detach(), expected.detach(), FLOAT64)


def test_learnable_transfer_function_is_learnt() -> None:
    """A gain in dB at one place is found again from the filter's output."""
    torch.manual_seed(0)
    target = OuterMiddleEarFilter(8000, order=64, dtype=torch.float64)
    stage = OuterMiddleEarFilter(8000, order=64, learnable=True, dtype=torch.float64)
    assert list(dict(stage.named_parameters())) == ["tf_gains_raw"]
    with torch.no_grad():
        stage.tf_gains += 3.0
    x = _noise(1, 500)
    optimiser = torch.optim.Adam(stage.parameters(), lr=0.02)  # 0.2 dB
    losses = []
    for _ in range(25):
        optimiser.zero_grad()
        loss = (stage(x) - target(x)).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.02 * losses[0]


def test_parameters_and_representation() -> None:
    stage = HeadphoneFilter(8000, learnable=True)
    parameters = stage.get_parameters()
    assert parameters["num_frequency_points"] == len(stage.frequency_data) == 12
    assert parameters["frequency_range"] == [125.0, pytest.approx(3589.453635)]
    assert stage.group_delay == 256 and "phase_type=minimum" in repr(stage)
    middle = MiddleEarFilter(8000, learnable=True)
    assert sorted(dict(middle.named_parameters())) == ["gain_normalization_raw", "gains_raw"]
    assert middle.get_parameters()["filter_type"] == "lopezpoveda2001"
    assert repr(HeadphoneFilter(16000)) == (
        "HeadphoneFilter(fs=16000, order=512, phase_type=minimum, learnable=False)"
    )
    assert repr(MiddleEarFilter(16000)).startswith(
        "MiddleEarFilter(fs=16000, filter_type=lopezpoveda2001, order=512, "
    )
    text = repr(OuterMiddleEarFilter(16000, order=64))
    assert "compensation_type=tfOuterMiddle1997, field_type=free" in text


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: HeadphoneFilter(FS, order=0), "order must be"),
        (lambda: HeadphoneFilter(FS, phase_type="linear"), "phase_type must be one of"),
        (lambda: HeadphoneFilter(FS, 33, "zero"), "'zero' needs an even order, got 33: .*take 34"),
        (lambda: HeadphoneFilter(FS, 33), "'minimum' needs an even order, got 33"),
        (lambda: MiddleEarFilter(FS, order=511), "'minimum' needs an even order, got 511"),
        (lambda: MiddleEarFilter(FS, order=1, phase_type="amt"), "'amt' needs an even order"),
        (
            lambda: Osses2021(FS, 300, 900, headphone_kwargs={"order": 99}, phase_type="minimum"),
            "even order, got 99",
        ),
        (lambda: Paulick2024(FS, 300, 900, 2, outerear_kwargs={"order": 99}), "even order, got 99"),
        (lambda: MiddleEarFilter(FS, "goode1994"), "filter_type must be one of"),
        (lambda: OuterMiddleEarFilter(FS, "tf"), "compensation_type must be one of"),
        (lambda: OuterMiddleEarFilter(FS, field_type="wood"), "field_type must be one of"),
        (lambda: OuterMiddleEarFilter(FS, flow=5.0), "20 <= flow"),
        (lambda: OuterMiddleEarFilter(FS, order=33), "even order"),
    ],
)
def test_bad_arguments(build, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ParameterError, match=message):
        build()


#: Filters that tests only read.
_EARS: dict[str, Callable[[], Any]] = {
    "headphone": lambda: HeadphoneFilter(FS, order=512, phase_type="zero", dtype=torch.float64),
    "middle": lambda: MiddleEarFilter(FS, order=300, phase_type="amt", dtype=torch.float64),
    "outer and middle": lambda: OuterMiddleEarFilter(FS, order=1024, dtype=torch.float64),
}
_ear = functools.cache(lambda name: _EARS[name]())


@pytest.mark.parametrize("nfft", [1, 2, 7, 100, 511, 512, 513, 1000, 8192])
@pytest.mark.parametrize("name", _EARS)
def test_frequency_response_for_any_number_of_points(name: str, nfft: int) -> None:
    """The spectrum of the impulse response at `nfft` frequencies: no taps are cut off."""
    ear = _ear(name)
    f_hz, response = ear.get_frequency_response(nfft)
    f_hz64, response64 = ear.get_frequency_response(np.int64(nfft))
    assert torch.equal(f_hz, f_hz64) and torch.equal(response, response64)
    assert f_hz.tolist() == pytest.approx([k * FS / nfft for k in range(nfft // 2 + 1)])
    impulse = torch.zeros(4096, dtype=torch.float64)
    impulse[2048] = 1.0
    _, expected = scipy.signal.freqz(ear(impulse).numpy(), worN=f_hz.numpy(), fs=FS)
    expected = expected * np.exp(2j * np.pi * f_hz.numpy() / FS * 2048)
    if not response.is_complex():  # in dB
        expected = 20 * np.log10(np.abs(expected))
    np.testing.assert_allclose(response.numpy(), expected, atol=1e-6)
    for wrong in (0, -1, 1.5, True, "8192"):
        with pytest.raises(ParameterError, match="nfft must be a whole number between 1"):
            ear.get_frequency_response(wrong)
