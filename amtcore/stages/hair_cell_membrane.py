"""Inner hair cell as an electrical circuit: basilar-membrane velocity to receptor potential.

Lopez-Poveda and Eustaquio-Martin (2006) as simplified by Paulick et al. (2024): two-step
transduction conductance, two potassium conductances, one capacitance, forward Euler at the
sampling rate. The recurrence works on the deviation from rest, so float32 keeps the digits that
matter; in float32 on the potential itself the threshold would be rounding noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.errors import ParameterError
from amtcore.kernels.chain import BlockOp
from amtcore.kernels.operations.hair_cell import HAIR_CELL
from amtcore.stages.base import ChannelStage
from amtcore.stages.limits import Range, around

#: Paulick et al. (2024): displacement per velocity; S, m, V and F.
CONSTANTS = {
    "scaling_factor": 10.0 ** (-105.0 / 20.0),
    "Gmet_max": 30e-9,
    "x0": 20e-9,
    "s0": 16e-9,
    "s1": 35e-9,
    "EP": 90e-3,
    "Cm": 12.5e-12,
    "Gkf": 19.8e-9,
    "Gks": 19.8e-9,
    "Ekf": -71e-3,
    "Eks": -78e-3,
    "V_rest": -57.03e-3,
    "G_precharge": 3.3514e-9,
}
_PRECHARGE_S = 0.05
_MOST_V = 0.3


class IHCPaulick2024(ChannelStage):
    """Receptor potential of an inner hair cell.

    Args:
        fs: Sampling rate in Hz, 5.6 kHz or more (below, the time step is unstable).
        learnable: Make the 13 `CONSTANTS` parameters.
        dtype: torch.float32 or torch.float64; both are stable.
        backend: Kernel choice; None picks.

    Shape:
        (batch, channel, time) or (channel, time) in m/s, same shape out in V above rest.

    Invariants:
        Silence gives 0 (below 1e-6 V); any input gives between -12.9 mV and 58.1 mV.

    >>> ihc = IHCPaulick2024(fs=44100, learnable=True)
    >>> sum(p.numel() for p in ihc.parameters())
    13
    """

    scaling_factor: Tensor
    Gmet_max: Tensor
    x0: Tensor
    s0: Tensor
    s1: Tensor
    EP: Tensor
    Cm: Tensor
    Gkf: Tensor
    Gks: Tensor
    Ekf: Tensor
    Eks: Tensor
    V_rest: Tensor
    G_precharge: Tensor

    @checked_arguments()
    def __init__(
        self,
        fs: float,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        self.precharge_duration = _PRECHARGE_S
        for name, value in CONSTANTS.items():
            above, below = Range(0.0, _MOST_V), Range(-_MOST_V, 0.0)
            potential = {"EP": above, "Ekf": below, "Eks": below, "V_rest": below}
            self.constant(name, value, potential.get(name, around(value)))
        open_s = sum(CONSTANTS[name] for name in ("Gmet_max", "Gkf", "Gks"))
        slowest_hz = open_s / CONSTANTS["Cm"]
        if not self.fs > slowest_hz:
            raise ParameterError(
                f"fs must be above {slowest_hz:.0f} Hz for the hair cell's time step, got {fs:g}"
            )

    @property
    def memory_s(self) -> float:
        """That of the membrane where no transduction channel is open, in s."""
        return float((self.Cm / (self.Gkf + self.Gks)).detach())

    def coefficients(self) -> Tensor:
        """(1, 9) rows of the recurrence.

        With the conductance at rest the potential nears V_inf geometrically; after n steps from
        V_rest it is V_0 = V_inf + (V_rest - V_inf) (1 - g)^n, g the total conductance over fs Cm.
        """
        value = {name: getattr(self, name).double() for name in CONSTANTS}
        leaks, at_rest = value["Gkf"] + value["Gks"], value["G_precharge"]
        # A step that learning made too long for the conductances counts as the longest stable one.
        most = 1.0 / (leaks + torch.maximum(value["Gmet_max"], at_rest))
        step = torch.minimum(1.0 / (self.fs * value["Cm"]), most)
        potassium = value["Gkf"] * value["Ekf"] + value["Gks"] * value["Eks"]
        settled = (at_rest * value["EP"] + potassium) / (at_rest + leaks)
        steps = round(self.precharge_duration * self.fs)
        total = step * (at_rest + leaks)
        before = (value["V_rest"] - settled) * (1.0 - total) ** steps
        rows = (
            value["x0"] / value["s1"],
            -value["scaling_factor"] / value["s1"],
            value["x0"] / value["s0"],
            -value["scaling_factor"] / value["s0"],
            step * value["Gmet_max"],
            step * leaks,
            step * at_rest,
            value["EP"] - (settled + before),
            -total * before,
        )
        return torch.stack(rows).to(self.dtype).unsqueeze(0)

    def recurrences(self, channels: int) -> list[BlockOp]:
        """The circuit, at rest."""
        coef = self.coefficients().expand(channels, -1)
        return [BlockOp(HAIR_CELL, 0, coef, coef.new_zeros(channels, 1))]

    def forward(self, vel: Tensor) -> Tensor:
        """The whole signal at once: basilar-membrane velocity in m/s, (batch, channel, time) or
        (channel, time), to potential in V, same shape."""
        return super().forward(vel)

    def extra_repr(self) -> str:
        """Rate."""
        return f"fs={self.fs:g}, learnable={self.learnable}"
