"""Excitation patterns of the loudness models by rounded-exponential filters.

    W(p, g) = (1 + p |g|) exp(-p |g|),   p(f) = 4 f / ERB(f),   g relative to the filter's centre
    at or above the centre fc:  p(fc)
    below it:  p(fc) - 0.35 (p(fc) / p(1 kHz)) (X - 51),  X the level per ERB at a component in dB.

(Glasberg and Moore 1990; ANSI S3.4-2007.) The weights of levels and upper slopes are constant, so
both are matrix products. The lower slopes are a kernel; in float32 without gradients one kernel
computes the whole pattern. In float32 the components between two channels are weighted at a few
nodes; in float64 every component is weighted. Moore2016 takes the level at every component,
Glasberg2002 at the channels.

Slopes in dB per ERB: with b = p ERB / f, W = (1 + b d) exp(-b d) at d ERB from the centre. Far from
the centre this is 4.34 b dB per ERB. Below the centre b becomes b + c (X - 51) / 7.54, c the change
of p(1 kHz) per dB. Interfaces that state b and c in dB per ERB have numbers outside these ranges.

Nodes are a few frequencies that stand for the components between two channels. Weights of the ear's
filters are smooth in frequency between the centres of neighbouring channels. Above 1.5 kHz many
components f_i lie there. They are replaced by their Gauss nodes x_q, with the Lagrange polynomials
l_q of the nodes:

    sum_i I_i w(f_i) = sum_q J_q w(x_q),   J_q = sum_i I_i l_q(f_i).

This holds for every polynomial w of degree q - 1, and up to 2 q - 1 if all I_i are equal. At low
frequencies components are their own nodes. Some J_q may be negative, as weights of a quadrature.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from amtcore.arguments import RATE, Number, Numbers, Rule, checked_arguments
from amtcore.errors import ParameterError
from amtcore.kernels.operations import excitation
from amtcore.kernels.operations.lower_skirt import LOWER_SKIRT
from amtcore.kernels.operations.specific_loudness import NODES, NODES_OF_AUDIBLE, audible
from amtcore.kernels.operators import operator
from amtcore.kernels.torch_state import can_compute, rows_of
from amtcore.plain_numbers import plain_number
from amtcore.scales import CAM_FLOOR_HZ, CAM_SLOPE, cam_bandwidth, cam_number, cam_space
from amtcore.stages.constants import Range
from amtcore.stages.spectrum import level_db
from amtcore.stages.stage import Stage, product

Array = NDArray[np.float64]

#: Components that are weighted together: the fastest size of matrices.
_PART_COMPONENTS = 120

#: First component, end, and weights (component, node); None if components are their own nodes.
Part = tuple[int, int, Array | None]

_nodes_of_audible = operator(NODES_OF_AUDIBLE)
_erb_levels = operator(excitation.ERB_LEVELS)


@dataclass(frozen=True)
class Nodes:
    """Nodes of components, ascending; a group is what lies between two channels.

    `starts` is the first component of every group and the end of the last; `weights` (component,
    nodes of a group) are unused where components are their own nodes.
    """

    f_hz: Array
    starts: NDArray[np.int64]
    weights: Array

    def parts(self) -> list[Part]:
        """Return the weights as matrices of a few groups; the first groups have no weights."""
        sizes, most = np.diff(self.starts), self.weights.shape[1]
        many = np.flatnonzero(sizes > most)
        alone = int(many[0]) if len(many) else len(sizes)
        parts: list[Part] = [(0, int(self.starts[alone]), None)]
        while alone < len(sizes):
            first = self.starts[alone]
            end = int(np.searchsorted(self.starts, first + _PART_COMPONENTS, "right")) - 1
            end = max(end, alone + 1)
            blocks = [
                np.eye(b - a) if b - a <= most else self.weights[a:b]
                for a, b in pairwise(self.starts[alone : end + 1])
            ]
            whole = torch.block_diag(*map(torch.from_numpy, blocks)).numpy()
            parts.append((int(first), int(self.starts[end]), whole))
            alone = end
        return parts


def nodes_of(f_hz: Array, fc_hz: Array, most: int = NODES) -> Nodes:
    """Return at most `most` nodes between two channels, of which the lower has its component."""
    starts = np.unique(np.concatenate(([0], np.searchsorted(f_hz, fc_hz), [len(f_hz)])))
    nodes_hz, weights = [f_hz[:0]], np.zeros((len(f_hz), most))
    for first, last in pairwise(starts):
        own = f_hz[first:last]
        if last - first > most:
            own, weights[first:last] = _gauss(own, most)
        nodes_hz.append(own)
    return Nodes(np.concatenate(nodes_hz), starts.astype(np.int64), weights)


def _gauss(f_hz: Array, nodes: int) -> tuple[Array, Array]:
    """Return Gauss nodes of more components than nodes, and the weights (component, node)."""
    middle, half = (f_hz[0] + f_hz[-1]) / 2, (f_hz[-1] - f_hz[0]) / 2
    places = (f_hz - middle) / half
    basis, _ = np.linalg.qr(np.vander(places, nodes, increasing=True))
    at = np.linalg.eigvalsh(basis.T @ (places[:, None] * basis))
    others = at - at[:, None] + np.eye(nodes)
    weights = np.ones((len(f_hz), nodes))
    for q, r in permutations(range(nodes), 2):
        weights[:, q] *= (places - at[r]) / others[r, q]
    return middle + half * at, weights


class ComponentStage(Stage):
    """A stage that weights components: in float32 at their nodes, in float64 every one."""

    #: The buffer of the channels' centre frequencies.
    centres = ""
    _parts: list[Part]
    _components_hz: Tensor

    def tables(self) -> dict[str, Tensor]:
        f_hz = self._components_hz.double().numpy()
        if self.dtype == torch.float64:
            nodes = Nodes(f_hz, np.arange(len(f_hz) + 1), np.zeros((len(f_hz), 1)))
        else:
            fc_hz = self.get_buffer(self.centres).detach().cpu().double().numpy()
            nodes = nodes_of(f_hz, fc_hz)
        self._parts = nodes.parts()
        made = {"nodes_hz": nodes.f_hz, "group_weights": nodes.weights}
        made |= {f"to_nodes_{i}": w for i, (_, _, w) in enumerate(self._parts) if w is not None}
        tables = {name: torch.from_numpy(table).to(self.dtype) for name, table in made.items()}
        tables["group_starts"] = torch.from_numpy(nodes.starts)
        return {**tables, "frequencies": self._components_hz.to(self.dtype)}

    def at_nodes(self, intensity: Tensor, least: Tensor | None = None) -> Tensor:
        """Return (.., component) above `least` (.., 1) at the nodes, (.., node)."""
        nodes_hz = self.derived("nodes_hz")  # renews all tables of the nodes
        if can_compute(intensity):
            limits = intensity.new_full((1,), -math.inf) if least is None else least
            return _nodes_of_audible(intensity, limits, *self.groups(), len(nodes_hz))
        heard = intensity if least is None else audible(intensity, least)
        parts = [
            heard[..., first:last]
            if weights is None
            else product(heard[..., first:last], self.get_buffer(f"to_nodes_{i}"))
            for i, (first, last, weights) in enumerate(self._parts)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def groups(self) -> tuple[Tensor, Tensor]:
        """Return `Nodes.starts` and `Nodes.weights` as tensors."""
        return self.derived("group_starts"), self.derived("group_weights")

    def by_kernel(self, *tensors: Tensor) -> bool:
        """Return True if the kernel without gradients may take these tensors and tables."""
        return self.backend is None and can_compute(*tensors)

    def blocks_of(self, weights: Tensor) -> Tensor:
        """Convert (node, place) to the kernel's layout; empty in float64, which has no kernel."""
        single = self.dtype == torch.float32
        return excitation.blocks_of(weights) if single else weights.new_empty(0)

    def levels_db(self, nodes: Tensor, name: str) -> Tensor:
        """Return the levels by the weights (node, place) of the tables `name` and `name`_blocks."""
        weights = self.derived(name)
        if self.by_kernel(nodes, weights):
            return _erb_levels(nodes, weights, self.derived(f"{name}_blocks"))
        return level_db(product(nodes, weights))


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


#: p(f) = SLOPE_BASE f / ERB(f) at the reference level.
SLOPE_BASE = 4.0
#: Change of p(1 kHz) of the lower slope per dB.
LOWER_SLOPE_PER_DB = -0.35
#: Smaller weights are 0: they are 200 dB down, and denormal weights make products slow.
LEAST_WEIGHT = 1e-20

_lower_skirt, _pattern = operator(LOWER_SKIRT), operator(excitation.EXCITATION_PATTERN)


def roex(p: Tensor, g: Tensor) -> Tensor:
    """Return the weight of a filter of slope p at the relative distance g; 0 beyond g = 4."""
    x = p * g.abs()
    weight = (1.0 + x) * torch.exp(-x)
    return torch.where((g <= 4.0) & (weight >= LEAST_WEIGHT), weight, 0.0)


def _bandwidth(f_hz: Tensor) -> Tensor:
    return CAM_FLOOR_HZ * (CAM_SLOPE * f_hz + 1.0)


def level_weights(from_hz: Tensor, to_hz: Tensor, base: Tensor | float) -> Tensor:
    """Return (component, place), the weight of each component in the level per ERB."""
    source = from_hz.double()[:, None]
    g = (to_hz.double() - source) / source
    return roex(base * source / _bandwidth(source), g)


class RoexFilters(ComponentStage):
    """Rounded-exponential filters: intensity and level of components to excitation of channels."""

    centres = "fc"
    shown = "num_channels fc upper_slope_base lower_slope_base learnable"

    def set_filters(
        self, frequencies: Tensor, fc_hz: ArrayLike, upper: float, lower: float, per_db: float
    ) -> None:
        """Set components and channels in Hz, and the slopes, as the constructors name them."""
        self._components_hz = frequencies.detach().cpu().clone()
        least = -lower * KHZ_PER_ERB / (LOUDEST_DB - REFERENCE_LEVEL_DB)
        if per_db < least:
            vanishes_db = REFERENCE_LEVEL_DB - lower * KHZ_PER_ERB / per_db
            here = per_db * KHZ_PER_ERB / DB_PER_ERB
            raise ParameterError(
                f"lower_slope_per_db must be {least:.3g} or above with lower_slope_base {lower:g}, "
                f"so that there is a lower slope up to {LOUDEST_DB:g} dB, got {per_db:g}, where it "
                f"ends at {vanishes_db:.0f} dB; it is the change of p(1 kHz) per dB, -0.35 as "
                f"published: a change of {per_db:g} dB per ERB is {here:.3g} here"
            )
        self.constant("upper_slope_base", upper, Range(1e-3, 10.0))
        self.constant("lower_slope_base", lower, Range(1e-3, 10.0))
        self.constant("lower_slope_per_db", per_db, Range(-10.0, 0.0))
        self.register_buffer("fc", torch.as_tensor(np.asarray(fc_hz)).to(self.dtype))

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        def upper() -> Tensor:
            """Return the weight of each node at or above a channel's centre, (node, channel)."""
            f_hz, centre = self.nodes_hz[:, None], self.fc.double()
            g = (f_hz.double() - centre) / centre
            weight = roex(self.upper_slope_base.double() * centre / _bandwidth(centre), g)
            return torch.where(f_hz >= self.fc, weight, 0.0).to(self.dtype)

        def rate() -> Tensor:
            """Return the slope below each channel's centre per Hz, (channel,)."""
            return (self.lower_slope_base.double() / _bandwidth(self.fc.double())).to(self.dtype)

        def away() -> Tensor:
            """Return every node's distance below a centre times the slope, (channel, node)."""
            distance = self.fc.double()[:, None] - self.nodes_hz.double()
            return (rate().double()[:, None] * distance).to(self.dtype)

        def relative() -> Tensor:
            """Return `relative_slope` as a line, (2,): change per dB, and value at 0 dB."""
            change = (self.lower_slope_per_db / (self.lower_slope_base * KHZ_PER_ERB)).double()
            return torch.stack((change, 1.0 - change * REFERENCE_LEVEL_DB)).to(self.dtype)

        def upper_blocks() -> Tensor:
            return self.blocks_of(upper())

        made = (upper, upper_blocks, rate, away, relative)
        return {function.__name__: function for function in made}

    @property
    def num_channels(self) -> int:
        """Number of channels."""
        return int(self.fc.shape[0])

    def relative_slope(self, levels_db: Tensor) -> Tensor:
        """Return the factor of the lower slope at each level; below 0 a filter would amplify."""
        change = self.lower_slope_per_db / (self.lower_slope_base * KHZ_PER_ERB)
        return (1.0 + change * (levels_db - REFERENCE_LEVEL_DB)).clamp(min=0.0)

    def filters(self) -> excitation.Tables:
        """Return the constants of the kernel for the whole pattern."""
        names = ("away", "relative", "before", "share", "upper", "upper_blocks")
        return excitation.Tables(*map(self.derived, names))

    def pattern(self, intensity: Tensor, levels_db: Tensor) -> Tensor:
        """Intensity (.., frame, node) and level per ERB -> (.., frame, channel) in dB."""
        upper = self.derived("upper")
        if self.by_kernel(intensity, levels_db, upper, self.derived("relative")):
            return _pattern(intensity, levels_db, list(self.filters()))
        before = self.derived("before")
        if len(before):  # there are levels of channels, not of nodes
            low, high = (levels_db.index_select(-1, before + i) for i in (0, 1))
            levels_db = torch.lerp(low, high, self.derived("share"))
        relative = self.relative_slope(levels_db)
        below = _lower_skirt(
            rows_of(intensity), rows_of(relative), self.derived("rate"), self.fc, self.nodes_hz,
            backend=self.backend,
        )  # fmt: skip
        return level_db(
            below.view(*intensity.shape[:-1], self.num_channels) + product(intensity, upper)
        )


#: Channels: 150 of them, a quarter of a Cam apart.
LOWER_CAM, UPPER_CAM, STEP_CAM = 1.75, 39.0, 0.25
_COMPONENTS = "(.., frame, component)"
_PUBLISHED = "the published change of p(1 kHz) per dB is -0.35; filters widen with the level"
_SLOPES: dict[str, Rule] = {"upper_slope_base": slope_base, "lower_slope_base": slope_base,
           "lower_slope_per_db": Number(least=-10.0, most=0.0, hint=_PUBLISHED)}  # fmt: skip


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
        super().__init__(fs, learnable, dtype, backend)
        slopes = upper_slope_base, lower_slope_base, lower_slope_per_db
        self.set_filters(frequencies, cam_space(erb_lower, erb_upper, erb_step), *slopes)
        self.erb_step = erb_step

    def tables(self) -> dict[str, Tensor]:
        tables = super().tables()
        nodes_hz = tables["nodes_hz"]
        weights = level_weights(nodes_hz, nodes_hz, SLOPE_BASE).to(self.dtype)
        made = {"between_nodes": weights, "between_nodes_blocks": self.blocks_of(weights)}
        none = {"before": torch.zeros(0, dtype=torch.int64), "share": weights.new_zeros(0)}
        return {**tables, **made, **none}

    def forward(self, intensity: Tensor, least: Tensor | None = None) -> Tensor:
        """Excitation of the channels, of the components above the least, (.., frame, 1)."""
        intensity = self.as_input(intensity, (2, 3, 4), _COMPONENTS)
        nodes = self.at_nodes(intensity, least)
        return self.pattern(nodes, self.levels_db(nodes, "between_nodes"))


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
    shown = "n_erb_bands fc_erb learnable"

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
        super().__init__(fs, learnable, dtype)
        self._components_hz = frequencies.detach().cpu().clone()
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
        def bands() -> Tensor:
            base = SLOPE_BASE / self.bandwidth_scale.double()
            return level_weights(self.nodes_hz, self.fc_erb, base).to(self.dtype)

        return {"bands": bands, "bands_blocks": lambda: self.blocks_of(bands())}

    @property
    def n_erb_bands(self) -> int:
        """Number of channels."""
        return int(self.fc_erb.shape[0])

    def forward(self, intensity: Tensor) -> Tensor:
        """Level per ERB at the channels."""
        return self.of_nodes(self.at_nodes(self.as_input(intensity, (2, 3), _COMPONENTS)))

    def of_nodes(self, nodes: Tensor) -> Tensor:
        """Like `forward`, of components that `at_nodes` has brought to (.., frame, node)."""
        return self.levels_db(nodes, "bands")


class ExcitationPattern(RoexFilters):
    """Excitation patterns of Glasberg2002, slopes from the level per ERB between channels.

    The page's slopes in dB per ERB are not this model's: the bases here are p ERB / f, and the
    upper slope does not depend on level.

    Args:
        frequencies: Of the components in Hz, ascending.
        fc_hz: Of the channels in Hz, ascending.
        upper_slope_per_db: Must be 0.
        Others as for `Moore2016ExcitationPattern`.

    Shape:
        (.., frame, component) and (.., frame, channel) in dB SPL -> (.., frame, channel) in dB SPL.

    Invariants:
        A single component gives its own level to a channel at its frequency.

    >>> stage = ExcitationPattern(torch.tensor([1000.0]), [1000.0, 2000.0])
    >>> stage(torch.full((1, 1), 1e4), torch.full((1, 2), 51.0))[0, 0].round()
    tensor(40.)
    """

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
        super().__init__(fs, learnable, dtype, backend)
        slopes = upper_slope_base, lower_slope_base, lower_slope_per_db
        self.set_filters(frequencies, fc_hz, *slopes)
        if upper_slope_per_db != 0:
            raise ParameterError(
                "the slope above the centre does not depend on level in this model: "
                f"upper_slope_per_db must be 0, got {upper_slope_per_db}"
            )
        if self.num_channels < 2:
            raise ParameterError(
                f"expected 2 channels or more to interpolate in, got {self.num_channels}"
            )

    def tables(self) -> dict[str, Tensor]:
        """Return also the channel below each node, and the weight of the next, to interpolate."""
        tables = super().tables()
        at, grid = cam_number(tables["nodes_hz"].double()), cam_number(self.fc.cpu())
        below = np.clip(np.searchsorted(grid, at, "right") - 1, 0, len(grid) - 2)
        share = np.clip((at - grid[below]) / (grid[below + 1] - grid[below]), 0.0, 1.0)
        made = {"before": torch.from_numpy(below), "share": torch.from_numpy(share).to(self.dtype)}
        return {**tables, **made}

    def forward(self, intensity: Tensor, levels_db: Tensor) -> Tensor:
        """Excitation of the channels."""
        intensity = self.as_input(intensity, (2, 3), _COMPONENTS)
        levels_db = self.as_input(levels_db, (2, 3), "(.., frame, channel)")
        return self.pattern(self.at_nodes(intensity), levels_db)
