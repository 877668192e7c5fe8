"""Neural adaptation: five feedback loops in series, each dividing by a low-passed own output.

Pueschel (1988), Dau, Pueschel and Kohlrausch (1996), with the overshoot limiter of Dau et al.
(1997, section II). Steady input of L dB comes out as about L (model units), onsets overshoot.
The limiter is scaled by each loop's resting divisor, not by the running one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amtcore.arguments import Text, checked_arguments
from amtcore.errors import ParameterError
from amtcore.kernels.chain import ChainStep
from amtcore.kernels.operations.adaptation import ADAPTATION
from amtcore.stages.constants import SECONDS, Range
from amtcore.stages.stage import ChannelStage

_DAU_TAU_S = (0.005, 0.050, 0.129, 0.253, 0.500)
_EVEN_TAU_S = tuple(0.005 + i * (0.500 - 0.005) / 4 for i in range(5))
_PAULICK_TAU_S = (0.007, 0.0318, 0.0878, 0.2143, 0.500)
#: Bounds of the overshoot limit and of the minimum level; where a learnt limit would leave a level
#: no overshoot, this much is left.
_LIMITS, _LEVELS = Range(1.0, 1e6), Range(1e-15, 0.999)
_LEAST_OVERSHOOT = 1e-6
_LIMIT_OFF = Range(0.0, 1.0)


@dataclass(frozen=True)
class _Preset:
    """Time constants in s and overshoot limit (0: none)."""

    tau_s: tuple[float, ...]
    limit: float


PRESETS = {
    "dau1997": _Preset(_DAU_TAU_S, 10.0),
    "osses2021": _Preset(_DAU_TAU_S, 5.0),
    "dau1996": _Preset(_DAU_TAU_S, 0.0),
    "breebaart2001": _Preset(_EVEN_TAU_S, 0.0),
    "puschel1988": _Preset(_EVEN_TAU_S, 0.0),
    "paulick2024": _Preset(_PAULICK_TAU_S, 10.0),
}


class AdaptLoop(ChannelStage):
    """Adaptation loops.

    Args:
        fs: Sampling rate in Hz.
        preset: A key of `PRESETS`, gives `tau` and `limit` where these are None.
        tau: Time constants in s, one per loop.
        limit: Overshoot limit relative to the steady state; 0 switches the limiter off.
        minspl: Level in dB SPL that maps to 0, for input in units of RMS 1 = 100 dB SPL.
        min_level: The same as an amplitude in the input's own unit, one value or one per channel;
            overrides `minspl`.
        learnable: Make `tau`, `limit` (when on) and `min_level` parameters.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (batch, channel, time) or (channel, time), same shape out, in model units.

    Invariants:
        Input at or below the minimum level for ever gives 0; steady input of 1 gives 100.

    >>> AdaptLoop(fs=16000)(torch.zeros(1, 2, 100)).abs().max() < 1e-3
    tensor(True)
    """

    tau: Tensor
    limit: Tensor
    min_level: Tensor

    @checked_arguments(preset=Text(PRESETS))
    def __init__(
        self,
        fs: float,
        preset: str = "dau1997",
        tau: Sequence[float] | Tensor | None = None,
        limit: float | None = None,
        minspl: float = 0.0,
        min_level: Tensor | Sequence[float] | float | None = None,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        self.preset = preset
        chosen = PRESETS[preset].limit if limit is None else float(limit)
        if chosen != 0 and not chosen > 1:
            raise ParameterError(f"limit must be 0 (off) or above 1, got {limit}")
        self.limited = chosen > 1.0
        tau_s = torch.as_tensor(PRESETS[preset].tau_s if tau is None else tau, dtype=torch.float64)
        level = 10.0 ** ((minspl - 100.0) / 20.0) if min_level is None else min_level
        levels = torch.as_tensor(level, dtype=torch.float64)
        # Faster than a sample, a loop would swing about its steady state for ever.
        self.constant("tau", tau_s, Range(1.0 / self.fs, SECONDS.highest))
        bounds = _LIMITS if self.limited else _LIMIT_OFF
        self.constant("limit", chosen, bounds, learnable and self.limited)
        self.constant("min_level", levels, _LEVELS)
        if self.limited and not bool((self._overshoot(levels.reshape(-1, 1)) > 0).all()):
            raise ParameterError(f"limit {chosen:g} is too close to 1 for this minimum level")

    @property
    def num_loops(self) -> int:
        """Number of feedback loops."""
        return int(self.tau.shape[0])

    @property
    def memory_s(self) -> float:
        return float(self.tau.detach().max())

    def _resting(self, levels: Tensor) -> Tensor:
        """(channel, 1) minimum levels -> (channel, loop) divisors at rest, level^(1/2^j)."""
        loops = torch.arange(1, self.num_loops + 1, dtype=torch.float64, device=levels.device)
        return levels.double() ** (0.5**loops)

    def _overshoot(self, levels: Tensor) -> Tensor:
        """m_j = (1 - s_j^2) limit - 1 with the divisors at rest."""
        return (1.0 - self._resting(levels) ** 2) * self.limit.double() - 1.0

    def coefficients(self, channels: int) -> Tensor:
        """(channel, 3 + 3 loops) rows of the recurrence."""
        levels = self.min_level.double().reshape(-1, 1).expand(channels, 1)
        resting = self._resting(levels)
        rise = -torch.expm1(-1.0 / (self.tau.double() * self.fs)).expand_as(resting)
        overshoot = torch.ones_like(resting)
        if self.limited:
            overshoot = self._overshoot(levels).clamp(min=_LEAST_OVERSHOOT)
        offset = resting[:, -1:]
        loops = torch.stack((rise, overshoot, -2.0 / overshoot), -1).flatten(1)
        return torch.cat((levels, offset, 100.0 / (1.0 - offset), loops), 1).to(self.dtype)

    def recurrences(self, channels: int) -> list[ChainStep]:
        if self.min_level.numel() not in (1, channels):
            raise ParameterError(
                f"there are {self.min_level.numel()} minimum levels for {channels} channels"
            )
        levels = self.min_level.reshape(-1, 1).expand(channels, 1)
        argument = 2 * self.num_loops + int(self.limited)
        rest = self._resting(levels).to(self.dtype)
        return [ChainStep(ADAPTATION, argument, self.coefficients(channels), rest)]

    def extra_repr(self) -> str:
        return (
            f"preset={self.preset}, tau={[round(t, 4) for t in self.tau.tolist()]} s, "
            f"limit={self.limit.item():g}, fs={self.fs:g}, learnable={self.learnable}"
        )
