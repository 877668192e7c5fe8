"""Excitation patterns of the loudness models by rounded-exponential filters.

    W(p, g) = (1 + p |g|) exp(-p |g|),   p(f) = 4 f / ERB(f),   g relative to the filter's centre
    at or above the centre fc:  p(fc)
    below it:  p(fc) - 0.35 (p(fc) / p(1 kHz)) (X - 51),  X the level per ERB at a component in dB.

(Glasberg and Moore 1990; ANSI S3.4-2007.) The weights of levels and upper slopes are constant, so
both are matrix products. The lower slopes are a kernel; in float32 without gradients one kernel
computes the whole pattern. In float32 the components between two channels are weighted at a few
nodes, see `component_nodes`; in float64 every component is weighted. Moore2016 takes the level at
every component, Glasberg2002 at the channels.

Slopes in dB per ERB: with b = p ERB / f, W = (1 + b d) exp(-b d) at d ERB from the centre. Far from
the centre this is 4.34 b dB per ERB. Below the centre b becomes b + c (X - 51) / 7.54, c the change
of p(1 kHz) per dB. Interfaces that state b and c in dB per ERB have numbers outside these ranges.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from amtcore.arguments import RATE, Number, Numbers, checked_arguments
from amtcore.errors import ParameterError
from amtcore.kernels.operations import excitation
from amtcore.kernels.operations.lower_skirt import LOWER_SKIRT
from amtcore.kernels.operators import operator
from amtcore.kernels.torch_state import rows_of
from amtcore.plain_numbers import plain_number
from amtcore.scales import CAM_FLOOR_HZ, CAM_SLOPE, cam_bandwidth, cam_number, cam_space
from amtcore.stages.component_nodes import ComponentStage
from amtcore.stages.constants import Range
from amtcore.stages.spectrum import level_db
from amtcore.stages.stage import product

#: Frequency over bandwidth at 1 kHz.
KHZ_PER_ERB = 1000.0 / float(cam_bandwidth(1000.0))
#: dB per ERB of a filter with b = 1, far from its centre.
DB_PER_ERB = 10.0 / math.log(10.0)
#: Level in dB where the lower slope equals its base.
REFERENCE_LEVEL_DB = 51.0
#: Up to this level the lower slope stays above 0.
LOUDEST_DB = 130.0
_BASE = Number(above=0.0, most=10.0)


def slope_base(name: str, value: Any) -> float:
    """Check b, which is about 4 (17 dB per ERB) in measured filters."""
    number = plain_number(value)
    if number is None or not _BASE.fits(number):
        hint = "it is p ERB / f of the filter, 4 as published"
        if number is not None and number > 0:
            hint += f"; a slope of {number:g} dB per ERB is {number / DB_PER_ERB:.3g} here"
        raise ParameterError(f"{name} must be {_BASE.wanted()}, got {value!r}; {hint}")
    return float(number)


def slope_per_db(name: str, value: Any) -> float:
    """Check c, measured as -0.35 to -0.38; filters widen with the level."""
    number = plain_number(value)
    if number is None or not -10.0 <= number <= 0.0:
        raise ParameterError(
            f"{name} must be a finite number at most 0 (the published change of p(1 kHz) per dB is "
            f"-0.35), got {value!r}"
        )
    return float(number)


def check_lower_slope(base: float, per_db: float) -> None:
    """Raise if the lower slope vanishes below `LOUDEST_DB`."""
    least = -base * KHZ_PER_ERB / (LOUDEST_DB - REFERENCE_LEVEL_DB)
    if per_db < least:
        vanishes_db = REFERENCE_LEVEL_DB - base * KHZ_PER_ERB / per_db
        here = per_db * KHZ_PER_ERB / DB_PER_ERB
        raise ParameterError(
            f"lower_slope_per_db must be {least:.3g} or above with lower_slope_base {base:g}, so "
            f"that there is a lower slope up to {LOUDEST_DB:g} dB, got {per_db:g}, where it ends "
            f"at {vanishes_db:.0f} dB; it is the change of p(1 kHz) per dB, -0.35 as published: a "
            f"change of {per_db:g} dB per ERB is {here:.3g} here"
        )


#: p(f) = SLOPE_BASE f / ERB(f) at the reference level.
SLOPE_BASE = 4.0
#: Change of p(1 kHz) of the lower slope per dB.
LOWER_SLOPE_PER_DB = -0.35
#: Largest relative distance above its frequency at which a filter has weight.
FARTHEST_G = 4.0
#: Smaller weights are 0: they are 200 dB down, and denormal weights make products slow.
LEAST_WEIGHT = 1e-20
#: Bounds of the slopes.
_BASES, _CHANGES = Range(1e-3, 10.0), Range(-10.0, 0.0)

_lower_skirt, _pattern = operator(LOWER_SKIRT), operator(excitation.EXCITATION_PATTERN)


def roex(p: Tensor, g: Tensor) -> Tensor:
    """Return the weight of a filter of slope p at the relative distance g; 0 beyond g = 4."""
    x = p * g.abs()
    weight = (1.0 + x) * torch.exp(-x)
    return torch.where((g <= FARTHEST_G) & (weight >= LEAST_WEIGHT), weight, 0.0)


def _bandwidth(f_hz: Tensor) -> Tensor:
    return CAM_FLOOR_HZ * (CAM_SLOPE * f_hz + 1.0)


def level_weights(from_hz: Tensor, to_hz: Tensor, base: Tensor | float) -> Tensor:
    """Return (component, place), the weight of each component in the level per ERB."""
    source = from_hz.double()[:, None]
    g = (to_hz.double() - source) / source
    return roex(base * source / _bandwidth(source), g)


def upper_weights(f_hz: Tensor, fc_hz: Tensor, base: Tensor) -> Tensor:
    """Return (component, channel), the weight of each component at or above a channel's centre."""
    centre = fc_hz.double()
    g = (f_hz.double()[:, None] - centre) / centre
    weight = roex(base.double() * centre / _bandwidth(centre), g)
    return torch.where(f_hz[:, None] >= fc_hz, weight, 0.0)


class RoexFilters(ComponentStage):
    """Rounded-exponential filters: intensity and level of components to excitation of channels."""

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
        return {
            **super().derive(),
            "upper": self._upper,
            "upper_blocks": lambda: self.blocks_of(self._upper()),
            "rate": self._rate,
            "away": self._away,
            "relative": self._relative,
        }

    def _rate(self) -> Tensor:
        """Return the slope below each channel's centre per Hz, (channel,)."""
        return (self.lower_slope_base.double() / _bandwidth(self.fc.double())).to(self.dtype)

    def _away(self) -> Tensor:
        """Return every node's distance below a centre times the slope, (channel, node)."""
        distance = self.fc.double()[:, None] - self.nodes_hz.double()
        return (self._rate().double()[:, None] * distance).to(self.dtype)

    def _relative(self) -> Tensor:
        """Return `relative_slope` as a line, (2,): change per dB, and value at 0 dB."""
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
        """Return the factor of the lower slope at each level per ERB.

        The factor would reach 0 at 137 dB; below 0 a filter would amplify far components.
        """
        change = self.lower_slope_per_db / (self.lower_slope_base * KHZ_PER_ERB)
        return (1.0 + change * (levels_db - REFERENCE_LEVEL_DB)).clamp(min=0.0)

    def between(self) -> tuple[Tensor, Tensor]:
        """Return the channel below every node and the share of the channel above; empty if levels
        are given at the nodes."""
        return self.fc.new_empty(0, dtype=torch.int64), self.fc.new_empty(0)

    def levels_at_nodes(self, levels_db: Tensor) -> Tensor:
        """Levels per ERB as the stage gets them -> (.., node)."""
        return levels_db

    def filters(self) -> excitation.Tables:
        """Return the constants of the kernel for the whole pattern."""
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
            return _pattern(intensity, levels_db, list(self.filters()))
        below = _lower_skirt(
            rows_of(intensity),
            rows_of(self.relative_slope(self.levels_at_nodes(levels_db))),
            self.derived("rate", "lower_slope_base", "fc"),
            self.fc,
            self.nodes_hz,
            backend=self.backend,
        )
        return level_db(
            below.view(*intensity.shape[:-1], self.num_channels) + product(intensity, upper)
        )

    def extra_repr(self) -> str:
        return (
            f"num_channels={self.num_channels}, fc={self.fc[0]:.1f}..{self.fc[-1]:.1f} Hz, "
            f"slope_base={self.upper_slope_base:g} up, {self.lower_slope_base:g} down, "
            f"learnable={self.learnable}"
        )


Array = NDArray[np.float64]

#: Channels: 150 of them, a quarter of a Cam apart.
LOWER_CAM, UPPER_CAM, STEP_CAM = 1.75, 39.0, 0.25
_COMPONENTS = "(.., frame, component)"
_SLOPES = {"upper_slope_base": slope_base, "lower_slope_base": slope_base,
           "lower_slope_per_db": slope_per_db}  # fmt: skip


class Moore2016ExcitationPattern(RoexFilters):
    """Excitation patterns of Moore2016, with the level per ERB at every single component.

    Args:
        frequencies: Of the components in Hz, ascending.
        fs: Sampling rate in Hz.
        erb_lower: Lowest channel in Cam.
        erb_upper: Highest channel in Cam.
        erb_step: Channel spacing in Cam.
        upper_slope_base: p(f) ERB(f) / f at and above the centre.
        lower_slope_base: The same below the centre, at a level of 51 dB per ERB.
        lower_slope_per_db: Change of p(1 kHz) below the centre per dB.
        learnable: Make the three slopes parameters.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (.., frame, component), relative to (20 uPa)^2, 0 where a component is not there ->
        (.., frame, channel) in dB SPL, not below -100.

    Invariants:
        A single component gives its own level to a channel at its frequency.

    >>> stage = Moore2016ExcitationPattern(torch.tensor([1000.0]))
    >>> stage(torch.full((1, 1), 1e4)).amax().round()
    tensor(40.)
    """

    @checked_arguments(**_SLOPES)
    def __init__(
        self,
        frequencies: Tensor,
        fs: float = 32000,
        erb_lower: float = LOWER_CAM,
        erb_upper: float = UPPER_CAM,
        erb_step: float = STEP_CAM,
        upper_slope_base: float = SLOPE_BASE,
        lower_slope_base: float = SLOPE_BASE,
        lower_slope_per_db: float = LOWER_SLOPE_PER_DB,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        fc_hz = cam_space(erb_lower, erb_upper, erb_step)
        super().__init__(
            fs, frequencies, fc_hz, upper_slope_base, lower_slope_base, lower_slope_per_db,
            learnable, dtype, backend,
        )  # fmt: skip
        self.erb_step = erb_step

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        return {**super().derive(), **self.weighting("between_nodes", self._between_nodes)}

    def _between_nodes(self) -> Tensor:
        return level_weights(self.nodes_hz, self.nodes_hz, SLOPE_BASE).to(self.dtype)

    def forward(self, intensity: Tensor) -> Tensor:
        """Excitation of the channels."""
        return self.of_audible(intensity, None)

    def of_audible(self, intensity: Tensor, least: Tensor | None) -> Tensor:
        """Like `forward`, of the components above the least, (.., frame, 1)."""
        intensity = self.as_input(intensity, (2, 3, 4), _COMPONENTS)
        nodes = self.at_nodes(intensity, least)
        return self.pattern(nodes, self.levels_db(nodes, "between_nodes", "fc"))


class ERBIntegration(ComponentStage):
    """Level per ERB of Glasberg2002: intensity in rounded-exponential bands at the channels.

    The page integrates a density from 50 Hz on; here the bands are the ones of the slopes.

    Args:
        frequencies: Of the components in Hz, ascending.
        fs: Sampling rate in Hz.
        f_min: Lowest channel in Hz; None is 1.75 Cam (47.5 Hz).
        f_max: Highest channel in Hz; None is 39 Cam (15.1 kHz).
        erb_step: Channel spacing in Cam.
        bandwidth_scale: Factor on the bandwidths.
        learnable: Make `bandwidth_scale` a parameter.
        dtype: torch.float32 or torch.float64.

    Shape:
        (.., frame, component), relative to (20 uPa)^2 -> (.., frame, channel) in dB SPL.

    Invariants:
        A single component gives its own level to a channel at its frequency.

    >>> ERBIntegration(torch.tensor([1000.0])).n_erb_bands
    150
    """

    centres = "fc_erb"
    fc_erb: Tensor
    bandwidth_scale: Tensor

    @checked_arguments()
    def __init__(
        self,
        frequencies: Tensor,
        fs: float = 32000,
        f_min: float | None = None,
        f_max: float | None = None,
        erb_step: float = STEP_CAM,
        bandwidth_scale: float = 1.0,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(fs, frequencies, learnable, dtype)
        if f_max is not None and not f_max <= self.fs / 2:
            raise ParameterError(
                f"f_max must be at most half the sampling rate ({self.fs / 2:g} Hz), got {f_max:g}"
            )
        lower = LOWER_CAM if f_min is None else float(cam_number(f_min))
        upper = UPPER_CAM if f_max is None else float(cam_number(f_max))
        self.erb_step = erb_step
        self.constant("bandwidth_scale", bandwidth_scale, Range(1e-2, 100.0))
        fc_hz = torch.from_numpy(cam_space(lower, upper, erb_step))
        self.register_buffer("fc_erb", fc_hz.to(dtype))

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        return {**super().derive(), **self.weighting("bands", self._bands)}

    def _bands(self) -> Tensor:
        base = SLOPE_BASE / self.bandwidth_scale.double()
        return level_weights(self.nodes_hz, self.fc_erb, base).to(self.dtype)

    @property
    def n_erb_bands(self) -> int:
        """Number of channels."""
        return int(self.fc_erb.shape[0])

    def forward(self, intensity: Tensor) -> Tensor:
        """Level per ERB at the channels."""
        return self.of_nodes(self.at_nodes(self.as_input(intensity, (2, 3), _COMPONENTS)))

    def of_nodes(self, nodes: Tensor) -> Tensor:
        """Like `forward`, of components that `at_nodes` has brought to (.., frame, node)."""
        return self.levels_db(nodes, "bands", "bandwidth_scale", "fc_erb")

    def extra_repr(self) -> str:
        return (
            f"n_erb_bands={self.n_erb_bands}, fc={self.fc_erb[0]:.1f}..{self.fc_erb[-1]:.1f} Hz, "
            f"learnable={self.learnable}"
        )


class ExcitationPattern(RoexFilters):
    """Excitation patterns of Glasberg2002, slopes from the level per ERB between channels.

    The page's slopes in dB per ERB are not this model's: the bases here are p ERB / f, and the
    upper slope does not depend on level.

    Args:
        frequencies: Of the components in Hz, ascending.
        fc_hz: Of the channels in Hz, ascending.
        fs: Sampling rate in Hz.
        upper_slope_base: p(f) ERB(f) / f at and above the centre.
        lower_slope_base: The same below the centre, at a level of 51 dB per ERB.
        upper_slope_per_db: Must be 0.
        lower_slope_per_db: Change of p(1 kHz) below the centre per dB.
        learnable: Make the three slopes parameters.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (.., frame, component) and (.., frame, channel) in dB SPL -> (.., frame, channel) in dB SPL.

    Invariants:
        A single component gives its own level to a channel at its frequency.

    >>> stage = ExcitationPattern(torch.tensor([1000.0]), [1000.0, 2000.0])
    >>> stage(torch.full((1, 1), 1e4), torch.full((1, 2), 51.0))[0, 0].round()
    tensor(40.)
    """

    before: Tensor
    share: Tensor

    @checked_arguments(
        **_SLOPES,
        upper_slope_per_db=Number(),
        fc_hz=Numbers(RATE, single=False, ascending=True),
    )
    def __init__(
        self,
        frequencies: Tensor,
        fc_hz: ArrayLike,
        fs: float = 32000,
        upper_slope_base: float = SLOPE_BASE,
        lower_slope_base: float = SLOPE_BASE,
        upper_slope_per_db: float = 0.0,
        lower_slope_per_db: float = LOWER_SLOPE_PER_DB,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(
            fs, frequencies, fc_hz, upper_slope_base, lower_slope_base, lower_slope_per_db,
            learnable, dtype, backend,
        )  # fmt: skip
        if upper_slope_per_db != 0:
            raise ParameterError(
                "the slope above the centre does not depend on level in this model: "
                f"upper_slope_per_db must be 0, got {upper_slope_per_db}"
            )
        if self.num_channels < 2:
            raise ParameterError(
                f"expected 2 channels or more to interpolate in, got {self.num_channels}"
            )

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        own = {"before": lambda: self._places()[0], "share": lambda: self._places()[1]}
        return {**super().derive(), **own}

    def _places(self) -> tuple[Tensor, Tensor]:
        at_hz = self.nodes_hz.detach().cpu().double()
        below, share = _between(cam_number(at_hz), cam_number(self.fc.cpu()))
        return torch.from_numpy(below), torch.from_numpy(share).to(self.dtype)

    def forward(self, intensity: Tensor, levels_db: Tensor) -> Tensor:
        """Excitation of the channels."""
        intensity = self.as_input(intensity, (2, 3), _COMPONENTS)
        levels_db = self.as_input(levels_db, (2, 3), "(.., frame, channel)")
        return self.of_nodes(self.at_nodes(intensity), levels_db)

    def of_nodes(self, nodes: Tensor, levels_db: Tensor) -> Tensor:
        """Like `forward`, of components that `at_nodes` has brought to (.., frame, node)."""
        return self.pattern(nodes, levels_db)

    def between(self) -> tuple[Tensor, Tensor]:
        return self.derived("before", "fc"), self.derived("share", "fc")

    def levels_at_nodes(self, levels_db: Tensor) -> Tensor:
        before, share = self.between()
        low = levels_db.index_select(-1, before)
        return torch.lerp(low, levels_db.index_select(-1, before + 1), share)


def _between(at: Array, grid: Array) -> tuple[NDArray[np.int64], Array]:
    """Return the index below and the weight of the next point, to interpolate on a rising `grid`.

    Outside of the grid the nearest value holds.
    """
    below = np.clip(np.searchsorted(grid, at, "right") - 1, 0, len(grid) - 2)
    share = np.clip((at - grid[below]) / (grid[below + 1] - grid[below]), 0.0, 1.0)
    return below, share
