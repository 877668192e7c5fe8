"""Inner hair cells: half-wave rectification with a low-pass, and an electrical circuit.

The stage `IHCEnvelope` has presets after Dau et al. (1996), Breebaart et al. (2001) and King et al.
(2019). Others follow Lindemann (1986), Bernstein et al. (1999) and Relano-Iborra et al. (2019). The
presets `hilbert` and `bernstein1999` take an analytic signal by FFT, which needs the whole signal.
The king2019 cutoff is 1000 Hz as in its reference program; some texts quote 1500 Hz.

`IHCPaulick2024` maps basilar-membrane velocity to receptor potential: Lopez-Poveda and
Eustaquio-Martin (2006) as simplified by Paulick et al. (2024). The circuit has a two-step
transduction conductance, two potassium conductances and one capacitance; the method is forward
Euler at the sampling rate. The state is the deviation from rest, since float32 would lose
potentials near threshold in the rounding of the potential itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from amtcore import filter_design as design
from amtcore.arguments import Text, checked_arguments, whole
from amtcore.errors import ParameterError
from amtcore.kernels.chain import ChainStep
from amtcore.kernels.operations.hair_cell import HAIR_CELL
from amtcore.kernels.operations.sections import FIRST_ORDER, STATE_VARIABLE
from amtcore.kernels.torch_state import by_item
from amtcore.stages.constants import Range, StableDenominator, around
from amtcore.stages.stage import ChannelStage, check_below_nyquist, lowpass_memory_s


@dataclass(frozen=True)
class _Preset:
    """Low-pass cutoff in Hz, order, number of passes, and nonlinearity before the filter."""

    cutoff_hz: float | None
    order: int = 1
    iterations: int = 1
    nonlinearity: str = "half_wave"


PRESETS = {
    "dau1996": _Preset(1000.0),
    "breebaart2001": _Preset(2000.0, iterations=5),
    "king2019": _Preset(1000.0),
    "lindemann": _Preset(800.0),
    "hilbert": _Preset(None, nonlinearity="hilbert"),
    "bernstein1999": _Preset(425.0, order=2, nonlinearity="bernstein"),
    "relanoiborra2019": _Preset(1000.0, order=2),
}


def analytic_magnitude(x: Tensor) -> Tensor:
    """|analytic signal| over the whole last axis, by FFT."""
    n = x.shape[-1]
    if x.numel() == 0:
        return x.abs()
    # Twice the frequencies between 0 and fs/2, whose ends count once. No slice and no branch
    # depends on n, so that its axis may be dynamic in torch.export.
    twice = 2 * torch.arange(n, device=x.device)
    weights = 1.0 + torch.sign(n - twice).to(x.dtype) - (twice == 0).to(x.dtype)
    return torch.fft.ifft(torch.fft.fft(x) * weights).abs()


class IHCEnvelope(ChannelStage):
    """Envelope of each channel: rectify, then low-pass.

    Args:
        fs: Sampling rate in Hz.
        cutoff: Low-pass cutoff in Hz; None takes the method's own.
        order: Order of the low-pass, 1 or 2; methods with a fixed order of 2 ignore it.
        method: A key of `PRESETS`.
        learnable: Make the filter coefficients `b` and `a` parameters.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (batch, channel, time) or (channel, time), same shape out.

    >>> ihc = IHCEnvelope(fs=44100, method="dau1996", learnable=True)
    >>> sum(p.numel() for p in ihc.parameters())
    4
    """

    shown = "method cutoff order iterations fs learnable"

    @checked_arguments(order=whole(1, 2), method=Text(PRESETS))
    def __init__(
        self,
        fs: float,
        cutoff: float | None = None,
        order: int = 1,
        method: str = "dau1996",
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        preset = PRESETS[method]
        self.method = method
        self.order = max(order, preset.order)
        self.iterations = preset.iterations
        self.cutoff = preset.cutoff_hz if cutoff is None else float(cutoff)
        self._nonlinearity = preset.nonlinearity
        if self.cutoff is not None and self._nonlinearity != "hilbert":
            check_below_nyquist("the low-pass cutoff", self.cutoff, self.fs)
            butter = design.butter1 if self.order == 1 else design.butter2
            b, a = butter(self.cutoff, self.fs)
        else:
            b, a = [1.0, 0.0], [1.0, 0.0]
        self.constant("b", b, Range(-10.0, 10.0, max(b)))
        self.constant("a", a, StableDenominator())

    @property
    def can_stream(self) -> bool:
        return self._nonlinearity == "half_wave"

    @property
    def memory_s(self) -> float | None:
        """Time constant of the designed low-pass in s; None if the whole signal is needed."""
        if not self.can_stream or self.cutoff is None or self.learnable:
            return None
        return lowpass_memory_s(self.cutoff, self.order)

    def recurrences(self, channels: int) -> list[ChainStep]:
        if self.order == 1:
            code, rows = FIRST_ORDER, design.first_order_rows(self.b, self.a)
        else:
            code, rows = STATE_VARIABLE, design.section_rows(self.b, self.a)
        coef = rows.to(self.dtype).expand(channels, -1)
        rest = coef.new_zeros(channels, self.order)
        first = ChainStep(code, int(self._nonlinearity == "half_wave"), coef, rest)
        return [first] + [ChainStep(code, 0, coef, rest)] * (self.iterations - 1)

    def _check_streamable(self) -> None:
        if not self.can_stream:
            raise ParameterError(
                f"hair-cell method {self.method!r} needs the whole signal, so it cannot stream nor "
                "run block by block; use forward(), or a half-wave method such as 'dau1996'"
            )

    def block_ops(self, channels: int) -> list[ChainStep]:
        self._check_streamable()
        return self.recurrences(channels)

    def stream(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check_streamable()
        return super().stream(x, state)

    def forward(self, x: Tensor) -> Tensor:
        """The whole signal at once."""
        return super().stream(x)[0]

    def _run(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        if self._nonlinearity == "hilbert":
            return by_item(analytic_magnitude, x), self.rest_state(*x.shape[:2])
        if self._nonlinearity == "bernstein":

            def with_power(item: Tensor) -> Tensor:
                """Take the envelope to the power 0.23 (Bernstein et al. 1999)."""
                weight = analytic_magnitude(item).clamp(min=torch.finfo(x.dtype).tiny)
                return (weight ** (0.23 - 1.0) * item).clamp(min=0).square()

            x = by_item(with_power, x)
        return super()._run(x, state)


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

    shown = "fs learnable"

    @checked_arguments()
    def __init__(
        self,
        fs: float,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        self.precharge_duration = 0.05
        above, below = Range(0.0, 0.3), Range(-0.3, 0.0)  # V
        potential = {"EP": above, "Ekf": below, "Eks": below, "V_rest": below}
        for name, value in CONSTANTS.items():
            self.constant(name, value, potential.get(name, around(value)))
        open_s = sum(CONSTANTS[name] for name in ("Gmet_max", "Gkf", "Gks"))
        slowest_hz = open_s / CONSTANTS["Cm"]
        if not self.fs > slowest_hz:
            raise ParameterError(
                f"fs must be above {slowest_hz:.0f} Hz for the hair cell's time step, got {fs:g}"
            )

    @property
    def memory_s(self) -> float:
        """Time constant of the membrane where no transduction channel is open, in s."""
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

    def recurrences(self, channels: int) -> list[ChainStep]:
        coef = self.coefficients().expand(channels, -1)
        return [ChainStep(HAIR_CELL, 0, coef, coef.new_zeros(channels, 1))]

    def forward(self, vel: Tensor) -> Tensor:
        """The whole signal at once, of basilar-membrane velocity in m/s."""
        return super().forward(vel)
