"""Outer and middle ears as FIR filters.

`HeadphoneFilter` and `MiddleEarFilter` belong to the time-domain models: Pralong and Carlile
(1996), figure 1(e); Goode et al. (1994) as extended by Lopez-Poveda and Meddis (2001); Jepsen,
Ewert and Dau (2008). Their outputs are as long as their inputs. Zero phase has the table's gain end
to end, not the square of the gain that filtering twice would give.

The `LoudnessEar` belongs to the loudness models. The tables' dB become amplitude gains 10^(dB/20),
with linear interpolation between frequencies (0 at 0 Hz). The design is frequency sampling with a
Hamming window. The published loudness programs compute this filter, which is up to 0.4 dB from the
table below 60 Hz.

The `OuterMiddleEarFilter` is a finer filter of the same tables (ANSI S3.4-2007; Moore, Glasberg and
Baer 1997): PCHIP in dB on a 1 Hz grid, within 0.1 dB from 80 Hz to 15 kHz. Programs that design for
10^(dB/10) and filter forwards and backwards apply four times the tables' dB.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.arguments import Text, checked_arguments
from amtcore.errors import ParameterError
from amtcore.filter_design import fir2, minimum_phase
from amtcore.kernels.torch_state import is_exporting
from amtcore.stages.constants import DECIBELS, Range
from amtcore.stages.fir import FirStage
from amtcore.stages.stage import Stage
from amtcore.tables import load_table
from amtcore.units import REFERENCE_PA

PHASE_TYPES = ("amt", "minimum", "zero")
MIDDLE_EAR_TYPES = ("lopezpoveda2001", "jepsen2008")

#: Level of Goode et al. (1994), and the largest gain of the jepsen2008 filter at this level.
_MEASURED_DB, _JEPSEN_PEAK = 104.0, 1e-8


class _TableFilter(FirStage):
    """A filter designed from gains at frequencies; `f_hz` spans 0 < f <= fs/2."""

    #: Values of `phase_type` with a minimum-phase filter.
    minimum_phase_types: tuple[str, ...] = ("minimum",)
    shown = "fs order phase_type learnable"

    def __init__(
        self,
        fs: float,
        order: int,
        phase_type: str,
        learnable: bool,
        compensate_delay: bool,
        dtype: torch.dtype,
        backend: str | None,
    ) -> None:
        super().__init__(fs, order, learnable, dtype, backend)
        if compensate_delay and phase_type != "minimum":
            self.advance = order // 2 if phase_type == "zero" else math.ceil((order + 1) / 2)
        if order % 2 and phase_type in (*self.minimum_phase_types, "zero"):
            raise ParameterError(
                f"phase_type {phase_type!r} needs an even order, got {order}: an odd one has its "
                f"delay between two samples and no gain at fs/2; take {order + 1}"
            )
        self.phase_type, self.compensate_delay = phase_type, compensate_delay

    def set_gains(self, f_hz: Tensor, gains: Tensor) -> None:
        """Register the table: gains, which may be learnable, at fixed frequencies."""
        self.register_buffer("frequencies_hz", f_hz.to(self.dtype))
        peak = float(gains.max())
        self.constant("gains", gains, Range(1e-6 * peak, 1e3 * peak))
        self.ends_at_nyquist = float(f_hz[-1]) >= self.fs / 2

    @property
    def frequency_data(self) -> Tensor:
        """(n, 2): frequency in Hz and linear gain."""
        return torch.stack((self.frequencies_hz, self.gains), 1)

    def linear_phase(self) -> Tensor:
        """Return the FIR with delay order/2; gain 0 at 0 Hz, and at fs/2 unless in the table."""
        f_hz, gains = self.frequencies_hz.double(), self.gains.double()
        f_hz, gains = (torch.nn.functional.pad(values, (1, 0)) for values in (f_hz, gains))
        if not self.ends_at_nyquist:
            f_hz = torch.cat((f_hz, f_hz.new_full((1,), self.fs / 2)))
            gains = torch.nn.functional.pad(gains, (0, 1))
        return fir2(self.order, f_hz, gains, self.fs)

    def get_parameters(self) -> dict[str, Any]:
        """Return the settings and the extent of the table."""
        return {
            **{name: getattr(self, name) for name in ("fs", "order", "phase_type", "learnable")},
            "num_frequency_points": len(self.frequencies_hz),
            "frequency_range": [float(self.frequencies_hz[0]), float(self.frequencies_hz[-1])],
            "compensate_delay": self.compensate_delay,
        }


class HeadphoneFilter(_TableFilter):
    """Circumaural headphones and the outer ear, up to the eardrum.

    Args:
        fs: Sampling rate in Hz.
        order: Number of taps less one; even for "minimum" and "zero".
        phase_type: "minimum" (causal, minimum phase), "zero" (no phase, table's gain end to end),
            or "amt" (linear phase, advanced by ceil((order + 1) / 2) samples).
        learnable: Make the gains at the table's frequencies, `gains`, a parameter. The frequencies
            are fixed (the API page counts them as parameters).
        compensate_delay: Whether "amt" and "zero" take their delay out.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (time,), (batch, time) or (batch, channel, time), same shape out.

    Invariants:
        With "zero" a tone keeps its phase and gets the table's gain.

    >>> HeadphoneFilter(fs=16000)(torch.zeros(2, 1600)).shape
    torch.Size([2, 1600])
    """

    @checked_arguments(phase_type=Text(PHASE_TYPES))
    def __init__(
        self,
        fs: float,
        order: int = 512,
        phase_type: str = "minimum",
        learnable: bool = False,
        compensate_delay: bool = True,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, order, phase_type, learnable, compensate_delay, dtype, backend)
        table = load_table("headphone_pralong_carlile_1996")
        f_hz, gain = map(torch.tensor, (table["frequency_hz"], table["amplitude_gain"]))
        inside = f_hz < self.fs / 2
        self.set_gains(f_hz[inside], gain[inside])

    def design(self) -> Tensor:
        taps = self.linear_phase()
        return minimum_phase(taps) if self.phase_type in self.minimum_phase_types else taps


def _goode_velocity(fs_hz: float) -> tuple[Tensor, Tensor]:
    """Return frequencies up to fs/2 in Hz, and stapes velocity in m/s at 0 dB SPL."""
    measured = load_table("middle_ear_goode_1994")
    f_hz = measured["frequency_hz"].tolist()
    displacement_um = measured["peak_to_peak_stapes_displacement_um"].tolist()
    scale = 1e-6 * 2 * math.pi * 10 ** (-_MEASURED_DB / 20) * math.sqrt(2)
    rows = [(f, d * scale * f) for f, d in zip(f_hz, displacement_um, strict=True)]
    beyond = load_table("middle_ear_lopezpoveda_meddis_2001")
    further = list(zip(*(column.tolist() for column in beyond.values()), strict=True))
    rows = [r for r in further if r[0] < f_hz[0]] + rows + [r for r in further if r[0] > f_hz[-1]]
    if fs_hz > 20000.0:  # extrapolated; at lower rates the tables are cut at fs/2
        while rows[-1][0] + 1000.0 <= fs_hz / 2:
            rows.append((rows[-1][0] + 1000.0, rows[-1][1] / 1.1))
    else:
        rows = [row for row in rows if row[0] < fs_hz / 2]
    last_hz, last = rows[-1]
    if last_hz != fs_hz / 2:
        rows.append((fs_hz / 2, last / (1 + (fs_hz / 2 - last_hz) * 1e-4)))
    f_all, velocity = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return f_all, velocity


class MiddleEarFilter(_TableFilter):
    """Eardrum to stapes: sound pressure in Pa to stapes velocity in m/s, or normalised.

    Args:
        fs: Sampling rate in Hz.
        filter_type: "lopezpoveda2001" or "jepsen2008".
        order: Number of taps less one, even.
        phase_type: "minimum" (causal, minimum phase), "zero" (no phase, table's gain end to end),
            or "amt" (minimum phase, advanced by ceil((order + 1) / 2) samples).
        normalize_gain: Whether the largest gain is 0 dB; else the output is a velocity.
        learnable: Make `gains` and, where it is used, `gain_normalization` parameters.
        compensate_delay: Whether "amt" and "zero" take their delay out.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (time,), (batch, time) or (batch, channel, time), same shape out (the API page shortens the
        output by the delay; a whole number of frames then depends on the filter).

    Invariants:
        With `normalize_gain` the response peaks at 0 dB.

    >>> ear = MiddleEarFilter(fs=16000)
    >>> f_hz, response = ear.get_frequency_response()
    >>> float(20 * response.abs().log10().max()) < 1e-3
    True
    """

    minimum_phase_types = ("minimum", "amt")
    shown = "fs filter_type order phase_type learnable"

    @checked_arguments(phase_type=Text(PHASE_TYPES), filter_type=Text(MIDDLE_EAR_TYPES))
    def __init__(
        self,
        fs: float,
        filter_type: str = "lopezpoveda2001",
        order: int = 512,
        phase_type: str = "minimum",
        normalize_gain: bool = True,
        learnable: bool = False,
        compensate_delay: bool = True,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, order, phase_type, learnable, compensate_delay, dtype, backend)
        self.filter_type, self.normalize_gain = filter_type, normalize_gain
        if filter_type == "lopezpoveda2001":
            self.set_gains(*_goode_velocity(self.fs))
        else:
            table = load_table("middle_ear_jepsen_2008")
            f_hz, impedance = map(torch.tensor, (table["frequency_hz"], table["stapes_impedance"]))
            inside = f_hz < self.fs / 2
            self.set_gains(f_hz[inside], 1.0 / impedance[inside])
        response = torch.fft.rfft(self.design().detach(), 2 * 8192)[:8192]
        own_db = -20.0 * math.log10(float(response.abs().max())) if normalize_gain else 0.0
        self.constant("gain_normalization", own_db, DECIBELS, learnable and normalize_gain)

    def design(self) -> Tensor:
        """The taps in float64, (order + 1,), without the normalisation."""
        taps = self.linear_phase()
        if self.filter_type == "lopezpoveda2001":
            taps = taps / REFERENCE_PA
        else:
            peak = _JEPSEN_PEAK * 10 ** (_MEASURED_DB / 20)
            taps = taps * (peak / torch.fft.fft(taps).abs().max())
        return minimum_phase(taps) if self.phase_type in self.minimum_phase_types else taps

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        def applied() -> Tensor:
            return self.design().to(self.dtype) * 10.0 ** (self.gain_normalization / 20.0)

        return super().derive() | {"applied": applied}

    def applied_taps(self) -> Tensor:
        return self.derived("applied")

    def get_parameters(self) -> dict[str, Any]:
        own = {"filter_type": self.filter_type, "normalize_gain": self.normalize_gain}
        return super().get_parameters() | own


#: Middle-ear table of each compensation type.
MIDDLE_EARS = {
    "tfOuterMiddle1997": "middle_ear_moore_1997",
    "tfOuterMiddle2007": "middle_ear_ansi_s3_4_2007",
}
FIELD_TYPES = ("free", "diffuse")


def transfer_db(
    f_hz: NDArray[np.float64], compensation_type: str, field_type: str
) -> NDArray[np.float64]:
    """Gain of outer plus middle ear in dB, piecewise cubic (PCHIP) between the tables' rows."""
    from scipy.interpolate import PchipInterpolator  # half a second, which few processes need

    middle, outer = map(load_table, (MIDDLE_EARS[compensation_type], "outer_ear_ansi_s3_4_2007"))
    outer_db = PchipInterpolator(outer["frequency_hz"], outer[f"{field_type}_field_db"])
    middle_db = PchipInterpolator(middle["frequency_hz"], middle["gain_db"])
    return np.asarray(outer_db(f_hz) + middle_db(f_hz))


class OuterMiddleEarFilter(FirStage):
    """Outer and middle ear as a zero-phase filter.

    Args:
        fs: Sampling rate in Hz.
        compensation_type: "tfOuterMiddle1997" or "tfOuterMiddle2007".
        field_type: "free" or "diffuse".
        flow: Lowest frequency of the transfer function in Hz, 20 or more; its gain holds below.
        fhigh: Highest frequency in Hz, up to 20000 (and up to fs/2); its gain holds above.
        order: Number of taps less one, even. 4096 keeps within 0.1 dB up to fs = 96 kHz.
        learnable: Make the gains on the 1 Hz grid, `tf_gains`, a parameter.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (time,), (batch, time) or (batch, channel, time), same shape out.

    Invariants:
        A tone from 80 Hz to 15 kHz gets the transfer function's gain within 0.1 dB and no delay.

    >>> ear = OuterMiddleEarFilter(fs=32000)
    >>> ear(torch.zeros(2, 320)).shape, ear.tf_gains.shape
    (torch.Size([2, 320]), torch.Size([15981]))
    """

    shown = "fs compensation_type field_type order learnable"

    @checked_arguments(compensation_type=Text(MIDDLE_EARS), field_type=Text(FIELD_TYPES))
    def __init__(
        self,
        fs: float,
        compensation_type: str = "tfOuterMiddle1997",
        field_type: str = "free",
        flow: float = 20.0,
        fhigh: float = 16000.0,
        order: int = 4096,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, order, learnable, dtype, backend)
        if order % 2:
            raise ParameterError(f"zero phase needs an even order, got {order}")
        if not 20.0 <= flow < min(fhigh, self.fs / 2) or fhigh > 20000.0:
            raise ParameterError(
                f"expected 20 <= flow < fhigh <= 20000 Hz with flow below fs/2, got {flow:g} and "
                f"{fhigh:g} Hz at fs {fs:g} Hz"
            )
        self.compensation_type, self.field_type = compensation_type, field_type
        self.flow, self.fhigh = float(flow), float(fhigh)
        self.advance = order // 2
        f_hz = self.flow + np.arange(math.floor(min(self.fhigh, self.fs / 2) - self.flow) + 1.0)
        self.register_buffer("fvec", torch.from_numpy(f_hz).to(dtype))
        gain_db = transfer_db(f_hz, compensation_type, field_type)
        self.constant("tf_gains", torch.from_numpy(gain_db), DECIBELS)

    def design(self) -> Tensor:
        gains = 10.0 ** (self.tf_gains.double() / 20.0)
        f_hz = self.fvec.double()
        if self.flow + len(gains) - 1 < self.fs / 2:
            f_hz = torch.cat((f_hz, f_hz.new_full((1,), self.fs / 2)))
            gains = torch.cat((gains, gains[-1:]))
        f_hz = torch.nn.functional.pad(f_hz, (1, 0))
        return fir2(self.order, f_hz, torch.cat((gains[:1], gains)), self.fs)

    def get_frequency_response(self, nfft: int = 8192) -> tuple[Tensor, Tensor]:
        """Frequencies in Hz and gain in dB, each (nfft // 2 + 1,)."""
        f_hz, response = super().get_frequency_response(nfft)
        return f_hz, 20.0 * torch.log10(response.abs())

    def get_transfer_function(self) -> tuple[Tensor, Tensor]:
        """The transfer function that the filter is designed from: Hz and dB, each (frequency,)."""
        return self.fvec, self.tf_gains


def ear_gain_db(
    compensation_type: str, field_type: str, highest_hz: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the tables' frequencies up to `highest_hz`, and the gain of outer plus middle ear.

    Beyond the end of a table its last value holds.
    """
    middle, outer = map(load_table, (MIDDLE_EARS[compensation_type], "outer_ear_ansi_s3_4_2007"))
    f_hz, gain_db = middle["frequency_hz"], middle["gain_db"]
    if field_type in FIELD_TYPES:  # at the eardrum there is no outer ear in front
        gain_db = gain_db + np.interp(f_hz, outer["frequency_hz"], outer[f"{field_type}_field_db"])
    inside = f_hz < highest_hz
    return (
        np.append(f_hz[inside], highest_hz),
        np.append(gain_db[inside], np.interp(highest_hz, f_hz, gain_db)),
    )


def fft_length(samples: int) -> int:
    """Return the smallest 4, 5, 6 or 7 times a power of two that is at least `samples`.

    For `torch.export` the length is twice `samples`: a dynamic length has no known power of two,
    and the number of frequencies of an even length needs no division.
    """
    if is_exporting():
        return 2 * samples
    power = 1
    while 7 * power < samples:
        power *= 2
    return next(m * power for m in (4, 5, 6, 7) if m * power >= samples)


class LoudnessEar(Stage):
    """Zero-phase FIR of outer and middle ear.

    Args:
        fs: Sampling rate in Hz.
        compensation_type: Middle ear: "tfOuterMiddle2007" or "tfOuterMiddle1997".
        field_type: "free", "diffuse", or "eardrum" for pressure measured there.
        order: Order of the FIR, even.
        learnable: Make the gains at the tables' frequencies, `gain_db`, a parameter.
        dtype: torch.float32 or torch.float64.

    Shape:
        (.., time), same shape out.

    Invariants:
        A tone between 100 Hz and 15 kHz gets the tables' gain within 0.2 dB and no delay.

    >>> LoudnessEar(fs=32000)(torch.zeros(2, 100)).shape
    torch.Size([2, 100])
    """

    shown = "compensation_type field_type order fs learnable"

    @checked_arguments(
        compensation_type=Text(MIDDLE_EARS), field_type=Text((*FIELD_TYPES, "eardrum"))
    )
    def __init__(
        self,
        fs: float,
        compensation_type: str = "tfOuterMiddle2007",
        field_type: str = "free",
        order: int = 4096,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(fs, learnable, dtype)
        if order % 2:
            raise ParameterError(f"order must be an even number of 2 or more, got {order!r}")
        self.compensation_type, self.field_type, self.order = compensation_type, field_type, order
        self._f_hz, gain_db = ear_gain_db(compensation_type, field_type, self.fs / 2)
        self.constant("gain_db", torch.from_numpy(gain_db), DECIBELS)

    def tables(self) -> dict[str, Tensor]:
        return {"f_hz": torch.from_numpy(self._f_hz)}

    def taps(self) -> Tensor:
        """The FIR, (order + 1,), float64 and symmetric about its middle."""
        gains = 10.0 ** (self.gain_db.double() / 20.0)
        f_hz, gains = (torch.nn.functional.pad(v, (1, 0)) for v in (self.f_hz.double(), gains))
        return fir2(self.order, f_hz, gains, self.fs)

    def filter_valid(self, x: Tensor, taps: Tensor) -> Tensor:
        """(.., time) -> (.., time - order): outputs that need no samples outside of x."""
        return self.filter_by(x, self.response(taps, x.shape[-1]))

    def response(self, taps: Tensor, samples: int) -> Tensor:
        """Transform the FIR for signals of `samples` samples, see `filter_by`."""
        kind = torch.complex64 if self.dtype == torch.float32 else torch.complex128
        return torch.fft.rfft(taps, fft_length(samples)).to(kind)

    def filter_by(self, x: Tensor, response: Tensor) -> Tensor:
        """Like `filter_valid`, with the response at hand: for many parts of a signal."""
        if x.numel() == 0:
            return x[..., self.order :]
        length = fft_length(x.shape[-1])
        # On some processors MKL rounds the transform of one row by itself differently.
        alone = x.device.type == "cpu" and math.prod(x.shape[:-1]) == 1
        rows = torch.stack((x, torch.zeros_like(x))) if alone else x
        y = torch.fft.irfft(torch.fft.rfft(rows, length) * response, length)
        return (y[0] if alone else y)[..., self.order : x.shape[-1]]

    def forward(self, x: Tensor) -> Tensor:
        """The whole signal at once: (.., time), zeros before and after it."""
        x = self.as_input(x, (1, 2, 3), "(.., time)")
        half = self.order // 2
        return self.filter_valid(torch.nn.functional.pad(x, (half, half)), self.taps())
