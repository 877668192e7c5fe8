"""Loudness over time: attack and release, first short-term, then long-term.

One gain control (Glasberg and Moore 2002; Moore et al. 2018 for Moore2016's rates):
fast when loudness rises, slow when it falls. Rates are per frame of 1 ms; with another hop
they change so that the time constants stay: 1 - (1 - rate)^(hop / 1 ms).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.kernels.operations.attack_release import ATTACK_RELEASE, smooth_rows
from amtcore.kernels.operators import operator
from amtcore.stages.constants import SECONDS, Range
from amtcore.stages.excitation import STEP_CAM
from amtcore.stages.spectrum import default_hop
from amtcore.stages.stage import Stage

_RATES = Range(1e-7, 1.0 - 1e-6)
#: The frame distance that published rates belong to.
FRAME_S = 1e-3
#: Published rates per ms: short-term and long-term, attack and release.
MOORE2016_STL = (0.045, 0.033)
MOORE2016_LTL = (0.01, 0.00133)
GLASBERG2002_STL = (0.045, 0.02)
GLASBERG2002_LTL = (0.01, 0.0005)

_attack_release = operator(ATTACK_RELEASE)


def tau_of_rate(rate: float) -> float:
    """Time constant in s of a rate per ms: tau = -1 ms / ln(1 - rate)."""
    return -FRAME_S / math.log1p(-rate)


class Moore2016AGC(Stage):
    """Attack and release of any number of channels.

    Args:
        fs: Sampling rate in Hz.
        attack_alpha: Rate per ms while the input is above the output, 0..1 exclusive.
        release_alpha: The same while it is below.
        hop_length: Samples between frames; None is 1 ms.
        learnable: Make the two rates parameters.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (batch, frame) or (batch, frame, channel), same shape out.

    Invariants:
        Starts from 0; a steady input is approached from below and stays once reached.

    >>> Moore2016AGC()(torch.ones(1, 3))
    tensor([[0.0100, 0.0199, 0.0297]])
    """

    state_form = Tensor

    attack_alpha: Tensor
    release_alpha: Tensor
    shown = (
        "attack_alpha={0.attack_alpha:g}, release_alpha={0.release_alpha:g}, "
        "hop_length={0.hop_length}, learnable={0.learnable}"
    )

    @checked_arguments()
    def __init__(
        self,
        fs: float = 32000,
        attack_alpha: float = MOORE2016_LTL[0],
        release_alpha: float = MOORE2016_LTL[1],
        hop_length: int | None = None,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        self.hop_length = default_hop(self.fs) if hop_length is None else hop_length
        self.constant("attack_alpha", attack_alpha, _RATES)
        self.constant("release_alpha", release_alpha, _RATES)

    @property
    def memory_s(self) -> float:
        slowest = torch.minimum(self.attack_alpha, self.release_alpha)
        return tau_of_rate(float(slowest.detach()))

    def coefficients(self, channels: int) -> Tensor:
        """(channel, 2): attack and release per frame."""
        rates = torch.stack((self.attack_alpha, self.release_alpha)).double()
        frames_ms = self.hop_length / self.fs / FRAME_S
        per_frame = -torch.expm1(frames_ms * torch.log1p(-rates))
        return per_frame.to(self.dtype).expand(channels, 2)

    def stream(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Process the next frames.

        Args:
            x: (batch, frame) or (batch, frame, channel).
            state: State after the previous chunk, (batch, channel); None at the start.
        """
        x = self.as_input(x, (2, 3), "(batch, frame) or (batch, frame, channel)")
        rows = x if x.ndim == 3 else x.unsqueeze(-1)
        if state is None:
            state = rows.new_zeros(rows.shape[0], rows.shape[-1])
        coef = self.coefficients(rows.shape[-1])
        y, state = _attack_release(rows, coef, state, backend=self.backend)
        return (y if x.ndim == 3 else y.squeeze(-1)), state

    def stream_rows(
        self, rows: Tensor, state: Tensor | None, channels: int
    ) -> tuple[Tensor, Tensor]:
        """Process float32 rows in place, without gradients; `channels` counts without padding.

        Rows (batch, frame, channel) are padded with zeros to whole vectors of channels.
        """
        if state is None:
            state = rows.new_zeros(rows.shape[0], channels)
        return rows, smooth_rows(rows, self.coefficients(channels), state)

    def forward(self, x: Tensor) -> Tensor:
        """The whole signal at once."""
        return self.stream(x)[0]


class Moore2016TemporalIntegration(Moore2016AGC):
    """Short-term specific loudness of Moore2016: the gain control of every channel.

    Args and shape as `Moore2016AGC`, with the short-term rates as defaults.

    >>> Moore2016TemporalIntegration()(torch.ones(1, 2, 1)).flatten()
    tensor([0.0450, 0.0880])
    """

    @checked_arguments()
    def __init__(
        self,
        fs: float = 32000,
        attack_alpha: float = MOORE2016_STL[0],
        release_alpha: float = MOORE2016_STL[1],
        hop_length: int | None = None,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, attack_alpha, release_alpha, hop_length, learnable, dtype, backend)


class LoudnessIntegration(Stage):
    """Specific loudness of Glasberg2002 to instantaneous, short-term and long-term loudness.

    The page has one filter with 50 and 200 ms; the model has two, with the time constants of its
    published rates. The first filter has `tau_attack` and `tau_release`.

    Args:
        fs: Sampling rate in Hz.
        tau_attack: Short-term attack in s; the default 21.7 ms is 0.045 per ms.
        tau_release: Short-term release in s; 49.5 ms is 0.02 per ms.
        ltl_tau_attack: Long-term attack in s; 99.5 ms is 0.01 per ms.
        ltl_tau_release: Long-term release in s; 2 s is 0.0005 per ms.
        erb_step: Channel spacing in Cam.
        hop_length: Samples between frames; None is 1 ms.
        learnable: Make the four time constants parameters.
        dtype: torch.float32 or torch.float64.
        backend: Kernel choice; None picks.

    Shape:
        (batch, frame, channel) in sone per Cam -> short-term and long-term loudness in sone, both
        (batch, frame).

    Invariants:
        Instantaneous loudness is twice the sum over channels: one input, presented to both ears.

    >>> short, long = LoudnessIntegration()(torch.ones(1, 3, 150))
    >>> bool((short > long).all())
    True
    """

    state_form = (Tensor, Tensor)

    tau_attack: Tensor
    tau_release: Tensor
    ltl_tau_attack: Tensor
    ltl_tau_release: Tensor
    shown = (
        "tau_attack={0.tau_attack:.4g} s, tau_release={0.tau_release:.4g} s, "
        "ltl_tau_attack={0.ltl_tau_attack:.4g} s, ltl_tau_release={0.ltl_tau_release:.4g} s, "
        "learnable={0.learnable}"
    )

    @checked_arguments()
    def __init__(
        self,
        fs: float = 32000,
        tau_attack: float = tau_of_rate(GLASBERG2002_STL[0]),
        tau_release: float = tau_of_rate(GLASBERG2002_STL[1]),
        ltl_tau_attack: float = tau_of_rate(GLASBERG2002_LTL[0]),
        ltl_tau_release: float = tau_of_rate(GLASBERG2002_LTL[1]),
        erb_step: float = STEP_CAM,
        hop_length: int | None = None,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
        backend: str | None = None,
    ) -> None:
        super().__init__(fs, learnable, dtype, backend)
        self.hop_length = default_hop(self.fs) if hop_length is None else hop_length
        self.erb_step = erb_step
        taus = {
            "tau_attack": tau_attack,
            "tau_release": tau_release,
            "ltl_tau_attack": ltl_tau_attack,
            "ltl_tau_release": ltl_tau_release,
        }
        for name, tau in taus.items():
            self.constant(name, tau, SECONDS)

    @property
    def memories_s(self) -> tuple[float, float]:
        """Slowest time constants in s of short-term and long-term loudness."""
        short = torch.maximum(self.tau_attack, self.tau_release)
        long = torch.maximum(self.ltl_tau_attack, self.ltl_tau_release)
        return float(short.detach()), float(long.detach())

    def instantaneous(self, specific: Tensor) -> Tensor:
        """(.., frame, channel) in sone per Cam -> (.., frame) in sone."""
        return 2.0 * self.erb_step * specific.sum(-1)

    def _rates(self, attack_s: Tensor, release_s: Tensor) -> Tensor:
        hop_s = self.hop_length / self.fs
        rates = -torch.expm1(-hop_s / torch.stack((attack_s, release_s)).double())
        return rates.to(self.dtype).unsqueeze(0)

    def stream(
        self, specific: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Process the next frames.

        Args:
            specific: (batch, frame, channel).
            state: State after the previous chunk; None at the start.
        """
        specific = self.as_input(specific, (3,), "(batch, frame, channel)")
        before = (None, None) if state is None else state
        short, short_state = self.short_term(self.instantaneous(specific), before[0])
        long, long_state = self.long_term(short, before[1])
        return (short, long), (short_state, long_state)

    def short_term(self, now: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Instantaneous to short-term loudness, (batch, frame), and the state after it."""
        return self._smoothed(now, self._rates(self.tau_attack, self.tau_release), state)

    def long_term(self, short: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Short-term to long-term loudness, (batch, frame), and the state after it."""
        return self._smoothed(short, self._rates(self.ltl_tau_attack, self.ltl_tau_release), state)

    def _smoothed(self, x: Tensor, rates: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        before = x.new_zeros(x.shape[0], 1) if state is None else state
        y, after = _attack_release(x.unsqueeze(-1), rates, before, backend=self.backend)
        return y.squeeze(-1), after

    def forward(self, specific: Tensor) -> tuple[Tensor, Tensor]:
        """The whole signal at once."""
        return self.stream(specific)[0]
