"""Filter design against scipy.signal and against what the filters do to tones and energy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.signal
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from amtcore.filter_design import (
    bandpass1_rows,
    bandpass2_rows,
    butter1,
    butter2,
    butterworth_rows,
    fir2,
    first_order_rows,
    interpolate,
    lowpass2_rows,
    minimum_phase,
    resample_taps,
    section_rows,
)
from tests.short import drawn

FS_HZ = 44100.0
LENGTH = 4096
CUTOFFS_HZ = [1.0, 20.0, 150.0, 1000.0, 8000.0, 21000.0]
Array = NDArray[np.float64]


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def impulse() -> Array:
    x = np.zeros(LENGTH)
    x[0] = 1.0
    return x


def state_variable(rows: Tensor, x: Array) -> Array:
    """The section as a plain loop: two trapezoidal integrators and their mixture."""
    a1, a2, a3, m0, m1, m2 = rows.tolist()
    y, first, second = np.empty_like(x), 0.0, 0.0
    for n, sample in enumerate(x.tolist()):
        v3 = sample - second
        v1 = a1 * first + a2 * v3
        v2 = second + a2 * first + a3 * v3
        first, second = 2 * v1 - first, 2 * v2 - second
        y[n] = m0 * sample + m1 * v1 + m2 * v2
    return y


def in_series(sections: list[Tensor], x: Array) -> Array:
    """Sections of six numbers, or of three: b0, b1, a1 of a first-order filter."""
    for rows in sections:
        if len(rows) == 3:
            b0, b1, a1 = rows.tolist()
            x = np.asarray(scipy.signal.lfilter([b0, b1], [1.0, a1], x))
        else:
            x = state_variable(rows, x)
    return x


def check(got: Array, expected: Array) -> None:
    """Impulse responses to 1e-9 of the largest tap: two orders of float64 sums."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9 * np.abs(expected).max())


class TestButterworth:
    @pytest.mark.parametrize("cutoff_hz", CUTOFFS_HZ)
    @pytest.mark.parametrize("kind", ["low", "high"])
    def test_first_order_coefficients(self, cutoff_hz: float, kind: str) -> None:
        b, a = butter1(cutoff_hz, FS_HZ, kind)
        wanted_b, wanted_a = scipy.signal.butter(1, cutoff_hz, kind, fs=FS_HZ)
        np.testing.assert_allclose(b, wanted_b, rtol=1e-10)
        np.testing.assert_allclose(a, wanted_a, rtol=1e-10)

    @pytest.mark.parametrize("cutoff_hz", CUTOFFS_HZ)
    def test_second_order_coefficients(self, cutoff_hz: float) -> None:
        b, a = butter2(cutoff_hz, FS_HZ)
        wanted_b, wanted_a = scipy.signal.butter(2, cutoff_hz, fs=FS_HZ)
        np.testing.assert_allclose(b, wanted_b, rtol=1e-7)
        np.testing.assert_allclose(a, wanted_a, rtol=1e-10)

    @pytest.mark.parametrize("order", range(1, 8))
    @pytest.mark.parametrize("kind", ["low", "high"])
    @pytest.mark.parametrize("cutoff_hz", [150.0, 1000.0, 8000.0])
    def test_sections_of_any_order(self, order: int, kind: str, cutoff_hz: float) -> None:
        sections = butterworth_rows(tensor(cutoff_hz)[0], FS_HZ, order, kind)
        assert [len(rows) for rows in sections] == [6] * (order // 2) + [3] * (order % 2)
        sos = scipy.signal.butter(order, cutoff_hz, kind, fs=FS_HZ, output="sos")
        check(in_series(sections, impulse()), scipy.signal.sosfilt(sos, impulse()))

    @pytest.mark.parametrize("order", [1, 2, 5])
    def test_half_power_at_the_cutoff_and_none_behind(self, order: int) -> None:
        """-3.01 dB at the cutoff, whatever the order; unit gain at 0 Hz; zero at half the rate."""
        cutoff_hz = FS_HZ / 16  # a whole number of periods in the response's length
        h = in_series(butterworth_rows(tensor(cutoff_hz)[0], FS_HZ, order, "low"), impulse())
        gain = np.abs(np.fft.rfft(h))
        assert gain[0] == pytest.approx(1.0, abs=1e-9)
        assert gain[LENGTH // 16] == pytest.approx(math.sqrt(0.5), abs=1e-9)
        assert gain[-1] == pytest.approx(0.0, abs=1e-9)
        # Monotonic: maximally flat without ripple.
        assert (np.diff(gain) < 1e-12).all()

    @pytest.mark.parametrize("order", [1, 2, 3, 4])
    def test_low_and_high_share_the_power(self, order: int) -> None:
        """Butterworth: |low|^2 + |high|^2 = 1 at every frequency."""
        power = 0.0
        for kind in ("low", "high"):
            h = in_series(butterworth_rows(tensor(1500.0)[0], FS_HZ, order, kind), impulse())
            power = power + np.abs(np.fft.rfft(h)) ** 2
        np.testing.assert_allclose(power, 1.0, atol=1e-9)

    def test_rows_of_many_cutoffs_are_those_of_each(self) -> None:
        cutoffs = tensor(100.0, 900.0, 5000.0)
        rows = lowpass2_rows(cutoffs, FS_HZ)
        assert rows.shape == (3, 6)
        for cutoff_hz, row in zip(cutoffs, rows, strict=True):
            b, a = scipy.signal.butter(2, cutoff_hz.item(), fs=FS_HZ)
            check(state_variable(row, impulse()), scipy.signal.lfilter(b, a, impulse()))
            torch.testing.assert_close(row, butterworth_rows(cutoff_hz, FS_HZ, 2, "low")[0])

    def test_a_learnable_cutoff_has_the_gradient_of_its_difference(self) -> None:
        cutoff = tensor(700.0).requires_grad_()
        assert torch.autograd.gradcheck(lambda f: lowpass2_rows(f, FS_HZ), (cutoff,), eps=1e-3)
        edges = (tensor(300.0).requires_grad_(), tensor(800.0).requires_grad_())
        assert torch.autograd.gradcheck(
            lambda low, high: bandpass2_rows(low, high, FS_HZ), edges, eps=1e-3
        )


class TestBandpass:
    EDGES = ((5.0, 12.0), (100.0, 300.0), (900.0, 1100.0), (2000.0, 12000.0))

    @pytest.mark.parametrize(("low_hz", "high_hz"), EDGES)
    def test_first_order(self, low_hz: float, high_hz: float) -> None:
        rows = bandpass1_rows(tensor(low_hz), tensor(high_hz), FS_HZ)[0]
        sos = scipy.signal.butter(1, (low_hz, high_hz), "band", fs=FS_HZ, output="sos")
        check(state_variable(rows, impulse()), scipy.signal.sosfilt(sos, impulse()))

    @pytest.mark.parametrize(("low_hz", "high_hz"), EDGES)
    def test_second_order(self, low_hz: float, high_hz: float) -> None:
        rows = bandpass2_rows(tensor(low_hz), tensor(high_hz), FS_HZ)[0]
        assert rows.shape == (12,)
        sos = scipy.signal.butter(2, (low_hz, high_hz), "band", fs=FS_HZ, output="sos")
        got = in_series([rows[:6], rows[6:]], impulse())
        check(got, scipy.signal.sosfilt(sos, impulse()))

    def test_edges_are_half_power_and_the_middle_passes(self) -> None:
        """Edges on the response's frequency grid; the middle in prewarped frequency."""
        low, high = 128, 256
        rows = bandpass2_rows(tensor(low * FS_HZ / LENGTH), tensor(high * FS_HZ / LENGTH), FS_HZ)[0]
        gain = np.abs(np.fft.rfft(in_series([rows[:6], rows[6:]], impulse())))
        assert gain[[low, high]] == pytest.approx(math.sqrt(0.5), abs=1e-6)
        assert gain.max() == pytest.approx(1.0, abs=1e-3)
        assert low < gain.argmax() < high
        assert gain[0] < 1e-9
        assert gain[-1] < 1e-9


class TestRows:
    @given(
        radius=st.floats(0.05, 0.99),
        angle=st.floats(0.05, 3.0),
        zeros=st.tuples(st.floats(-1.5, 1.5), st.floats(-1.5, 1.5)),
        scale=st.floats(0.2, 5.0),
    )
    @drawn(40)
    def test_any_stable_section(
        self, radius: float, angle: float, zeros: tuple[float, float], scale: float
    ) -> None:
        """Any numerator over any conjugate pole pair, with any leading coefficient."""
        a = scale * np.array([1.0, -2 * radius * math.cos(angle), radius**2])
        b = np.poly(zeros)
        rows = section_rows(torch.from_numpy(b), torch.from_numpy(a))
        x = impulse()[:256]
        expected = scipy.signal.lfilter(b, a, x)
        np.testing.assert_allclose(
            state_variable(rows, x), expected, rtol=0, atol=1e-7 * np.abs(expected).max()
        )

    def test_first_order_rows_are_normalised(self) -> None:
        rows = first_order_rows(tensor(2.0, 4.0), tensor(2.0, -1.0))
        assert rows.tolist() == [1.0, 2.0, -0.5]


class TestFir:
    @pytest.mark.parametrize("order", [64, 200, 510, 700])
    def test_frequency_sampling_is_scipy_s(self, order: int) -> None:
        """scipy's firwin2 with as many grid points: MATLAB's fir2 by another hand."""
        f_hz = np.array([0.0, 500.0, 3000.0, 9000.0, FS_HZ / 2])
        gain = np.array([0.0, 0.5, 2.0, 1.0, 0.1])
        points = 512 if order <= 512 else 1024
        expected = scipy.signal.firwin2(order + 1, f_hz, gain, nfreqs=points + 1, fs=FS_HZ)
        got = fir2(order, torch.from_numpy(f_hz), torch.from_numpy(gain), FS_HZ).numpy()
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)

    def test_linear_phase(self) -> None:
        taps = fir2(128, tensor(0.0, 4000.0, FS_HZ / 2), tensor(1.0, 0.3, 0.0), FS_HZ)
        torch.testing.assert_close(taps, taps.flip(0), rtol=0, atol=1e-15)

    @given(at=st.lists(st.floats(0, 10), min_size=1, max_size=20))
    def test_interpolation_is_numpy_s(self, at: list[float]) -> None:
        points, values = tensor(0.0, 1.0, 1.5, 7.0, 10.0), tensor(3.0, -1.0, 0.0, 2.0, 2.5)
        got = interpolate(tensor(*at), points, values)
        np.testing.assert_allclose(got, np.interp(at, points, values), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("order", [64, 200, 512])
    def test_minimum_phase_keeps_the_magnitude_and_comes_earliest(self, order: int) -> None:
        f_hz, gain = tensor(0.0, 1000.0, 5000.0, FS_HZ / 2), tensor(0.5, 1.0, 2.0, 0.2)
        linear = fir2(order, f_hz, gain, FS_HZ)
        early = minimum_phase(linear)
        torch.testing.assert_close(
            torch.fft.fft(early).abs(), torch.fft.fft(linear).abs(), rtol=1e-9, atol=1e-12
        )
        energy = (torch.cumsum(early**2, 0), torch.cumsum(linear**2, 0))
        torch.testing.assert_close(energy[0][-1], energy[1][-1])
        # No response of this magnitude has more of its energy by any time.
        assert (energy[0] >= energy[1] - 1e-9 * energy[1][-1]).all()
        assert int((early**2).argmax()) < order // 16 < int((linear**2).argmax())

    def test_minimum_phase_of_a_minimum_phase_response_is_itself(self) -> None:
        """A decaying exponential has all its zeros inside the circle."""
        taps = 0.5 ** torch.arange(128, dtype=torch.float64)
        torch.testing.assert_close(minimum_phase(taps), taps, rtol=0, atol=1e-12)

    @pytest.mark.parametrize("count", [513, 515, 1025])
    def test_minimum_phase_by_scipy_s_hilbert_transform(self, count: int) -> None:
        """The phase is minus the Hilbert transform of the log magnitude."""
        taps = np.random.default_rng(count).standard_normal(count)
        magnitude = np.abs(np.fft.fft(taps))
        phase = -np.imag(scipy.signal.hilbert(np.log(magnitude)))
        expected = np.fft.ifft(magnitude * np.exp(1j * phase)).real
        got = minimum_phase(torch.from_numpy(taps)).numpy()
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)

    @pytest.mark.parametrize("count", [3, 5, 9])
    def test_minimum_phase_of_a_short_filter_by_its_zeros(self, count: int) -> None:
        """A second route: reflect every zero outside of the unit circle into it."""
        half = np.random.default_rng(count).uniform(0.2, 1.0, count // 2 + 1)
        taps = np.convolve(half, half[::-1])
        zeros = np.roots(taps)
        outside = np.abs(zeros) > 1.0
        inside = np.where(outside, 1.0 / np.conj(zeros), zeros)
        expected = np.real(np.poly(inside)) * taps[0] * np.abs(np.prod(zeros[outside]))
        got = minimum_phase(torch.from_numpy(taps)).numpy()
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)

    @pytest.mark.parametrize(("up", "down"), [(1, 2), (2, 1), (160, 441), (3, 2), (1, 5)])
    def test_resampling_taps_are_those_of_resample_poly(self, up: int, down: int) -> None:
        taps = resample_taps(up, down).numpy()
        half = 10 * max(up, down)
        expected = up * scipy.signal.firwin(2 * half + 1, 1 / max(up, down), window=("kaiser", 5.0))
        np.testing.assert_allclose(taps, expected, rtol=0, atol=1e-12)
        assert taps.sum() == pytest.approx(up)
        x = np.random.default_rng(1).standard_normal(400)
        np.testing.assert_allclose(
            scipy.signal.resample_poly(x, up, down, window=taps / up),
            scipy.signal.resample_poly(x, up, down),
            rtol=0,
            atol=1e-10,
        )
