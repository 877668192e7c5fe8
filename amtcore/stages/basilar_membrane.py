"""Filters of the basilar membrane: linear gammatones, and dual-resonance nonlinear filters.

`GammatoneFilterbank` is the all-pole complex gammatone of order n (Hohmann 2002, eq. 13; Lyon
1997): n equal complex one-pole sections in cascade, twice the real part. The cascade is more exact
than the expanded polynomial.

The `DRNLFilterbank` maps stapes velocity in m/s to basilar-membrane velocity (Lopez-Poveda and
Meddis 2001). Parameters are from Paulick et al. (2024) or from Jepsen, Ewert and Dau (2008), whose
gammatones are longer. Each channel sums a linear path (gain, gammatone, low-pass) and a compressive
path (gammatone, broken stick, gammatone, low-pass). `HIx` is a cochlea whose compressive path has
no gain. An audiogram lowers the gain of the compressive path, and then both paths, see
`DRNLFilterbank`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from amtcore import filter_design as design
from amtcore.arguments import Text, checked_arguments, whole
from amtcore.errors import ParameterError
from amtcore.kernels.chain import ChainStep
from amtcore.kernels.operation import ChainOperation
from amtcore.kernels.operations.compression import BROKEN_STICK
from amtcore.kernels.operations.one_pole import ONE_POLE_CASCADE, POLE_ZERO_CASCADE
from amtcore.kernels.operations.parallel_paths import ADD, SAVE, SWAP
from amtcore.kernels.operations.sections import STATE_VARIABLE
from amtcore.listener import OHC_SHARE, Audiogram, losses_db
from amtcore.scales import ERB_FLOOR_HZ, ERB_Q
from amtcore.stages.constants import Range, bandwidths, frequencies
from amtcore.stages.stage import (
    FilterbankStage,
    check_below_nyquist,
    check_channels,
    lowpass_memory_s,
)


class GammatoneFilterbank(FilterbankStage):
    """Complex all-pole gammatone filters, real output.

    Args:
        fc: Centre frequencies in Hz, above 0 and below fs/2.
        fs: Sampling rate in Hz.
        n: Filter order, 1 or more.
        betamul: Bandwidth relative to the ERB of each centre frequency; None takes the value that
            makes the filter's own ERB that of the ear.
        erb_scale: Further factor on every bandwidth.
        learnable: Make `fc` and `bandwidth` parameters.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (batch, time) -> (batch, channel, time); (time,) -> (channel, time).

    Invariants:
        A tone at fc passes with gain 1 (in the steady state, within 1 % for fc above 2 bandwidths).

    >>> bank = GammatoneFilterbank([500.0, 1000.0], fs=16000)
    >>> bank(torch.zeros(3, 1600)).shape
    torch.Size([3, 2, 1600])
    """

    shown = "num_channels fc n fs learnable"

    @checked_arguments(n=whole(1, 32))
    def __init__(
        self,
        fc: Tensor | Sequence[float],
        fs: float,
        n: int = 4,
        betamul: float | None = None,
        erb_scale: float = 1.0,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        fc_hz = torch.as_tensor(fc, dtype=torch.float64)
        check_below_nyquist("the highest centre frequency", float(fc_hz.max()), self.fs)
        self.n, self.num_channels = n, len(fc_hz)
        if betamul is None:  # bandwidth over ERB (Patterson et al. 1987): 1.0186 for n = 4
            m = 2 * n - 2
            betamul = math.factorial(n - 1) ** 2 / (math.pi * math.factorial(m) * 2.0**-m)
        self.betamul = float(betamul)
        self.erb_scale = float(erb_scale)
        erb = ERB_FLOOR_HZ + fc_hz / ERB_Q
        self.constant("fc", fc_hz, frequencies(self.fs))
        width_hz = self.betamul * self.erb_scale * erb
        self.constant("bandwidth", width_hz, bandwidths(self.fs))

    @property
    def memory_s(self) -> float:
        return 1.0 / (2.0 * math.pi * float(self.bandwidth.detach().min()))

    def coefficients(self) -> Tensor:
        """(channel, 3): pole p = exp(-2 pi (b + i fc) / fs), real and imaginary, and the gain.

        The gain 2 (1 - |p|)^n makes twice the real part 1 at the centre frequency.
        """
        step = 2.0 * math.pi / self.fs
        decay, angle = torch.exp(-step * self.bandwidth.double()), step * self.fc.double()
        rows = (decay * torch.cos(angle), -decay * torch.sin(angle), 2.0 * (1.0 - decay) ** self.n)
        return torch.stack(rows, -1).to(self.dtype)

    def block_ops(self, channels: int) -> list[ChainStep]:
        check_channels(self.num_channels, channels)
        coef = self.coefficients()
        return [ChainStep(ONE_POLE_CASCADE, self.n, coef, coef.new_zeros(channels, 2 * self.n))]


#: Order of every gammatone, and number of second-order low-passes after the nonlinear path.
MODELS = {"paulick2024": (2, 1), "jepsen2008": (3, 3)}
SUBJECTS = ("NH", "HIx")
_LINEAR_LOW_PASSES = 4
_CORNER_HZ = 1000.0  # above it a and b have their values at _SHARED_HZ
_SHARED_HZ = 1500.0


def drnl_parameters(fc_hz: Tensor, subject: str) -> dict[str, Tensor]:
    """Return the constants of each channel, float64; frequencies and bandwidths in Hz."""

    def power(intercept: float, slope: float, logarithm: Tensor) -> Tensor:
        return 10.0 ** (intercept + slope * logarithm)

    log_fc = torch.log10(fc_hz)
    shared = torch.where(fc_hz <= _CORNER_HZ, log_fc, math.log10(_SHARED_HZ))
    impaired = subject == "HIx"
    a = power(1.40298, 0.81916, shared)
    return {
        "lin_gain": power(4.20405, -0.47909, log_fc),
        "lin_fc": power(-0.06762, 1.01679, log_fc),
        "lin_bw": power(0.03728, 0.75, log_fc),
        "lin_cutoff": power(-0.06762, 1.01, log_fc),
        "nlin_fc": power(-0.05252, 1.0165, log_fc),
        "nlin_bw": power(-0.03193, 0.77, log_fc),
        "a": torch.zeros_like(a) if impaired else a,
        "b": power(1.61912, -0.81867, log_fc if impaired else shared),
        "c": torch.full_like(a, 0.25 if impaired else 10.0**-0.60206),
    }


class DRNLFilterbank(FilterbankStage):
    """Dual-resonance nonlinear filters.

    Args:
        fc: Centre frequencies in Hz, above 0; every filter of a channel must lie below fs/2.
        fs: Sampling rate in Hz.
        model: "paulick2024" (gammatones of order 2, one low-pass) or "jepsen2008" (3 and 3).
        subject: "NH" (normal hearing) or "HIx" (no gain in the nonlinear path).
        learnable: Make the nine constants of every channel parameters: `lin_gain`, `lin_fc`,
            `lin_bw`, `lin_cutoff`, `nlin_fc`, `nlin_bw`, `a`, `b`, `c`.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.
        audiogram: Hearing loss in dB HL by frequency in Hz; None is normal hearing. The gain for
            quiet sound at fc falls by the loss at fc. The share of outer hair cells lowers `a`. The
            share of inner hair cells, and the part of the loss that an `a` of 0 leaves, attenuates
            the output: it lowers `lin_gain`, `a` and `b` by one factor.
        ohc_share: Share of outer hair cells in the loss in dB, 0 to 1.

    Shape:
        (batch, time) in m/s -> (batch, channel, time) in m/s; (time,) -> (channel, time).

    Invariants:
        Up to the knee (b / a)^(1 / (1 - c)) both paths are linear; above it the nonlinear one grows
        by c dB per dB (0.25), until the linear one is the louder of the two.

    >>> bank = DRNLFilterbank([500.0, 1000.0], fs=16000)
    >>> bank(torch.zeros(3, 160)).shape
    torch.Size([3, 2, 160])
    """

    shown = "model subject num_channels fc fs learnable"

    @checked_arguments(model=Text(MODELS), subject=Text(SUBJECTS))
    def __init__(
        self,
        fc: Tensor | Sequence[float],
        fs: float,
        model: str = "paulick2024",
        subject: str = "NH",
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
        audiogram: Audiogram | None = None,
        ohc_share: float = OHC_SHARE,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        fc_hz = torch.as_tensor(fc, dtype=torch.float64)
        constants = drnl_parameters(fc_hz, subject)
        check_below_nyquist("the highest centre frequency", float(fc_hz.max()), self.fs)
        highest = max(float(constants[f"{path}_fc"].max()) for path in ("lin", "nlin"))
        check_below_nyquist("the highest filter's frequency", highest, self.fs)
        self.model, self.subject, self.num_channels = model, subject, len(fc_hz)
        self.order, self.low_passes = MODELS[model]
        if audiogram is not None:
            if subject != "NH":
                raise ParameterError(
                    f"expected subject NH with an audiogram, got {subject}, whose gain is lost "
                    "already; leave one of them out"
                )
            loss_db = torch.from_numpy(losses_db(audiogram, fc_hz.numpy()))
            constants |= self._impaired(fc_hz, constants, loss_db, ohc_share)
        self.register_buffer("fc", fc_hz.to(dtype))
        hz, width_hz = frequencies(self.fs), bandwidths(self.fs)
        least = min(1e-3, float(constants["lin_gain"].min()))  # 1e-3 with normal hearing
        limits = {"lin_gain": Range(least, 1e7), "lin_bw": width_hz, "nlin_bw": width_hz,
                  "a": Range(0.0, 1e7), "b": Range(1e-9, 1e3), "c": Range(1e-3, 0.999)}  # fmt: skip
        for name, value in constants.items():
            self.constant(name, value, limits.get(name, hz))  # an `a` of 0 stays 0

    @property
    def memory_s(self) -> float:
        widths_hz = torch.cat((self.lin_bw, self.nlin_bw)).detach()
        cutoffs_hz = torch.cat((self.lin_cutoff, self.nlin_fc)).detach()
        return max(
            lowpass_memory_s(float(widths_hz.min())), lowpass_memory_s(float(cutoffs_hz.min()), 2)
        )

    def _gammatone(self, fc_hz: Tensor, bw_hz: Tensor, gain: Tensor) -> Tensor:
        """Return (channel, 3), the rows of a pole-zero gammatone whose gain at fc is `gain`.

        One section is a0 (1 - Re q / z) / |1 - q / z|^2 with the pole q = exp(-phi - i theta). The
        factor a0 makes the gain 1 at theta. Each section has a root of the gain.
        """
        theta, phi = 2 * math.pi * fc_hz.double() / self.fs, 2 * math.pi * bw_hz.double() / self.fs
        decay = torch.exp(-phi)
        turn = torch.polar(torch.ones_like(theta), -theta)
        zero = -decay * torch.cos(theta)
        a0 = (1 + 2 * zero * turn + (decay * turn) ** 2).abs() / (1 + zero * turn).abs()
        rows = (-zero, -decay * torch.sin(theta), a0 * gain.double() ** (1.0 / self.order))
        return torch.stack(rows, -1)

    def _impaired(
        self, fc_hz: Tensor, constants: dict[str, Tensor], loss_db: Tensor, ohc_share: float
    ) -> dict[str, Tensor]:
        """Return the constants that a hearing loss changes.

        At fc the linear path passes L and the nonlinear path N, for quiet sound. Outer hair cells
        multiply N by a factor s:

            |L + s N| = |L + N| 10^(-ohc_db / 20).

        This quadratic in s has a larger root that falls from 1 to 0. If no root is above 0, s is 0.
        """
        turn = torch.polar(torch.ones_like(fc_hz), -2 * math.pi * fc_hz / self.fs)

        def response(path: str, gain: Tensor, times: int, cutoff: str, low_passes: int) -> Tensor:
            rows = self._gammatone(constants[f"{path}_fc"], constants[f"{path}_bw"], gain)
            pole = torch.complex(rows[:, 0], rows[:, 1])
            poles = (1 - pole * turn) * (1 - pole.conj() * turn)
            section = rows[:, 2] * (1 - rows[:, 0] * turn) / poles
            g, s = torch.tan(math.pi * constants[cutoff] / self.fs), (1 - turn) / (1 + turn)
            low_pass = g**2 / (s**2 + math.sqrt(2.0) * g * s + g**2)
            return section ** (times * self.order) * low_pass**low_passes

        linear = response("lin", constants["lin_gain"], 1, "lin_cutoff", _LINEAR_LOW_PASSES)
        one = torch.ones_like(fc_hz)
        nonlinear = constants["a"] * response("nlin", one, 2, "nlin_fc", self.low_passes)
        normal, ohc_db = (linear + nonlinear).abs(), loss_db * ohc_share
        # Power gain that outer hair cells leave, above the power gain of the linear path alone.
        above = (normal * 10.0 ** (-ohc_db / 20.0)) ** 2 - linear.abs() ** 2
        half = (linear.conj() * nonlinear).real
        root = torch.sqrt((half**2 + nonlinear.abs() ** 2 * above).clamp(min=0.0))
        factor = torch.where(above > 0.0, (root - half) / nonlinear.abs() ** 2, 0.0)
        factor = torch.where(ohc_db == 0.0, 1.0, factor)  # the bits of normal hearing
        lost_db = 20.0 * torch.log10(normal / (linear + factor * nonlinear).abs())
        output = 10.0 ** (-(loss_db - lost_db) / 20.0)
        changed = {name: constants[name] * output for name in ("lin_gain", "b")}
        return {**changed, "a": constants["a"] * factor * output}

    def block_ops(self, channels: int) -> list[ChainStep]:
        check_channels(self.num_channels, channels)
        one = torch.ones_like(self.lin_gain)
        linear = self._gammatone(self.lin_fc, self.lin_bw, self.lin_gain)
        nonlinear = self._gammatone(self.nlin_fc, self.nlin_bw, one)
        low = design.lowpass2_rows(self.lin_cutoff, self.fs)
        nlin_low = design.lowpass2_rows(self.nlin_fc, self.fs)
        a, b, c = self.a.double(), self.b.double(), self.c.double()
        with torch.no_grad():
            knee = torch.exp(torch.log(b / a) / (1.0 - c))  # infinite for a = 0
        stick = torch.stack((a, b, c, knee), -1)
        none = self.fc.new_zeros(channels, 0)
        return [
            self._op(SAVE, none),
            self._op(POLE_ZERO_CASCADE, linear, self.order),
            *(self._op(STATE_VARIABLE, low) for _ in range(_LINEAR_LOW_PASSES)),
            self._op(SWAP, none),
            self._op(POLE_ZERO_CASCADE, nonlinear, self.order),
            self._op(BROKEN_STICK, stick),
            self._op(POLE_ZERO_CASCADE, nonlinear, self.order),
            *(self._op(STATE_VARIABLE, nlin_low) for _ in range(self.low_passes)),
            self._op(ADD, none),
        ]

    def _op(self, operation: ChainOperation, coef: Tensor, argument: int = 0) -> ChainStep:
        rest = self.fc.new_zeros(self.num_channels, operation.states(argument))
        return ChainStep(operation, argument, coef.to(self.dtype), rest)
