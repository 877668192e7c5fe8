"""Excitation patterns of the loudness models, and the level per ERB that sets their slopes.

The filters and their source are in `roex_filters`; the two models differ in where they take the
level: Moore2016 at every component, Glasberg2002 at the channels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from amtcore.arguments import RATE, Number, Numbers, checked_arguments
from amtcore.errors import ParameterError
from amtcore.scales import cam_number, cam_space
from amtcore.stages.component_nodes import ComponentStage
from amtcore.stages.limits import Range
from amtcore.stages.roex_filters import (
    LOWER_SLOPE_PER_DB,
    SLOPE_BASE,
    RoexFilters,
    level_weights,
)
from amtcore.stages.roex_slopes import slope_base, slope_per_db

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
        """What components add to the level per ERB at each other, too."""
        return {**super().derive(), **self.weighting("between_nodes", self._between_nodes)}

    def _between_nodes(self) -> Tensor:
        return level_weights(self.nodes_hz, self.nodes_hz, SLOPE_BASE).to(self.dtype)

    def forward(self, intensity: Tensor) -> Tensor:
        """Excitation of the channels."""
        return self.of_audible(intensity, None)

    def of_audible(self, intensity: Tensor, least: Tensor | None) -> Tensor:
        """As `forward`, of the components above the least, (.., frame, 1)."""
        intensity = self.as_input(intensity, (2, 3, 4), _COMPONENTS)
        nodes = self.at_nodes(intensity, least)
        return self.pattern(nodes, self.levels_db(nodes, "between_nodes", "fc"))


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
        """As `forward`, of components that `at_nodes` has brought to (.., frame, node)."""
        return self.levels_db(nodes, "bands", "bandwidth_scale", "fc_erb")

    def extra_repr(self) -> str:
        """Channels."""
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
        """Where the nodes lie between the channels, too."""
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
        """As `forward`, of components that `at_nodes` has brought to (.., frame, node)."""
        return self.pattern(nodes, levels_db)

    def between(self) -> tuple[Tensor, Tensor]:
        """The channel below every node, and the share of the one above."""
        return self.derived("before", "fc"), self.derived("share", "fc")

    def levels_at_nodes(self, levels_db: Tensor) -> Tensor:
        """(.., channel) -> (.., node), linear between the channels."""
        before, share = self.between()
        low = levels_db.index_select(-1, before)
        return torch.lerp(low, levels_db.index_select(-1, before + 1), share)


def _between(at: Array, grid: Array) -> tuple[NDArray[np.int64], Array]:
    """For linear interpolation on an ascending `grid`: the one before, and the share of the next.

    Outside of the points the nearest value holds.
    """
    below = np.clip(np.searchsorted(grid, at, "right") - 1, 0, len(grid) - 2)
    share = np.clip((at - grid[below]) / (grid[below + 1] - grid[below]), 0.0, 1.0)
    return below, share
