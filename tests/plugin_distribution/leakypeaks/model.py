"""A model of leaky peaks in the bands of a gammatone filterbank, and its feature stream."""

from __future__ import annotations

import torch

from amtcore.features.filterbank_model import FilterbankModel
from amtcore.features.stream_info import StreamKind
from amtcore.kernels.chain import ChainStep
from amtcore.models.time_domain import ChainStage, TimeDomainModel
from amtcore.scales import erb_space_bw
from amtcore.stages import GammatoneFilterbank
from amtcore.stages.constants import SECONDS
from amtcore.stages.stage import ChannelStage
from leakypeaks.leaky_peak import LEAKY_PEAK


class PeakFollower(ChannelStage):
    """Peaks of every channel that decay with a time constant `tau` in seconds."""

    def __init__(
        self, fs: float, tau: float = 0.01, learnable: bool = False,
        dtype: torch.dtype = torch.float32, backend: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(fs, learnable, dtype, backend)
        self.constant("tau", float(tau), SECONDS)

    @property
    def memory_s(self) -> float:
        """After this time a peak has decayed to 1e-3."""
        return 7.0 * float(self.tau.detach())

    def recurrences(self, channels: int) -> list[ChainStep]:
        """The peak detector of every channel."""
        decay = torch.exp(-1.0 / (self.fs * self.tau.double())).to(self.dtype)
        coef = decay.expand(channels, 1)
        return [ChainStep(LEAKY_PEAK, 0, coef, coef.new_zeros(channels, 1))]


class LeakyPeaks(TimeDomainModel):
    """Gammatone filters, then leaky peaks.

    Args:
        fs: Sampling rate in Hz.
        flow: Lowest centre frequency in Hz.
        fhigh: Highest centre frequency in Hz.
        tau: Time constant of the peaks in seconds.
        learnable: Make the constants of all stages parameters.
        return_stages: Also return the output of every stage.
        dtype: torch.float32 or torch.float64.
    """

    chain_stages = (
        ChainStage("filterbank"),
        ChainStage("peaks", returned="peaks", stream="envelope"),
    )
    input_unit = "rms1=100dB"

    def __init__(
        self, fs: float, flow: float = 200.0, fhigh: float = 2000.0, tau: float = 0.01,
        learnable: bool = False, return_stages: bool = False, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        super().__init__(fs, learnable, return_stages)
        fc_hz = erb_space_bw(flow, min(fhigh, 0.45 * fs), 1.0, None).tolist()
        self.filterbank = GammatoneFilterbank(fc_hz, fs, learnable=learnable, dtype=dtype)
        self.peaks = PeakFollower(fs, tau, learnable, dtype)


LEAKY_PEAKS = FilterbankModel(
    "leaky_peaks",
    LeakyPeaks,
    "Leaky peaks in gammatone bands",
    16000.0,
    {"envelope": StreamKind("input unit", ("time", "channel"), "peaks of every band")},
)
