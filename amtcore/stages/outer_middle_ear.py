"""Sound field to cochlea as a gain in dB: outer ear of ANSI S3.4-2007 and one of two middle ears.

The middle ear is that of ANSI S3.4-2007 or of Moore, Glasberg and Baer (1997). The sum of the two
is what the filter does end to end, within 0.1 dB from 80 Hz to 15 kHz; programs that design for
10^(dB/10) and filter forwards and backwards apply four times the tables' dB.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.errors import ParameterError
from amtcore.filter_design import fir2
from amtcore.stages.fir import FirStage
from amtcore.stages.limits import DECIBELS
from amtcore.tables import load_table

#: Middle-ear table of each compensation type.
COMPENSATION_TYPES = {
    "tfOuterMiddle1997": "middle_ear_moore_1997",
    "tfOuterMiddle2007": "middle_ear_ansi_s3_4_2007",
}
FIELD_TYPES = ("free", "diffuse")


def transfer_db(
    f_hz: NDArray[np.float64], compensation_type: str, field_type: str
) -> NDArray[np.float64]:
    """Gain of outer plus middle ear in dB, piecewise cubic (PCHIP) between the tables' rows."""
    from scipy.interpolate import PchipInterpolator  # half a second, which few processes need

    outer = load_table("outer_ear_ansi_s3_4_2007")
    middle = load_table(COMPENSATION_TYPES[compensation_type])
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

    tf_gains: Tensor
    fvec: Tensor

    @checked_arguments()
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
        if compensation_type not in COMPENSATION_TYPES:
            raise ParameterError(
                f"compensation_type must be one of {', '.join(COMPENSATION_TYPES)}, "
                f"got {compensation_type!r}"
            )
        if field_type not in FIELD_TYPES:
            raise ParameterError(
                f"field_type must be one of {', '.join(FIELD_TYPES)}, got {field_type!r}"
            )
        if not 20.0 <= flow < min(fhigh, self.fs / 2) or fhigh > 20000.0:
            raise ParameterError(
                f"expected 20 <= flow < fhigh <= 20000 Hz with flow below fs/2, got {flow:g} and "
                f"{fhigh:g} Hz at fs {fs:g} Hz"
            )
        self.compensation_type, self.field_type = compensation_type, field_type
        self.flow, self.fhigh = float(flow), float(fhigh)
        self.advance = order // 2
        steps = math.floor(min(self.fhigh, self.fs / 2) - self.flow)
        f_hz = self.flow + np.arange(steps + 1.0)
        self.register_buffer("fvec", torch.from_numpy(f_hz).to(dtype))
        gain_db = transfer_db(f_hz, compensation_type, field_type)
        self.constant("tf_gains", torch.from_numpy(gain_db), DECIBELS)

    def design(self) -> Tensor:
        """The taps in float64, (order + 1,), symmetric."""
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

    def extra_repr(self) -> str:
        """Rate, type, field and order."""
        return (
            f"fs={self.fs:g}, type={self.compensation_type!r}, field={self.field_type!r}, "
            f"order={self.order}, learnable={self.learnable}"
        )
