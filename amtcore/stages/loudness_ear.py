"""Outer and middle ear in front of the loudness models: one linear-phase FIR.

The tables' dB as an amplitude gain 10^(dB/20), interpolated linearly between their frequencies (0
at 0 Hz), by frequency sampling with a Hamming window; the delay is taken out, so the filter has
zero phase. `OuterMiddleEarFilter` is the finer filter (table in dB, 1 Hz grid); this one is what
the published loudness programs compute, up to 0.4 dB from the table below 60 Hz.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.errors import ParameterError
from amtcore.filter_design import fir2
from amtcore.kernels.vector.exporting import is_exporting
from amtcore.stages.base import Stage
from amtcore.stages.limits import DECIBELS
from amtcore.tables import load_table

#: Middle-ear table of each compensation type.
MIDDLE_EARS = {
    "tfOuterMiddle1997": "middle_ear_moore_1997",
    "tfOuterMiddle2007": "middle_ear_ansi_s3_4_2007",
}
#: Column of the outer-ear table; at the eardrum there is no outer ear in front.
FIELDS = {"free": "free_field_db", "diffuse": "diffuse_field_db", "eardrum": None}


def ear_gain_db(
    compensation_type: str, field_type: str, highest_hz: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Frequencies of the tables up to `highest_hz`, and the gain of outer plus middle ear there.

    Beyond the end of a table its last value holds.
    """
    if compensation_type not in MIDDLE_EARS:
        raise ParameterError(
            f"compensation_type must be one of {', '.join(MIDDLE_EARS)}, got {compensation_type!r}"
        )
    if field_type not in FIELDS:
        raise ParameterError(f"field_type must be one of {', '.join(FIELDS)}, got {field_type!r}")
    middle, outer = (
        load_table(MIDDLE_EARS[compensation_type]),
        load_table("outer_ear_ansi_s3_4_2007"),
    )
    f_hz = middle["frequency_hz"]
    gain_db = middle["gain_db"].copy()
    column = FIELDS[field_type]
    if column is not None:
        gain_db += np.interp(f_hz, outer["frequency_hz"], outer[column])
    inside = f_hz < highest_hz
    return (
        np.append(f_hz[inside], highest_hz),
        np.append(gain_db[inside], np.interp(highest_hz, f_hz, gain_db)),
    )


def fft_length(samples: int) -> int:
    """Smallest 4, 5, 6 or 7 times a power of two that is at least `samples`.

    For `torch.export` it is twice `samples`: a dynamic length has no such power, and of an even
    length the number of frequencies is known without a division.
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

    gain_db: Tensor
    f_hz: Tensor

    @checked_arguments()
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
        if not (isinstance(order, int) and order >= 2 and order % 2 == 0):
            raise ParameterError(f"order must be an even number of 2 or more, got {order!r}")
        self.compensation_type, self.field_type, self.order = compensation_type, field_type, order
        f_hz, gain_db = ear_gain_db(compensation_type, field_type, self.fs / 2)
        self.constant("gain_db", torch.from_numpy(gain_db), DECIBELS)
        self._f_hz = f_hz

    def tables(self) -> dict[str, Tensor]:
        """The tables' frequencies."""
        return {"f_hz": torch.from_numpy(self._f_hz)}

    def taps(self) -> Tensor:
        """The FIR, (order + 1,), float64 and symmetric about its middle."""
        gain = torch.nn.functional.pad(10.0 ** (self.gain_db.double() / 20.0), (1, 0))
        f_hz = torch.nn.functional.pad(self.f_hz.double(), (1, 0))
        return fir2(self.order, f_hz, gain, self.fs)

    def filter_valid(self, x: Tensor, taps: Tensor) -> Tensor:
        """(.., time) -> (.., time - order): outputs that need no samples outside of x."""
        return self.filter_by(x, self.response(taps, x.shape[-1]))

    def response(self, taps: Tensor, samples: int) -> Tensor:
        """Transform of the FIR for signals of so many samples, see `filter_by`."""
        kind = torch.complex64 if self.dtype == torch.float32 else torch.complex128
        return torch.fft.rfft(taps, fft_length(samples)).to(kind)

    def filter_by(self, x: Tensor, response: Tensor) -> Tensor:
        """As `filter_valid`, with the response at hand: for many parts of a signal."""
        if x.numel() == 0:
            return x[..., self.order :]
        length = fft_length(x.shape[-1])
        y = torch.fft.irfft(torch.fft.rfft(x, length) * response, length)
        return y[..., self.order : x.shape[-1]]

    def forward(self, x: Tensor) -> Tensor:
        """The whole signal at once: (.., time), zeros before and after it."""
        x = self.as_input(x, (1, 2, 3), "(.., time)")
        half = self.order // 2
        return self.filter_valid(torch.nn.functional.pad(x, (half, half)), self.taps())

    def extra_repr(self) -> str:
        """Type, field and order."""
        return (
            f"type={self.compensation_type}, field={self.field_type}, order={self.order}, "
            f"fs={self.fs:g}, learnable={self.learnable}"
        )
