"""Paulick, Relano-Iborra and Dau (2024): the revised CASP model, and its 2008 form.

Headphone and middle ear (to stapes velocity), dual-resonance filters, a hair cell as a circuit,
adaptation loops with a threshold per channel. Then at a quarter of the sampling rate: modulation
filters up to fc/4 and 150 Hz. Input in Pa; output in model units. With `model="jepsen2008"`
(Jepsen, Ewert and Dau 2008) the hair cell is a rectifier with a 1 kHz low-pass, followed by a
square.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amtcore.arguments import Text, checked_arguments
from amtcore.listener import OHC_SHARE, Audiogram
from amtcore.models.composition import stage_arguments
from amtcore.models.decisions import DecisionMethods
from amtcore.models.time_domain import (
    ChainStage,
    Kwargs,
    StageSequence,
    TimeDomainModel,
    check_range,
)
from amtcore.scales import erb_space
from amtcore.stages.adaptation import AdaptLoop
from amtcore.stages.basilar_membrane import DRNLFilterbank
from amtcore.stages.compression import SquaringExpansion
from amtcore.stages.ears import HeadphoneFilter, MiddleEarFilter
from amtcore.stages.fir import Resampler
from amtcore.stages.hair_cells import IHCEnvelope, IHCPaulick2024
from amtcore.stages.modulation import ModulationFilterbank
from amtcore.tables import load_table

MODELS = ("paulick2024", "jepsen2008")


def adaptation_min_level(fc_hz: list[float]) -> Tensor:
    """Return the lowest input of the adaptation loops in V, at the table's nearest frequency."""
    levels = torch.tensor(load_table("paulick2024_adaptation_min_level")["min_level_uv"]) * 1e-6
    listed_hz = torch.from_numpy(erb_space(250.0, 8000.0, len(levels)))
    distance = (torch.tensor(fc_hz, dtype=torch.float64).unsqueeze(1) - listed_hz).abs()
    return levels[distance.argmin(1)]


def _ear(kwargs: dict[str, Any]) -> StageSequence:
    """Return headphone (linear phase) and middle ear (minimum phase), to stapes velocity."""
    of_middle_ear = {"filter_type": "lopezpoveda2001", "normalize_gain": False}
    of_middle_ear |= {name: kwargs.pop(name) for name in of_middle_ear if name in kwargs}
    phase = {"phase_type": "amt", "compensate_delay": False}
    headphone = HeadphoneFilter(**{**phase, **kwargs})
    middleear = MiddleEarFilter(**{**phase, **of_middle_ear, **kwargs})
    return StageSequence(OrderedDict(headphone=headphone, middleear=middleear))


class Paulick2024(DecisionMethods, TimeDomainModel):
    """Auditory model of detection, discrimination and masking (CASP).

    Args:
        fs: Sampling rate in Hz; every filter of the highest channel must lie below fs/2.
        flow: Lowest centre frequency in Hz.
        fhigh: Highest centre frequency in Hz.
        n_channels: Number of channels, evenly spaced in ERB number with both ends exact.
        use_outerear: Whether the input is sound pressure at the headphones, in Pa; else it is
            already stapes velocity, in m/s.
        learnable: Make the constants of all stages parameters.
        return_stages: Also return the output of every stage.
        filter_type: "efilt" or "butterworth" modulation filters.
        dtype: torch.float32 or torch.float64.
        outerear_kwargs: Passed to `HeadphoneFilter` and `MiddleEarFilter`; `filter_type` and
            `normalize_gain` to the latter only. The API page names a filter in dB here, with which
            the basilar membrane would move about 1000 times too far.
        drnl_kwargs: Passed to `DRNLFilterbank`.
        ihc_kwargs: Passed to `IHCPaulick2024`, or `IHCEnvelope` for jepsen2008.
        adaptation_kwargs: Passed to `AdaptLoop`.
        modulation_kwargs: Passed to `ModulationFilterbank`.
        model: "paulick2024" or "jepsen2008".
        audiogram: Hearing loss of the listener in dB HL by frequency in Hz, see `DRNLFilterbank`;
            None is normal hearing.
        ohc_share: Share of outer hair cells in the loss in dB, 0 to 1.

    Shape:
        (batch, time) -> list over channels of (batch, M_i, floor(time / 4)); (time,) -> list of
        (M_i, floor(time / 4)). With `return_stages`, a pair of that and a dict of outerear,
        (batch, time), drnl, ihc and adaptation, (batch, channel, time), and resampled,
        (batch, channel, floor(time / 4)).

    Invariants:
        `model(x)` equals the chunks of `model.stream` over any split of x, one after another; they
        come out 40 samples later, which the decimation looks ahead.

    >>> model = Paulick2024(fs=44100, n_channels=3)
    >>> [tuple(y.shape) for y in model(torch.zeros(2, 441))]
    [(2, 5, 110), (2, 8, 110), (2, 8, 110)]
    """

    chain_stages = (
        ChainStage("outer_middle_ear", returned="outerear"),
        ChainStage("drnl", returned="drnl", stream="velocity"),
        ChainStage("ihc", returned="ihc", stream="envelope"),
        ChainStage("expansion", returned="ihc", stream="envelope"),
        ChainStage("adaptation", returned="adaptation", stream="adaptation"),
        ChainStage("resampler", returned="resampled"),
        ChainStage("modulation", stream="modulation"),
    )
    input_unit = "pa"
    shown = f"{TimeDomainModel.shown} model use_outerear"

    @checked_arguments(model=Text(MODELS))
    def __init__(
        self,
        fs: float = 44100,
        flow: float = 125.0,
        fhigh: float = 8000.0,
        n_channels: int = 50,
        use_outerear: bool = True,
        learnable: bool = False,
        return_stages: bool = False,
        filter_type: str = "efilt",
        dtype: torch.dtype = torch.float32,
        outerear_kwargs: Kwargs = None,
        drnl_kwargs: Kwargs = None,
        ihc_kwargs: Kwargs = None,
        adaptation_kwargs: Kwargs = None,
        modulation_kwargs: Kwargs = None,
        model: str = "paulick2024",
        audiogram: Audiogram | None = None,
        ohc_share: float = OHC_SHARE,
    ) -> None:
        super().__init__(fs, learnable, return_stages)
        check_range(fs, flow, fhigh)
        common: dict[str, Any] = {"learnable": learnable, "dtype": dtype}
        own = partial(stage_arguments, models={"fs": fs, **common})
        fc_hz = erb_space(flow, fhigh, n_channels).tolist()
        self.flow, self.fhigh, self.n_channels = flow, fhigh, n_channels
        self.model, self.use_outerear, self.filter_type = model, use_outerear, filter_type
        self.outer_middle_ear = None
        if use_outerear:
            self.outer_middle_ear = _ear(own("outerear_kwargs", outerear_kwargs))
        loss: dict[str, Any] = {"audiogram": audiogram, "ohc_share": ohc_share}
        self.drnl = DRNLFilterbank(fc_hz, **own("drnl_kwargs", drnl_kwargs, model=model, **loss))
        self.expansion: SquaringExpansion | None = None
        if model == "jepsen2008":
            envelope = own("ihc_kwargs", ihc_kwargs, method="relanoiborra2019")
            self.ihc: IHCEnvelope | IHCPaulick2024 = IHCEnvelope(**envelope)
            self.expansion = SquaringExpansion(50.0, **common)
            loops: dict[str, Any] = {"preset": "dau1997", "min_level": 1e-5}
        else:
            self.ihc = IHCPaulick2024(**own("ihc_kwargs", ihc_kwargs))
            loops = {"preset": "paulick2024", "min_level": adaptation_min_level(fc_hz)}
        loops = own("adaptation_kwargs", adaptation_kwargs, **loops)
        self.adaptation = AdaptLoop(**loops)
        self.resample_factor = 4
        self.resampler = Resampler(fs, self.fs / self.resample_factor, dtype)
        slow = {"fs": self.fs_resampled, **common}
        bank = stage_arguments(
            "modulation_kwargs", modulation_kwargs, slow, preset=model, filter_type=filter_type
        )
        self.modulation = ModulationFilterbank(fc=fc_hz, **bank)

    @property
    def fs_resampled(self) -> float:
        """Sampling rate of the output in Hz."""
        return self.fs / self.resample_factor

    @property
    def auditory_filters(self) -> DRNLFilterbank:
        return self.drnl
