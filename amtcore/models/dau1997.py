"""Dau, Kollmeier and Kohlrausch (1997): from a waveform to modulation channels.

Gammatone filters, half-wave rectification with a 1 kHz low-pass, adaptation loops, modulation
filters. Input in units of RMS 1 = 100 dB SPL (so x = p / 2 Pa); output in model units.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from amtcore.arguments import checked_arguments
from amtcore.models.composition import stage_arguments
from amtcore.models.time_domain import ChainStage, Kwargs, TimeDomainModel, check_range
from amtcore.scales import erb_space_bw
from amtcore.stages import AdaptLoop, GammatoneFilterbank, IHCEnvelope, ModulationFilterbank


class Dau1997(TimeDomainModel):
    """Auditory model of modulation detection and masking.

    Args:
        fs: Sampling rate in Hz; every centre frequency must lie below fs/2.
        flow: Lowest centre frequency limit in Hz.
        fhigh: Highest centre frequency limit in Hz.
        basef: A frequency in Hz that must be a centre frequency; None centres the filters in the
            range (31 channels by default; 1000 gives 30).
        learnable: Make the constants of all stages parameters.
        return_stages: Also return the output of every stage.
        dtype: torch.float32 or torch.float64.
        filterbank_kwargs: Passed to `GammatoneFilterbank`.
        ihc_kwargs: Passed to `IHCEnvelope`.
        adaptation_kwargs: Passed to `AdaptLoop`.
        modulation_kwargs: Passed to `ModulationFilterbank`.

    Shape:
        (batch, time) -> list over channels of (batch, M_i, time); (time,) -> list of (M_i, time).
        With `return_stages`, a pair of that and a dict of filterbank, ihc and adaptation, each
        (batch, channel, time).

    Invariants:
        `model(x)` equals the chunks of `model.stream` over any split of x, one after another.

    >>> model = Dau1997(fs=16000)
    >>> model.num_channels
    31
    >>> [tuple(y.shape) for y in model(torch.zeros(2, 160))][0]
    (2, 8, 160)
    """

    chain_stages = (
        ChainStage("filterbank", returned="filterbank"),
        ChainStage("ihc", returned="ihc", stream="envelope"),
        ChainStage("adaptation", returned="adaptation", stream="adaptation"),
        ChainStage("modulation", stream="modulation"),
    )
    input_unit = "rms1=100dB"

    @checked_arguments()
    def __init__(
        self,
        fs: float,
        flow: float = 80.0,
        fhigh: float = 8000.0,
        learnable: bool = False,
        return_stages: bool = False,
        dtype: torch.dtype = torch.float32,
        filterbank_kwargs: Kwargs = None,
        ihc_kwargs: Kwargs = None,
        adaptation_kwargs: Kwargs = None,
        modulation_kwargs: Kwargs = None,
        basef: float | None = None,
    ) -> None:
        super().__init__(fs, learnable, return_stages)
        self.flow, self.fhigh, self.basef = flow, fhigh, basef
        check_range(fs, flow, fhigh)
        common: dict[str, Any] = {"fs": fs, "learnable": learnable, "dtype": dtype}
        fc_hz = erb_space_bw(flow, fhigh, 1.0, basef).tolist()
        own = partial(stage_arguments, models=common)
        self.filterbank = GammatoneFilterbank(fc_hz, **own("filterbank_kwargs", filterbank_kwargs))
        hair_cell, preset = {"method": "dau1996"}, {"preset": "dau1997"}
        self.ihc = IHCEnvelope(**own("ihc_kwargs", ihc_kwargs, defaults=hair_cell))
        self.adaptation = AdaptLoop(**own("adaptation_kwargs", adaptation_kwargs, defaults=preset))
        self.modulation = ModulationFilterbank(
            fc=fc_hz, **own("modulation_kwargs", modulation_kwargs, defaults=preset)
        )

    def extra_repr(self) -> str:
        channels = ""
        if isinstance(self.filterbank, GammatoneFilterbank):
            channels = f"num_channels={self.num_channels}, "
        return (
            f"fs={self.fs:g}, flow={self.flow:g}, fhigh={self.fhigh:g}, {channels}"
            f"learnable={self.learnable}, dtype={self.dtype}"
        )
