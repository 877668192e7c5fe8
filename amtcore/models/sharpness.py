"""Sharpness of specific loudness: DIN 45692:2009, and weightings of Aures, von Bismarck, Fastl.

    S = 0.11 * 0.1 * sum over z of N'(z) g(z) z / N,  z = 0.1, 0.2, .. 24 Bark

The unit is acum. DIN 45692 covers steady sounds. Over time N is smoothed and N' is not, so S
overshoots at the onset of a sound. With the loudness before its low-passes as N it does not.
Von Bismarck, Acustica 30, 159 (1974); Aures, Acustica 59, 130 (1985); Fastl and Zwicker,
Psychoacoustics, 3rd edition.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from amtcore.arguments import Number, Text, checked_arguments, working_type
from amtcore.errors import ShapeError
from amtcore.filter_design import interpolate
from amtcore.stages.constants import FixedType
from amtcore.stages.stage import check_floating, product
from amtcore.tables import load_table

#: Weightings, in the order of columns.
WEIGHTINGS = ("din", "aures", "bismarck", "fastl")
#: Factor that gives 1 acum to a critical band of noise at 1 kHz; the standard allows 0.105..0.115.
K_ACUM, STEP_BARK, POINTS = 0.11, 0.1, 240
#: Softer sounds have no sharpness.
LEAST_SONE = 0.1


def weights(weighting: str) -> Tensor:
    """Return 0.11 * 0.1 * g(z) z at the 240 points; for "aures" without the part of loudness."""
    z = STEP_BARK * torch.arange(1, POINTS + 1, dtype=torch.float64)
    if weighting == "din":
        g = torch.where(z > 15.8, 0.15 * torch.exp(0.42 * (z - 15.8)) + 0.85, 1.0)
    elif weighting == "bismarck":
        g = torch.where(z > 15.0, 0.2 * torch.exp(0.308 * (z - 15.0)) + 0.8, 1.0)
    elif weighting == "aures":
        g = 0.078 * torch.exp(0.171 * z) / z
    else:
        table = {k: torch.tensor(v) for k, v in load_table("sharpness_fastl").items()}
        ends = table["z_bark"]
        g = interpolate(z.clamp(float(ends[0]), float(ends[-1])), ends, table["g"])
    return K_ACUM * STEP_BARK * g * z


def divided(total: Tensor, n: Tensor, weighting: str) -> Tensor:
    """Return the sharpness of weighted sums and loudness in sone, which broadcast."""
    heard = ~(n < LEAST_SONE)  # NaN stays NaN
    safe = torch.where(heard, n, 1.0)
    return torch.where(
        heard, total / (torch.log1p(0.05 * safe) if weighting == "aures" else safe), 0.0
    )


class Sharpness(FixedType):
    """Sharpness of stored or fresh specific loudness, such as `n_spec` of `ZwickerLoudness`.

    Args:
        weighting: "din" (DIN 45692), "aures", "bismarck" or "fastl".
        skip: Seconds of frames at the beginning that are dropped, for statistics without an onset.
        frame_rate_hz: Frames per second, for `skip`.
        dtype: torch.float32 or torch.float64.

    Shape:
        Specific loudness (.., frame, 240) in sone/Bark and loudness (.., frame) in sone ->
        (.., frame) in acum.

    Invariants:
        Sharpness is 0 below 0.1 sone. Specific loudness and loudness times a number have the same
        sharpness, but for "aures".

    >>> sharp = Sharpness()(torch.ones(1, 240), torch.tensor([24.0]))
    >>> round(float(sharp), 2)
    2.32
    """

    weight: Tensor

    @checked_arguments(weighting=Text(WEIGHTINGS), skip=Number(" s", least=0.0))
    def __init__(
        self,
        weighting: Literal["din", "aures", "bismarck", "fastl"] = "din",
        skip: float = 0.0,
        frame_rate_hz: float = 500.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.weighting, self.skip, self.frame_rate_hz = weighting, skip, frame_rate_hz
        self.dtype = working_type("dtype", dtype)
        self.register_buffer("weight", weights(weighting).to(dtype))

    def extra_repr(self) -> str:
        return f"weighting={self.weighting}, skip={self.skip:g}"

    def forward(self, n_spec: Tensor, n: Tensor) -> Tensor:
        """Return the sharpness in acum of each frame.

        Args:
            n_spec: Specific loudness (.., 240) in sone/Bark.
            n: Loudness (..) in sone; the sum of `n_spec` is up to 2 % lower.
        """
        check_floating(n_spec, f"(.., {POINTS})")
        check_floating(n, "(..)")
        if n_spec.shape[-1:] != self.weight.shape or n_spec.shape[:-1] != n.shape:
            raise ShapeError(
                f"expected specific loudness (.., {POINTS}) and loudness (..), got "
                f"{tuple(n_spec.shape)} and {tuple(n.shape)}"
            )
        first = math.ceil(self.skip * self.frame_rate_hz)
        if first:
            n_spec, n = n_spec[..., first:, :], n[..., first:]
        total = product(n_spec.to(self.dtype), self.weight.unsqueeze(-1)).squeeze(-1)
        return divided(total, n.to(self.dtype), self.weighting)
