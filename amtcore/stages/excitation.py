"""Excitation patterns: rounded-exponential filters whose lower slope depends on level.

    W(p, g) = (1 + p |g|) exp(-p |g|),   p(f) = 4 f / ERB(f),   g relative to the filter's centre
    at or above the centre fc:  p(fc)
    below it:  p(fc) - 0.35 (p(fc) / p(1 kHz)) (X - 51),  X the level per ERB at the component in dB

(Glasberg and Moore 1990; ANSI S3.4-2007.) What does not depend on the signal is a
matrix product: the level per ERB and the upper slopes. The lower slopes are a kernel. In float32
the many components between two channels are weighted at a few nodes, see `component_nodes`; in
float64 every one for itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from amtcore.arguments import RATE, Number, Numbers, checked_arguments
from amtcore.errors import ParameterError
from amtcore.kernels.ops.roex import lower_skirt
from amtcore.scales.cam import CAM_FLOOR_HZ, CAM_SLOPE, cam_number, cam_space
from amtcore.stages.base import product
from amtcore.stages.component_nodes import ComponentStage
from amtcore.stages.limits import Range
from amtcore.stages.roex_slopes import (
    KHZ_PER_ERB,
    REFERENCE_LEVEL_DB,
    check_lower_slope,
    slope_base,
    slope_per_db,
)
from amtcore.stages.spectrum import level_db

Array = NDArray[np.float64]

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
#: Channels: 150 of them, a quarter of a Cam apart.
LOWER_CAM, UPPER_CAM, STEP_CAM = 1.75, 39.0, 0.25
_COMPONENTS = "(.., frame, component)"
_SLOPES = {"upper_slope_base": slope_base, "lower_slope_base": slope_base,
           "lower_slope_per_db": slope_per_db}  # fmt: skip


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


class _RoexFilters(ComponentStage):
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
        return {**super().derive(), "upper": self._upper, "rate": self._rate}

    def _rate(self) -> Tensor:
        """Slope below a channel's centre per Hz, (channel,)."""
        return (self.lower_slope_base.double() / _bandwidth(self.fc.double())).to(self.dtype)

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

    def pattern(self, intensity: Tensor, levels_db: Tensor) -> Tensor:
        """Intensity and level per ERB, both (.., frame, node), -> (.., frame, channel)."""
        below = lower_skirt(
            intensity.flatten(0, -2),
            self.relative_slope(levels_db).flatten(0, -2),
            self.derived("rate", "lower_slope_base", "fc"),
            self.fc,
            self.nodes_hz,
            self.backend,
        )
        upper = self.derived("upper", "upper_slope_base", "fc")
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


class Moore2016ExcitationPattern(_RoexFilters):
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
        """What components add to the level per ERB at each other, too."""
        return {**super().derive(), "between_nodes": self._between_nodes}

    def _between_nodes(self) -> Tensor:
        return level_weights(self.nodes_hz, self.nodes_hz, SLOPE_BASE).to(self.dtype)

    def forward(self, intensity: Tensor) -> Tensor:
        """Excitation of the channels."""
        return self.of_audible(intensity, None)

    def of_audible(self, intensity: Tensor, least: Tensor | None) -> Tensor:
        """As `forward`, of the components above the least, (.., frame, 1)."""
        intensity = self.as_input(intensity, (2, 3, 4), _COMPONENTS)
        nodes = self.at_nodes(intensity, least)
        levels_db = level_db(product(nodes, self.derived("between_nodes", "fc")))
        return self.pattern(nodes, levels_db)


class ERBIntegration(ComponentStage):
    """Level per ERB of Glasberg2002: intensity in rounded-exponential bands at the channels.

    The page integrates a density from 50 Hz on; here the bands are those that set the slopes.

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
        if not bandwidth_scale > 0:
            raise ParameterError(f"bandwidth_scale must be above 0, got {bandwidth_scale}")
        self.erb_step = erb_step
        self.constant("bandwidth_scale", bandwidth_scale, Range(1e-2, 100.0))
        fc_hz = torch.from_numpy(cam_space(lower, upper, erb_step))
        self.register_buffer("fc_erb", fc_hz.to(dtype))

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        """What components add to the level per ERB of the channels, too."""
        return {**super().derive(), "bands": self._bands}

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
        """As `forward`, of components that `at_nodes` has brought to (.., frame, node)."""
        return level_db(product(nodes, self.derived("bands", "bandwidth_scale", "fc_erb")))

    def extra_repr(self) -> str:
        """Channels."""
        return (
            f"n_erb_bands={self.n_erb_bands}, fc={self.fc_erb[0]:.1f}..{self.fc_erb[-1]:.1f} Hz, "
            f"learnable={self.learnable}"
        )


class ExcitationPattern(_RoexFilters):
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

    between: Tensor
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
        """Where the nodes lie between the channels, too."""
        own = {"between": lambda: self._places()[0], "share": lambda: self._places()[1]}
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
        """As `forward`, of components that `at_nodes` has brought to (.., frame, node)."""
        return self.pattern(nodes, self.levels_at_nodes(levels_db))

    def levels_at_nodes(self, levels_db: Tensor) -> Tensor:
        """(.., channel) -> (.., node), linear between the channels."""
        between, share = self.derived("between", "fc"), self.derived("share", "fc")
        low = levels_db.index_select(-1, between)
        return torch.lerp(low, levels_db.index_select(-1, between + 1), share)


def _between(at: Array, grid: Array) -> tuple[NDArray[np.int64], Array]:
    """For linear interpolation on an ascending `grid`: the one before, and the share of the next.

    Outside of the points the nearest value holds.
    """
    below = np.clip(np.searchsorted(grid, at, "right") - 1, 0, len(grid) - 2)
    share = np.clip((at - grid[below]) / (grid[below + 1] - grid[below]), 0.0, 1.0)
    return below, share
