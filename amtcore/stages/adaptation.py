"""Neural adaptation: five feedback loops in series, each dividing by a low-passed own output.

Pueschel (1988), Dau, Pueschel and Kohlrausch (1996), with the overshoot limiter of Dau et al.
(1997, section II). Steady input of L dB comes out as about L (model units), onsets overshoot.
The limiter is scaled by each loop's resting divisor, not by the running one.
"""

from __future__ import annotations

from collections.abc import Sequence

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
#: Overshoot where a learnt limit would leave a level none.
_LEAST_OVERSHOOT = 1e-6

#: Time constants in s and overshoot limit (0: none) of each preset.
PRESETS = {
    "dau1997": (_DAU_TAU_S, 10.0),
    "osses2021": (_DAU_TAU_S, 5.0),
    "dau1996": (_DAU_TAU_S, 0.0),
    "breebaart2001": (_EVEN_TAU_S, 0.0),
    "puschel1988": (_EVEN_TAU_S, 0.0),
    "paulick2024": ((0.007, 0.0318, 0.0878, 0.2143, 0.500), 10.0),
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

    shown = "preset tau limit fs learnable"

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
        preset_tau_s, preset_limit = PRESETS[preset]
        chosen = preset_limit if limit is None else float(limit)
        if chosen != 0 and not chosen > 1:
            raise ParameterError(f"limit must be 0 (off) or above 1, got {limit}")
        self.limited = chosen > 1.0
        tau_s = torch.as_tensor(preset_tau_s if tau is None else tau, dtype=torch.float64)
        level = 10.0 ** ((minspl - 100.0) / 20.0) if min_level is None else min_level
        levels = torch.as_tensor(level, dtype=torch.float64)
        # Faster than a sample, a loop would swing about its steady state for ever.
        self.constant("tau", tau_s, Range(1.0 / self.fs, SECONDS.highest))
        bounds = Range(1.0, 1e6) if self.limited else Range(0.0, 1.0)
        self.constant("limit", chosen, bounds, learnable and self.limited)
        self.constant("min_level", levels, Range(1e-15, 0.999))
        self.num_loops = len(tau_s)
        if self.limited and not bool((self._at_rest(levels.reshape(-1, 1))[1] > 0).all()):
            raise ParameterError(f"limit {chosen:g} is too close to 1 for this minimum level")

    @property
    def memory_s(self) -> float:
        return float(self.tau.detach().max())

    def _at_rest(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divisors at rest and the overshoots, (channel, loop) each, of (channel, 1).

        A minimum level gives the divisors s_j = level^(1/2^j), and m_j = (1 - s_j^2) limit - 1.
        """
        loops = torch.arange(1, self.num_loops + 1, dtype=torch.float64, device=levels.device)
        resting = levels ** (0.5**loops)
        return resting, (1.0 - resting**2) * self.limit.double() - 1.0

    def recurrences(self, channels: int) -> list[ChainStep]:
        levels = self.min_level.double().reshape(-1, 1)
        if len(levels) not in (1, channels):
            raise ParameterError(f"there are {len(levels)} minimum levels for {channels} channels")
        levels = levels.expand(channels, 1)
        resting, overshoot = self._at_rest(levels)
        if self.limited:
            overshoot = overshoot.clamp(min=_LEAST_OVERSHOOT)
        else:
            overshoot = torch.ones_like(resting)
        rise = -torch.expm1(-1.0 / (self.tau.double() * self.fs)).expand_as(resting)
        offset = resting[:, -1:]
        loops = torch.stack((rise, overshoot, -2.0 / overshoot), -1).flatten(1)
        coef = torch.cat((levels, offset, 100.0 / (1.0 - offset), loops), 1).to(self.dtype)
        argument = 2 * self.num_loops + int(self.limited)
        return [ChainStep(ADAPTATION, argument, coef, resting.to(self.dtype))]
