"""From excitation to loudness: specific loudness, binaural inhibition, loudness over time.

Specific loudness is the compressive law of the cochlea, channel by channel:

    above the threshold T:  N' = C ((G E + A)^alpha - A^alpha)
    at or below it:  the same times (2 E / (E + T))^1.5.

(Moore, Glasberg and Baer 1997.) G is the low-level gain of the cochlear amplifier relative to that
at 500 Hz and above; alpha and A follow from it by tables. The law above an excitation of 100 dB
differs between the models.

Binaural inhibition: sound in one ear reduces the loudness at the other ear.

    L, R = specific loudness smoothed over channels with exp(-(sigma g)^2), plus 1e-13;
    left ear divided by 2 / (1 + sech(R / L)^p), right ear by 2 / (1 + sech(L / R)^p)

(Moore, Glasberg and Schlittenlacher 2016.) A sound in one ear stays as it is; the same sound in
both is 1.5 times as loud as in one.

Loudness over time is attack and release, first short-term, then long-term (Glasberg and Moore 2002;
Moore et al. 2018 for Moore2016's rates): fast when loudness rises, slow when it falls. Rates are
per frame of 1 ms; with another hop they change so that the time constants stay:
1 - (1 - rate)^(hop / 1 ms).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.errors import ShapeError
from amtcore.kernels.operations.attack_release import ATTACK_RELEASE
from amtcore.kernels.operations.binaural_inhibition import INHIBITION, TINY, divisor
from amtcore.kernels.operations.specific_loudness import SPECIFIC_LOUDNESS, law_rows
from amtcore.kernels.operators import operator
from amtcore.kernels.torch_state import can_compute
from amtcore.stages.constants import SECONDS, Range
from amtcore.stages.excitation import STEP_CAM
from amtcore.stages.spectrum import default_hop
from amtcore.stages.stage import Stage, product
from amtcore.tables import load_table

_specific_loudness = operator(SPECIFIC_LOUDNESS)


class CompressiveLaw(Stage):
    """The law with its constants; the two models differ in tables and at very high levels."""

    #: Prefix of the tables, divisor and exponent of the law at very high levels.
    tables_of = ""
    high_divisor = 1.0
    high_exponent = 1.0
    shown = "num_channels C learnable"

    def __init__(
        self, fc_hz: ArrayLike, fs: float, C: float, learnable: bool, dtype: torch.dtype
    ) -> None:
        from scipy.interpolate import PchipInterpolator  # half a second, which few processes need

        super().__init__(fs, learnable, dtype)
        threshold, alpha, a = (
            load_table(f"{self.tables_of}_{name}")
            for name in ("excitation_threshold", "alpha_of_gain", "A_of_gain")
        )
        at_hz = np.append(np.asarray(fc_hz), 500.0)  # below 500 Hz the threshold rises
        *threshold_db, self.flat_db = np.interp(
            at_hz, threshold["frequency_hz"], threshold["threshold_db"]
        ).tolist()
        gain_db = self.flat_db - np.array(threshold_db)
        alpha_of_gain = np.interp(gain_db, alpha["gain_db"], alpha["alpha"])
        inside = np.clip(gain_db, a["gain_db"][0], a["gain_db"][-1])
        a_of_gain = np.asarray(PchipInterpolator(a["gain_db"], a["A"])(inside))
        self.constant("C", C, Range(1e-9, 1e6))
        self.constant("threshold_db", threshold_db, Range(-50.0, 150.0, 10.0))
        self.constant("alpha", torch.from_numpy(alpha_of_gain), Range(1e-3, 1.0))
        self.constant("A", torch.from_numpy(a_of_gain), Range(1e-2, 1e4))

    @property
    def num_channels(self) -> int:
        """Number of channels."""
        return len(self.A)

    def forward(self, excitation_db: Tensor) -> Tensor:
        """The whole signal at once."""
        level = self.as_input(excitation_db, (1, 2, 3, 4), "(.., frame, channel)")
        return _specific_loudness(level, self.derived("law"), self.high_divisor, self.high_exponent)

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        def law() -> Tensor:
            c, threshold_db, alpha, a = (
                constant.double() for constant in (self.C, self.threshold_db, self.alpha, self.A)
            )
            return law_rows(c, threshold_db, alpha, a, self.flat_db).to(self.dtype)

        return {"law": law}


class Moore2016SpecificLoudness(CompressiveLaw):
    """Specific loudness of Moore2016.

    Args:
        fc_hz: Centre frequencies of the channels in Hz.
        fs: Sampling rate in Hz.
        C: Scale in sone per Cam.
        learnable: Make `C`, `threshold_db`, `alpha` and `A` (one value a channel) parameters.
        dtype: torch.float32 or torch.float64.

    Shape:
        (.., frame, channel) in dB SPL -> the same shape in sone per Cam.

    Invariants:
        Grows with the excitation up to 100 dB, and is 0 at none.

    >>> stage = Moore2016SpecificLoudness([1000.0])
    >>> bool(stage(torch.tensor([[40.0]])) > stage(torch.tensor([[20.0]])))
    True
    """

    tables_of, high_divisor, high_exponent = "moore2016", 1.0707, 0.2

    @checked_arguments()
    def __init__(
        self,
        fc_hz: ArrayLike,
        fs: float = 32000,
        C: float = 0.0631,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(fc_hz, fs, C, learnable, dtype)


class SpecificLoudness(CompressiveLaw):
    """Specific loudness of Glasberg2002.

    The page's law in three regimes with E0 = 10 dB is not this model. Arguments, shapes and
    invariants as for `Moore2016SpecificLoudness`.

    >>> stage = SpecificLoudness([1000.0])
    >>> bool(stage(torch.tensor([[40.0]])) > stage(torch.tensor([[20.0]])))
    True
    """

    tables_of, high_divisor, high_exponent = "glasberg2002", 1.04e6, 0.5

    @checked_arguments()
    def __init__(
        self,
        fc_hz: ArrayLike,
        fs: float = 32000,
        C: float = 0.047,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(fc_hz, fs, C, learnable, dtype)


_inhibition = operator(INHIBITION)


class Moore2016BinauralLoudness(Stage):
    """Specific loudness of both ears to the loudness of each.

    Args:
        fs: Sampling rate in Hz.
        sigma: Narrowness of the smoothing per Cam.
        p: Exponent of the inhibition.
        erb_step: Channel spacing in Cam.
        learnable: Make `sigma` and `p` parameters.
        dtype: torch.float32 or torch.float64.

    Shape:
        Two times (.., frame, channel) in sone per Cam -> two times (.., frame) in sone.

    Invariants:
        Silence in one ear leaves the loudness of the other as it is; exchanging the ears exchanges
        the results.

    >>> stage = Moore2016BinauralLoudness()
    >>> one, silent = stage(torch.ones(1, 150), torch.zeros(1, 150))
    >>> both, _ = stage(torch.ones(1, 150), torch.ones(1, 150))
    >>> round(float(one / both), 2), float(silent)
    (1.33, 0.0)
    """

    shown = "sigma p learnable"

    @checked_arguments()
    def __init__(
        self,
        fs: float = 32000,
        sigma: float = 0.08,
        p: float = 1.5978,
        erb_step: float = STEP_CAM,
        learnable: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(fs, learnable, dtype)
        self.erb_step = erb_step
        self.constant("sigma", sigma, Range(1e-6, 1e3))
        self.constant("p", p, Range(1e-3, 1e2))

    def smoothing(self, channels: int) -> Tensor:
        """(channel, channel), symmetric: the smoothing with zeros beyond the channels."""
        reach = round(18.0 / self.erb_step)  # 18 Cam
        steps = torch.arange(-reach, reach + 1, dtype=torch.float64, device=self.sigma.device)
        kernel = torch.exp(-((self.sigma.double() * self.erb_step * steps) ** 2))
        kernel = torch.nn.functional.pad(kernel / kernel.sum(), (channels, channels))
        place = torch.arange(channels, device=self.sigma.device)
        return kernel[place[:, None] - place + reach + channels].to(self.dtype)

    def inhibited(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Specific loudness of the left and the right ear in the presence of the other."""
        left = self.as_input(left, (2, 3), "(.., frame, channel)")
        right = self.as_input(right, (2, 3), "(.., frame, channel)")
        if left.shape != right.shape:
            raise ShapeError(
                f"expected two ears of one shape, got {tuple(left.shape)} and {tuple(right.shape)}"
            )
        return self.inhibited_by(left, right, self.smoothing(left.shape[-1]))

    def inhibited_by(self, left: Tensor, right: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor]:
        """Like `inhibited`, with the smoothing at hand: for many parts of a signal."""
        if left.numel() and can_compute(left, right, kernel, self.p):
            return _inhibition(left, right, kernel, self.p)
        smooth_left, smooth_right = (product(ear, kernel) + TINY for ear in (left, right))
        return (
            left / divisor(smooth_left, smooth_right, self.p),
            right / divisor(smooth_right, smooth_left, self.p),
        )

    def diotic(self, one: Tensor) -> Tensor:
        """Return the specific loudness of either ear for equal signals, whose ratio is 1."""
        alike = one.new_ones(())
        return one / divisor(alike, alike, self.p)

    def total(self, specific: Tensor) -> Tensor:
        """(.., frame, channel) in sone per Cam -> (.., frame) in sone."""
        return self.erb_step * specific.sum(-1)

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Loudness of the left and the right ear in the presence of the other."""
        left, right = self.inhibited(left, right)
        return self.total(left), self.total(right)


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

    shown = "attack_alpha release_alpha hop_length learnable"

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
        self.hop_length = hop_length or default_hop(self.fs)
        self.constant("attack_alpha", attack_alpha, Range(1e-7, 1.0 - 1e-6))
        self.constant("release_alpha", release_alpha, Range(1e-7, 1.0 - 1e-6))

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
        """Process the next frames from a state (batch, channel) on; None is the start."""
        x = self.as_input(x, (2, 3), "(batch, frame) or (batch, frame, channel)", state)
        rows = x if x.ndim == 3 else x.unsqueeze(-1)
        if state is None:
            state = rows.new_zeros(rows.shape[0], rows.shape[-1])
        coef = self.coefficients(rows.shape[-1])
        y, state = _attack_release(rows, coef, state, backend=self.backend)
        return (y if x.ndim == 3 else y.squeeze(-1)), state

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

    shown = "tau_attack tau_release ltl_tau_attack ltl_tau_release learnable"

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
        self.hop_length, self.erb_step = hop_length or default_hop(self.fs), erb_step
        self.constant("tau_attack", tau_attack, SECONDS)
        self.constant("tau_release", tau_release, SECONDS)
        self.constant("ltl_tau_attack", ltl_tau_attack, SECONDS)
        self.constant("ltl_tau_release", ltl_tau_release, SECONDS)

    @property
    def memories_s(self) -> tuple[float, float]:
        """Slowest time constants in s of short-term and long-term loudness."""
        short = torch.maximum(self.tau_attack, self.tau_release)
        long = torch.maximum(self.ltl_tau_attack, self.ltl_tau_release)
        return float(short.detach()), float(long.detach())

    def instantaneous(self, specific: Tensor) -> Tensor:
        """(.., frame, channel) in sone per Cam -> (.., frame) in sone."""
        return 2.0 * self.erb_step * specific.sum(-1)

    def stream(
        self, specific: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Process the next frames from a state on; None is the start."""
        specific = self.as_input(specific, (3,), "(batch, frame, channel)", state)
        before_short, before_long = state or (None, None)
        short, after_short = self.short_term(self.instantaneous(specific), before_short)
        long, after_long = self.long_term(short, before_long)
        return (short, long), (after_short, after_long)

    def short_term(self, now: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Instantaneous to short-term loudness, (batch, frame), and the state after it."""
        return self._smoothed(now, self.tau_attack, self.tau_release, state)

    def long_term(self, short: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Short-term to long-term loudness, (batch, frame), and the state after it."""
        return self._smoothed(short, self.ltl_tau_attack, self.ltl_tau_release, state)

    def _smoothed(
        self, x: Tensor, attack_s: Tensor, release_s: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        hop_s = self.hop_length / self.fs
        rates = -torch.expm1(-hop_s / torch.stack((attack_s, release_s)).double())
        coef = rates.to(self.dtype).unsqueeze(0)
        before = x.new_zeros(x.shape[0], 1) if state is None else state
        y, after = _attack_release(x.unsqueeze(-1), coef, before, backend=self.backend)
        return y.squeeze(-1), after

    def forward(self, specific: Tensor) -> tuple[Tensor, Tensor]:
        """The whole signal at once."""
        return self.stream(specific)[0]
