"""Headphone to eardrum, and eardrum to stapes: the ear filters of the time-domain models.

Pralong and Carlile (1996), figure 1(e); Goode et al. (1994) as extended by Lopez-Poveda and Meddis
(2001); Jepsen, Ewert and Dau (2008). Outputs are as long as inputs, also where a delay is taken
out, and zero phase means the table's gain end to end, not its square by filtering twice. For the
loudness models' ear, given in dB, see `outer_middle_ear`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.errors import ParameterError
from amtcore.filter_design import fir2, minimum_phase
from amtcore.stages.fir import FirStage
from amtcore.stages.limits import DECIBELS, Range
from amtcore.tables import load_table
from amtcore.units import REFERENCE_PA

PHASE_TYPES = ("amt", "minimum", "zero")
MIDDLE_EAR_TYPES = ("lopezpoveda2001", "jepsen2008")

_LOW_RATE_HZ = 20000.0  # up to here the tables are cut at fs/2
_MEASURED_DB = 104.0  # level of Goode et al. (1994)
_STEP_HZ, _FALL_PER_STEP, _FALL_PER_HZ = 1000.0, 1.1, 1e-4  # extrapolation to fs/2
_JEPSEN_PEAK = 1e-8  # largest gain of the jepsen2008 filter, at _MEASURED_DB
_LEAST_GAIN, _LARGEST_GAIN = 1e-6, 1e3  # bounds of the gains, relative to their largest
_PEAK_POINTS = 8192  # where the largest gain is looked for, evenly from 0 to fs/2


def _as_delay(phase_type: str, order: int, compensate_delay: bool) -> int:
    """Samples of delay that are taken out."""
    if phase_type not in PHASE_TYPES:
        raise ParameterError(
            f"phase_type must be one of {', '.join(PHASE_TYPES)}, got {phase_type!r}"
        )
    if phase_type == "minimum" or not compensate_delay:
        return 0
    return order // 2 if phase_type == "zero" else math.ceil((order + 1) / 2)


class _TableFilter(FirStage):
    """A filter designed from gains at frequencies; `f_hz` spans 0 < f <= fs/2."""

    frequencies_hz: Tensor
    gains: Tensor
    #: Values of `phase_type` whose filter is a minimum-phase one.
    minimum_phase_types: tuple[str, ...] = ("minimum",)

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
        self.advance = _as_delay(phase_type, order, compensate_delay)
        if order % 2 and phase_type in (*self.minimum_phase_types, "zero"):
            raise ParameterError(
                f"phase_type {phase_type!r} needs an even order, got {order}: an odd one has its "
                f"delay between two samples and no gain at fs/2; take {order + 1}"
            )
        self.phase_type, self.compensate_delay = phase_type, compensate_delay

    def set_gains(self, f_hz: Tensor, gains: Tensor) -> None:
        """Keep the table: the gains may be learnable, their frequencies are not."""
        self.register_buffer("frequencies_hz", f_hz.to(self.dtype))
        peak = float(gains.max())
        self.constant("gains", gains, Range(_LEAST_GAIN * peak, _LARGEST_GAIN * peak))
        self.ends_at_nyquist = float(f_hz[-1]) >= self.fs / 2

    @property
    def frequency_data(self) -> Tensor:
        """(n, 2): frequency in Hz and linear gain."""
        return torch.stack((self.frequencies_hz, self.gains), 1)

    def linear_phase(self) -> Tensor:
        """The FIR of the table with the delay order/2; gain 0 at 0 Hz, and at fs/2 unless given."""
        f_hz, gains = self.frequencies_hz.double(), self.gains.double()
        f_hz, gains = (torch.nn.functional.pad(values, (1, 0)) for values in (f_hz, gains))
        if not self.ends_at_nyquist:
            f_hz = torch.cat((f_hz, f_hz.new_full((1,), self.fs / 2)))
            gains = torch.nn.functional.pad(gains, (0, 1))
        return fir2(self.order, f_hz, gains, self.fs)

    def get_parameters(self) -> dict[str, Any]:
        """The settings and the extent of the table."""
        return {
            "fs": self.fs,
            "order": self.order,
            "phase_type": self.phase_type,
            "learnable": self.learnable,
            "num_frequency_points": len(self.frequencies_hz),
            "frequency_range": [float(self.frequencies_hz[0]), float(self.frequencies_hz[-1])],
            "compensate_delay": self.compensate_delay,
        }

    def extra_repr(self) -> str:
        """Rate, order and phase."""
        return (
            f"fs={self.fs:g}, {self._kind()}order={self.order}, phase_type={self.phase_type}, "
            f"learnable={self.learnable}"
        )

    def _kind(self) -> str:
        """What `extra_repr` names before the order."""
        return ""


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

    @checked_arguments()
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
        f_hz, gain = (torch.tensor(table[key]) for key in ("frequency_hz", "amplitude_gain"))
        inside = f_hz < self.fs / 2
        self.set_gains(f_hz[inside], gain[inside])

    def design(self) -> Tensor:
        """The taps in float64, (order + 1,)."""
        taps = self.linear_phase()
        return minimum_phase(taps) if self.phase_type in self.minimum_phase_types else taps


def _goode_velocity(fs_hz: float) -> tuple[Tensor, Tensor]:
    """Frequencies up to fs/2 in Hz and stapes velocity in m/s at 0 dB SPL."""
    measured = load_table("middle_ear_goode_1994")
    f_hz = measured["frequency_hz"].tolist()
    displacement_um = measured["peak_to_peak_stapes_displacement_um"].tolist()
    scale = 1e-6 * 2 * math.pi * 10 ** (-_MEASURED_DB / 20) * math.sqrt(2)
    rows = [(f, d * scale * f) for f, d in zip(f_hz, displacement_um, strict=True)]
    beyond = load_table("middle_ear_lopezpoveda_meddis_2001")
    further = list(zip(*(column.tolist() for column in beyond.values()), strict=True))
    rows = [r for r in further if r[0] < f_hz[0]] + rows + [r for r in further if r[0] > f_hz[-1]]
    if fs_hz > _LOW_RATE_HZ:
        while rows[-1][0] + _STEP_HZ <= fs_hz / 2:
            rows.append((rows[-1][0] + _STEP_HZ, rows[-1][1] / _FALL_PER_STEP))
    else:
        rows = [row for row in rows if row[0] < fs_hz / 2]
    last_hz, last = rows[-1]
    if last_hz != fs_hz / 2:
        rows.append((fs_hz / 2, last / (1 + (fs_hz / 2 - last_hz) * _FALL_PER_HZ)))
    f_all, velocity = torch.tensor(rows, dtype=torch.float64).unbind(1)
    return f_all, velocity


def _jepsen_velocity(fs_hz: float) -> tuple[Tensor, Tensor]:
    """Frequencies below fs/2 in Hz and relative stapes velocity."""
    table = load_table("middle_ear_jepsen_2008")
    f_hz, impedance = (torch.tensor(table[key]) for key in ("frequency_hz", "stapes_impedance"))
    inside = f_hz < fs_hz / 2
    return f_hz[inside], 1.0 / impedance[inside]


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

    gain_normalization: Tensor
    minimum_phase_types = ("minimum", "amt")

    @checked_arguments()
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
        if filter_type not in MIDDLE_EAR_TYPES:
            raise ParameterError(
                f"filter_type must be one of {', '.join(MIDDLE_EAR_TYPES)}, got {filter_type!r}"
            )
        self.filter_type, self.normalize_gain = filter_type, normalize_gain
        velocity = _goode_velocity if filter_type == "lopezpoveda2001" else _jepsen_velocity
        self.set_gains(*velocity(self.fs))
        own_db = -self._peak_db() if normalize_gain else 0.0
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

    def _peak_db(self) -> float:
        """Largest gain of the response."""
        magnitude = torch.fft.rfft(self.design().detach(), 2 * _PEAK_POINTS)[:_PEAK_POINTS].abs()
        return 20.0 * math.log10(float(magnitude.max()))

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        """The taps as they are and with the normalisation, whose power another device rounds
        otherwise."""

        def applied() -> Tensor:
            gain = 10.0 ** (self.gain_normalization / 20.0)
            return self.design().to(self.dtype) * gain

        return super().derive() | {"applied": applied}

    def applied_taps(self) -> Tensor:
        """The taps with the normalisation."""
        return self.derived("applied")

    def get_parameters(self) -> dict[str, Any]:
        """The settings and the extent of the table."""
        own = {"filter_type": self.filter_type, "normalize_gain": self.normalize_gain}
        return super().get_parameters() | own

    def _kind(self) -> str:
        """What `extra_repr` names before the order."""
        return f"filter_type={self.filter_type}, "
