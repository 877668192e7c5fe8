"""Osses Vecchi and Kohlrausch (2021): Dau et al. (1997) behind headphones and a middle ear.

Headphone and middle-ear filters, gammatone filters, half-wave rectification with five 2 kHz
low-passes, adaptation loops with a low overshoot limit, modulation filters up to fc/4 and 150 Hz.
Input in units of RMS 1 = 100 dB SPL; output in model units.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from amtcore.arguments import checked_arguments
from amtcore.models.composition import stage_arguments
from amtcore.models.time_domain import ChainStage, Kwargs, TimeDomainModel, check_range
from amtcore.scales import erb_space_bw
from amtcore.stages.adaptation import AdaptLoop
from amtcore.stages.basilar_membrane import GammatoneFilterbank
from amtcore.stages.ears import HeadphoneFilter, MiddleEarFilter
from amtcore.stages.hair_cells import IHCEnvelope
from amtcore.stages.modulation import ModulationFilterbank


class Osses2021(TimeDomainModel):
    """Auditory model of fluctuation strength and other tasks with headphone presentation.

    Args:
        fs: Sampling rate in Hz; every centre frequency must lie below fs/2.
        flow: Lowest centre frequency limit in Hz.
        fhigh: Highest centre frequency limit in Hz.
        phase_type: Phase of the two ear filters: "amt" (the reference program's delays; the
            default, because published results rest on it), "minimum" (causal) or "zero".
        learnable: Make the constants of all stages parameters.
        return_stages: Also return the output of every stage.
        dtype: torch.float32 or torch.float64.
        headphone_kwargs: Passed to `HeadphoneFilter`.
        middleear_kwargs: Passed to `MiddleEarFilter`; lopezpoveda2001 with its gain set to 0 dB
            by default.
        filterbank_kwargs: Passed to `GammatoneFilterbank`.
        ihc_kwargs: Passed to `IHCEnvelope`.
        adaptation_kwargs: Passed to `AdaptLoop`; other loops are set by `tau`.
        modulation_kwargs: Passed to `ModulationFilterbank`.

    Shape:
        (batch, time) -> list over channels of (batch, M_i, time); (time,) -> list of (M_i, time).
        With `return_stages`, a pair of that and a dict of headphone and middleear, (batch, time),
        and filterbank, ihc and adaptation, (batch, channel, time).

    Invariants:
        `model(x)` equals the chunks of `model.stream` over any split of x, one after another; with
        "amt" and "zero" they come out later by the delay that is taken out.

    >>> model = Osses2021(fs=16000, fhigh=7000.0)
    >>> [tuple(y.shape) for y in model(torch.zeros(2, 160))][0]
    (2, 4, 160)
    """

    chain_stages = (
        ChainStage("headphone", returned="headphone"),
        ChainStage("middleear", returned="middleear"),
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
        phase_type: str = "amt",
        learnable: bool = False,
        return_stages: bool = False,
        dtype: torch.dtype = torch.float32,
        headphone_kwargs: Kwargs = None,
        middleear_kwargs: Kwargs = None,
        filterbank_kwargs: Kwargs = None,
        ihc_kwargs: Kwargs = None,
        adaptation_kwargs: Kwargs = None,
        modulation_kwargs: Kwargs = None,
    ) -> None:
        super().__init__(fs, learnable, return_stages)
        self.flow, self.fhigh, self.phase_type = flow, fhigh, phase_type
        check_range(fs, flow, fhigh)
        common: dict[str, Any] = {"fs": fs, "learnable": learnable, "dtype": dtype}
        own, ear = partial(stage_arguments, models=common), {"phase_type": phase_type}
        self.headphone = HeadphoneFilter(**own("headphone_kwargs", headphone_kwargs, defaults=ear))
        self.middleear = MiddleEarFilter(**own("middleear_kwargs", middleear_kwargs, defaults=ear))
        fc_hz = erb_space_bw(flow, fhigh).tolist()
        self.filterbank = GammatoneFilterbank(fc_hz, **own("filterbank_kwargs", filterbank_kwargs))
        hair_cell, loops, bank = (
            {"method": "breebaart2001"}, {"preset": "osses2021"}, {"preset": "jepsen2008"}
        )  # fmt: skip
        self.ihc = IHCEnvelope(**own("ihc_kwargs", ihc_kwargs, defaults=hair_cell))
        self.adaptation = AdaptLoop(**own("adaptation_kwargs", adaptation_kwargs, defaults=loops))
        self.modulation = ModulationFilterbank(
            fc=fc_hz, **own("modulation_kwargs", modulation_kwargs, defaults=bank)
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, phase_type={self.phase_type}"
