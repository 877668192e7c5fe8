"""Specific loudness: the compressive law of the cochlea, channel by channel.

    above the threshold T:  N' = C ((G E + A)^alpha - A^alpha)
    at or below it:  the same times (2 E / (E + T))^1.5.

(Moore, Glasberg and Baer 1997.) G is the low-level gain of the cochlear amplifier
relative to that at 500 Hz and above; alpha and A follow from it by tables. The law above an
excitation of 100 dB differs between the models.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.kernels.operations.specific_loudness import SPECIFIC_LOUDNESS, law_rows
from amtcore.kernels.operators import operator
from amtcore.stages.constants import Range
from amtcore.stages.stage import Stage
from amtcore.tables import load_table

#: Below this frequency the threshold rises.
FLAT_FROM_HZ = 500.0

Array = NDArray[np.float64]
_THRESHOLDS_DB = Range(-50.0, 150.0, 10.0)

_specific_loudness = operator(SPECIFIC_LOUDNESS)


def threshold_db(table: str, fc_hz: ArrayLike) -> Array:
    """Excitation at threshold: linear between the table's frequencies, held at both ends."""
    rows = load_table(table)
    return np.interp(np.asarray(fc_hz), rows["frequency_hz"], rows["threshold_db"])


def alpha_of_gain(table: str, gain_db: Array) -> Array:
    """Exponent, linear between the table's gains."""
    rows = load_table(table)
    return np.interp(gain_db, rows["gain_db"], rows["alpha"])


def a_of_gain(table: str, gain_db: Array) -> Array:
    """Constant A, by PCHIP between the table's gains, held at both ends."""
    from scipy.interpolate import PchipInterpolator  # half a second, which few processes need

    rows = load_table(table)
    inside = np.clip(gain_db, rows["gain_db"][0], rows["gain_db"][-1])
    return np.asarray(PchipInterpolator(rows["gain_db"], rows["A"])(inside))


class CompressiveLaw(Stage):
    """The law with its constants; the two models differ in tables and at very high levels."""

    C: Tensor
    threshold_db: Tensor
    alpha: Tensor
    A: Tensor
    #: Prefix of the tables, divisor and exponent of the law at very high levels.
    tables_of = ""
    high_divisor = 1.0
    high_exponent = 1.0

    def __init__(
        self, fc_hz: ArrayLike, fs: float, C: float, learnable: bool, dtype: torch.dtype
    ) -> None:
        super().__init__(fs, learnable, dtype)
        threshold = threshold_db(f"{self.tables_of}_excitation_threshold", fc_hz)
        self.flat_db = float(threshold_db(f"{self.tables_of}_excitation_threshold", FLAT_FROM_HZ))
        gain_db = self.flat_db - threshold
        self.constant("C", C, Range(1e-9, 1e6))
        self.constant("threshold_db", torch.from_numpy(threshold), _THRESHOLDS_DB)
        alpha = alpha_of_gain(f"{self.tables_of}_alpha_of_gain", gain_db)
        self.constant("alpha", torch.from_numpy(alpha), Range(1e-3, 1.0))
        scale = a_of_gain(f"{self.tables_of}_A_of_gain", gain_db)
        self.constant("A", torch.from_numpy(scale), Range(1e-2, 1e4))

    def forward(self, excitation_db: Tensor) -> Tensor:
        """(.., frame, channel) in dB SPL -> the same shape in sone per Cam."""
        level = self.as_input(excitation_db, (1, 2, 3, 4), "(.., frame, channel)")
        return _specific_loudness(
            level, self.constants_by_channel(), self.high_divisor, self.high_exponent
        )

    def constants_by_channel(self) -> Tensor:
        """Constants by channel, see `law_rows`."""
        return self.derived("law", "C", "threshold_db", "alpha", "A")

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        return {"law": self._law}

    def _law(self) -> Tensor:
        rows = law_rows(
            self.C.double(), self.threshold_db.double(), self.alpha.double(), self.A.double(),
            self.flat_db,
        )  # fmt: skip
        return rows.to(self.dtype)

    def extra_repr(self) -> str:
        return f"num_channels={len(self.A)}, C={self.C:g}, learnable={self.learnable}"


class Moore2016SpecificLoudness(CompressiveLaw):
    """Specific loudness of Moore2016.

    Args:
        fc_hz: Centre frequencies of the channels in Hz.
        fs: Sampling rate in Hz.
        C: Scale in sone per Cam.
        learnable: Make `C`, `threshold_db`, `alpha` and `A` (one value a channel) parameters.
        dtype: torch.float32 or torch.float64.

    Shape:
        (.., frame, channel) in dB SPL -> the same shape in sone per Cam.

    Invariants:
        Grows with the excitation up to 100 dB, and is 0 at none.

    >>> stage = Moore2016SpecificLoudness([1000.0])
    >>> bool(stage(torch.tensor([[40.0]])) > stage(torch.tensor([[20.0]])))
    True
    """

    tables_of, high_divisor, high_exponent = "moore2016", 1.0707, 0.2

    @checked_arguments()
    def __init__(
        self,
        fc_hz: ArrayLike,
        fs: float = 32000,
        C: float = 0.0631,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(fc_hz, fs, C, learnable, dtype)


class SpecificLoudness(CompressiveLaw):
    """Specific loudness of Glasberg2002.

    The page's law in three regimes with E0 = 10 dB is not this model.

    Args:
        fc_hz: Centre frequencies of the channels in Hz.
        fs: Sampling rate in Hz.
        C: Scale in sone per Cam.
        learnable: Make `C`, `threshold_db`, `alpha` and `A` (one value a channel) parameters.
        dtype: torch.float32 or torch.float64.

    Shape:
        (.., frame, channel) in dB SPL -> the same shape in sone per Cam.

    Invariants:
        Grows with the excitation up to 100 dB, and is 0 at none.

    >>> stage = SpecificLoudness([1000.0])
    >>> bool(stage(torch.tensor([[40.0]])) > stage(torch.tensor([[20.0]])))
    True
    """

    tables_of, high_divisor, high_exponent = "glasberg2002", 1.04e6, 0.5

    @checked_arguments()
    def __init__(
        self,
        fc_hz: ArrayLike,
        fs: float = 32000,
        C: float = 0.047,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(fc_hz, fs, C, learnable, dtype)
