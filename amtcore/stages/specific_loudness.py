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
from numpy.typing import ArrayLike
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.kernels.operations.specific_loudness import SPECIFIC_LOUDNESS, law_rows
from amtcore.kernels.operators import operator
from amtcore.stages.constants import Range
from amtcore.stages.stage import Stage
from amtcore.tables import load_table

#: Below this frequency the threshold rises.
_FLAT_FROM_HZ = 500.0

_specific_loudness = operator(SPECIFIC_LOUDNESS)


class CompressiveLaw(Stage):
    """The law with its constants; the two models differ in tables and at very high levels."""

    #: Prefix of the tables, divisor and exponent of the law at very high levels.
    tables_of = ""
    high_divisor = 1.0
    high_exponent = 1.0
    shown = "num_channels C learnable"

    def __init__(
        self, fc_hz: ArrayLike, fs: float, C: float, learnable: bool, dtype: torch.dtype
    ) -> None:
        from scipy.interpolate import PchipInterpolator  # half a second, which few processes need

        super().__init__(fs, learnable, dtype)
        threshold, alpha, a = (
            load_table(f"{self.tables_of}_{name}")
            for name in ("excitation_threshold", "alpha_of_gain", "A_of_gain")
        )
        at_hz = np.append(np.asarray(fc_hz), _FLAT_FROM_HZ)
        *threshold_db, self.flat_db = np.interp(
            at_hz, threshold["frequency_hz"], threshold["threshold_db"]
        ).tolist()
        gain_db = self.flat_db - np.array(threshold_db)
        alpha_of_gain = np.interp(gain_db, alpha["gain_db"], alpha["alpha"])
        inside = np.clip(gain_db, a["gain_db"][0], a["gain_db"][-1])
        a_of_gain = np.asarray(PchipInterpolator(a["gain_db"], a["A"])(inside))
        self.constant("C", C, Range(1e-9, 1e6))
        self.constant("threshold_db", threshold_db, Range(-50.0, 150.0, 10.0))
        self.constant("alpha", torch.from_numpy(alpha_of_gain), Range(1e-3, 1.0))
        self.constant("A", torch.from_numpy(a_of_gain), Range(1e-2, 1e4))

    @property
    def num_channels(self) -> int:
        """Number of channels."""
        return len(self.A)

    def forward(self, excitation_db: Tensor) -> Tensor:
        """The whole signal at once."""
        level = self.as_input(excitation_db, (1, 2, 3, 4), "(.., frame, channel)")
        return _specific_loudness(level, self.derived("law"), self.high_divisor, self.high_exponent)

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        def law() -> Tensor:
            c, threshold_db, alpha, a = (
                constant.double() for constant in (self.C, self.threshold_db, self.alpha, self.A)
            )
            return law_rows(c, threshold_db, alpha, a, self.flat_db).to(self.dtype)

        return {"law": law}


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

    The page's law in three regimes with E0 = 10 dB is not this model. Arguments, shapes and
    invariants as for `Moore2016SpecificLoudness`.

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
