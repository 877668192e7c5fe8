"""Rounded-exponential filters whose lower slope depends on level.

    W(p, g) = (1 + p |g|) exp(-p |g|),   p(f) = 4 f / ERB(f),   g relative to the filter's centre
    at or above the centre fc:  p(fc)
    below it:  p(fc) - 0.35 (p(fc) / p(1 kHz)) (X - 51),  X the level per ERB at the component in dB

(Glasberg and Moore 1990; ANSI S3.4-2007.) What does not depend on the signal is a
matrix product: the level per ERB and the upper slopes. The lower slopes are a kernel; without
gradients, in float32, all of it is one. In float32 the many components between two channels are
weighted at a few nodes, see `component_nodes`; in float64 every one for itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from amtcore.kernels.ops import excitation
from amtcore.kernels.ops.dispatch import rows_of
from amtcore.kernels.ops.roex import lower_skirt
from amtcore.scales import CAM_FLOOR_HZ, CAM_SLOPE
from amtcore.stages.base import product
from amtcore.stages.component_nodes import ComponentStage
from amtcore.stages.limits import Range
from amtcore.stages.roex_slopes import KHZ_PER_ERB, REFERENCE_LEVEL_DB, check_lower_slope
from amtcore.stages.spectrum import level_db

#: p(f) = SLOPE_BASE f / ERB(f) at the reference level.
SLOPE_BASE = 4.0
#: Change of p(1 kHz) of the lower slope per dB.
LOWER_SLOPE_PER_DB = -0.35
#: A filter reaches up to this far above the frequency it is relative to.
FARTHEST_G = 4.0
#: Weights below this are 0: 200 dB down they mean nothing, and denormal ones make products slow.
LEAST_WEIGHT = 1e-20
#: Bounds of the slopes.
_BASES, _CHANGES = Range(1e-3, 10.0), Range(-10.0, 0.0)


def roex(p: Tensor, g: Tensor) -> Tensor:
    """Weight of a filter of slope p at the relative distance g; 0 beyond g = 4."""
    x = p * g.abs()
    weight = (1.0 + x) * torch.exp(-x)
    return torch.where((g <= FARTHEST_G) & (weight >= LEAST_WEIGHT), weight, 0.0)


def _bandwidth(f_hz: Tensor) -> Tensor:
    return CAM_FLOOR_HZ * (CAM_SLOPE * f_hz + 1.0)


def level_weights(from_hz: Tensor, to_hz: Tensor, base: Tensor | float) -> Tensor:
    """(component, place): what each component adds to the level per ERB at each place."""
    source = from_hz.double()[:, None]
    g = (to_hz.double() - source) / source
    return roex(base * source / _bandwidth(source), g)


def upper_weights(f_hz: Tensor, fc_hz: Tensor, base: Tensor) -> Tensor:
    """(component, channel): what each component at or above a channel's centre adds to it."""
    centre = fc_hz.double()
    g = (f_hz.double()[:, None] - centre) / centre
    weight = roex(base.double() * centre / _bandwidth(centre), g)
    return torch.where(f_hz[:, None] >= fc_hz, weight, 0.0)


class RoexFilters(ComponentStage):
    """The filters themselves: intensity and level of components to excitation of channels."""

    centres = "fc"
    fc: Tensor
    upper_slope_base: Tensor
    lower_slope_base: Tensor
    lower_slope_per_db: Tensor

    def __init__(
        self,
        fs: float,
        frequencies: Tensor,
        fc_hz: ArrayLike,
        upper_slope_base: float,
        lower_slope_base: float,
        lower_slope_per_db: float,
        learnable: bool,
        dtype: torch.dtype,
        backend: str | None,
    ) -> None:
        super().__init__(fs, frequencies, learnable, dtype, backend)
        check_lower_slope(lower_slope_base, lower_slope_per_db)
        self.constant("upper_slope_base", upper_slope_base, _BASES)
        self.constant("lower_slope_base", lower_slope_base, _BASES)
        self.constant("lower_slope_per_db", lower_slope_per_db, _CHANGES)
        self.register_buffer("fc", torch.as_tensor(np.asarray(fc_hz)).to(dtype))

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        """What components at or above a channel's centre add to it, and its slope below, too."""
        return {
            **super().derive(),
            "upper": self._upper,
            "upper_blocks": lambda: self.blocks_of(self._upper()),
            "rate": self._rate,
            "away": self._away,
            "relative": self._relative,
        }

    def _rate(self) -> Tensor:
        """Slope below a channel's centre per Hz, (channel,)."""
        return (self.lower_slope_base.double() / _bandwidth(self.fc.double())).to(self.dtype)

    def _away(self) -> Tensor:
        """Distance of every node below each channel's centre, times its slope, (channel, node)."""
        distance = self.fc.double()[:, None] - self.nodes_hz.double()
        return (self._rate().double()[:, None] * distance).to(self.dtype)

    def _relative(self) -> Tensor:
        """`relative_slope` as a line, (2,): change per dB, and at 0 dB."""
        change = (self.lower_slope_per_db / (self.lower_slope_base * KHZ_PER_ERB)).double()
        return torch.stack((change, 1.0 - change * REFERENCE_LEVEL_DB)).to(self.dtype)

    def _upper(self) -> Tensor:
        weights = upper_weights(self.nodes_hz, self.fc, self.upper_slope_base)
        return weights.to(self.dtype)

    @property
    def num_channels(self) -> int:
        """Number of channels."""
        return int(self.fc.shape[0])

    def relative_slope(self, levels_db: Tensor) -> Tensor:
        """Factor of the lower slope at each level per ERB.

        Never below 0, which it would reach at 137 dB: a filter does not amplify what is far away.
        """
        change = self.lower_slope_per_db / (self.lower_slope_base * KHZ_PER_ERB)
        return (1.0 + change * (levels_db - REFERENCE_LEVEL_DB)).clamp(min=0.0)

    def between(self) -> tuple[Tensor, Tensor]:
        """The level before every node, and the share of the one after it; empty where levels are
        those of the nodes."""
        return self.fc.new_empty(0, dtype=torch.int64), self.fc.new_empty(0)

    def levels_at_nodes(self, levels_db: Tensor) -> Tensor:
        """Levels per ERB as the stage gets them -> (.., node)."""
        return levels_db

    def filters(self) -> excitation.Tables:
        """All of them, as the kernel for numbers alone takes them."""
        return excitation.Tables(
            self.derived("away", "lower_slope_base", "fc"),
            self.derived("relative", "lower_slope_base", "lower_slope_per_db"),
            *self.between(),
            self.derived("upper", "upper_slope_base", "fc"),
            self.derived("upper_blocks", "upper_slope_base", "fc"),
        )

    def pattern(self, intensity: Tensor, levels_db: Tensor) -> Tensor:
        """Intensity (.., frame, node) and level per ERB -> (.., frame, channel) in dB."""
        upper = self.derived("upper", "upper_slope_base", "fc")
        line = self.derived("relative", "lower_slope_base", "lower_slope_per_db")
        if self.by_kernel(intensity, levels_db, upper, line):
            return excitation.pattern(intensity, levels_db, self.filters())
        below = lower_skirt(
            rows_of(intensity),
            rows_of(self.relative_slope(self.levels_at_nodes(levels_db))),
            self.derived("rate", "lower_slope_base", "fc"),
            self.fc,
            self.nodes_hz,
            self.backend,
        )
        return level_db(
            below.view(*intensity.shape[:-1], self.num_channels) + product(intensity, upper)
        )

    def extra_repr(self) -> str:
        """Channels and slopes."""
        return (
            f"num_channels={self.num_channels}, fc={self.fc[0]:.1f}..{self.fc[-1]:.1f} Hz, "
            f"slope_base={float(self.upper_slope_base.detach()):g} up, "
            f"{float(self.lower_slope_base.detach()):g} down, learnable={self.learnable}"
        )
