"""King, Varnet and Lorenzi (2019): amplitude and frequency modulation through a compressive ear.

Gammatone filters, broken-stick compression, half-wave rectification with a 1 kHz low-pass, a 3 Hz
high-pass as adaptation, modulation filters of constant Q. Input in units of RMS 1 = 100 dB SPL;
output in the same unit after compression.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amtcore.arguments import Text, checked_arguments
from amtcore.errors import ParameterError
from amtcore.models.composition import stage_arguments
from amtcore.models.time_domain import (
    ChainStage,
    Kwargs,
    TimeDomainModel,
    WholeSignalBands,
    check_range,
)
from amtcore.scales import erb_frequency, erb_number, erb_space_bw
from amtcore.stages.basilar_membrane import GammatoneFilterbank
from amtcore.stages.butterworth import ButterworthFilter
from amtcore.stages.compression import BrokenStickCompression, PowerCompression
from amtcore.stages.fir import Resampler
from amtcore.stages.hair_cells import IHCEnvelope
from amtcore.stages.modulation import King2019ModulationFilterbank

COMPRESSIONS = {"brokenstick": BrokenStickCompression, "power": PowerCompression}
_ERB_AROUND_BASE = 2


def _centre_frequencies(flow_hz: float, fhigh_hz: float, basef_hz: float | None) -> list[float]:
    """Return frequencies 1 ERB apart, centred in the range, or five around a base frequency."""
    if basef_hz is None:
        return erb_space_bw(flow_hz, fhigh_hz).tolist()
    steps = range(-_ERB_AROUND_BASE, _ERB_AROUND_BASE + 1)
    fc_hz = [float(erb_frequency(erb_number(basef_hz) + step)) for step in steps]
    if not fc_hz[0] > 0:
        raise ParameterError(
            f"basef must lie {_ERB_AROUND_BASE} ERB or more above 0 Hz, got {basef_hz:g} Hz"
        )
    return fc_hz


class King2019(TimeDomainModel):
    """Auditory model of masking between amplitude and frequency modulation.

    Args:
        fs: Sampling rate in Hz; every centre frequency must lie below fs/2.
        flow: Lowest centre frequency limit in Hz.
        fhigh: Highest centre frequency limit in Hz.
        basef: Only the five channels within 2 ERB of this frequency in Hz; None takes the range.
        compression_type: "brokenstick" or "power".
        compression_n: Exponent of the compression, one or one per channel.
        compression_knee_db: Knee in dB SPL.
        dboffset: Level in dB SPL of an input of RMS 1.
        adt_hp_fc: Cutoff of the adaptation's high-pass in Hz.
        adt_hp_order: Its order.
        mflow: Lowest modulation centre frequency in Hz.
        mfhigh: Highest modulation centre frequency in Hz.
        modbank_nmod: Number of modulation filters; None sets them edge to edge.
        modbank_qfactor: Their quality factor.
        lp_150hz: Whether a 150 Hz low-pass comes before them.
        subfs: Sampling rate of the output in Hz; None keeps fs.
        learnable: Make the constants of all stages parameters.
        return_stages: Also return the output of every stage.
        dtype: torch.float32 or torch.float64.
        filterbank_kwargs: Passed to `GammatoneFilterbank`.
        compression_kwargs: Passed to the compression.
        ihc_kwargs: Passed to `IHCEnvelope`.
        adaptation_kwargs: Passed to the adaptation's `ButterworthFilter`.
        modulation_kwargs: Passed to `King2019ModulationFilterbank`.
        phase_insens: "hilbert" takes the envelope of modulation bands above 10 Hz over the whole
            signal; "none" keeps the bands, and can stream.

    Shape:
        (batch, time) -> (batch, time', channel, modulation), time' = floor(time * subfs / fs);
        (time,) -> (time', channel, modulation). With `return_stages`, a pair of that and a dict of
        gtone_response, compressed_response, ihc and adapted_response, (batch, channel, time).

    Invariants:
        With `phase_insens="none"`, `model(x)` equals the chunks of `model.stream` over any split
        of x, one after another.

    >>> model = King2019(fs=48000, basef=5000)
    >>> model(torch.zeros(2, 480)).shape
    torch.Size([2, 480, 5, 5])
    """

    chain_stages = (
        ChainStage("filterbank", returned="gtone_response"),
        ChainStage("compression", returned="compressed_response"),
        ChainStage("ihc", returned="ihc", stream="envelope"),
        ChainStage("adaptation_filter", returned="adapted_response", stream="adaptation"),
        ChainStage("lp150_filter"),
        ChainStage("modulation_filterbank", stream="modulation"),
        ChainStage("resampler"),  # of the bands: see `whole_bands`
    )
    input_unit = "rms1=100dB"
    output_unit = "input unit"
    shown = f"{TimeDomainModel.shown} compression_type"
    streaming_advice = "set phase_insens to none and leave subfs out"

    @checked_arguments(compression_type=Text(COMPRESSIONS))
    def __init__(
        self,
        fs: float,
        flow: float = 80.0,
        fhigh: float = 8000.0,
        basef: float | None = None,
        compression_type: str = "brokenstick",
        compression_n: float | list[float] = 0.3,
        compression_knee_db: float = 30.0,
        dboffset: float = 100.0,
        adt_hp_fc: float = 3.0,
        adt_hp_order: int = 1,
        mflow: float = 2.0,
        mfhigh: float = 150.0,
        modbank_nmod: int | None = None,
        modbank_qfactor: float = 1.0,
        lp_150hz: bool = False,
        subfs: float | None = None,
        learnable: bool = False,
        return_stages: bool = False,
        dtype: torch.dtype = torch.float32,
        filterbank_kwargs: Kwargs = None,
        compression_kwargs: Kwargs = None,
        ihc_kwargs: Kwargs = None,
        adaptation_kwargs: Kwargs = None,
        modulation_kwargs: Kwargs = None,
        phase_insens: str = "hilbert",
    ) -> None:
        super().__init__(fs, learnable, return_stages)
        if basef is None:
            check_range(fs, flow, fhigh)
        common: dict[str, Any] = {"learnable": learnable, "dtype": dtype}
        own = partial(stage_arguments, models={"fs": fs, **common})
        self.basef, self.dboffset, self.compression_type = basef, dboffset, compression_type
        self.subfs = subfs
        fc_hz = _centre_frequencies(flow, fhigh, basef)
        self.flow, self.fhigh = (flow, fhigh) if basef is None else (fc_hz[0], fc_hz[-1])
        self.filterbank = GammatoneFilterbank(fc_hz, **own("filterbank_kwargs", filterbank_kwargs))
        stick = stage_arguments(
            "compression_kwargs", compression_kwargs, common, knee_db=compression_knee_db,
            n=compression_n, dboffset=dboffset,
        )  # fmt: skip
        self.compression = COMPRESSIONS[compression_type](**stick)
        self.ihc = IHCEnvelope(**own("ihc_kwargs", ihc_kwargs, method="king2019"))
        high = own(
            "adaptation_kwargs", adaptation_kwargs, fc=adt_hp_fc, order=adt_hp_order, btype="high"
        )
        self.adaptation_filter = ButterworthFilter(**high)
        self.lp150_filter = ButterworthFilter(fs, 150.0, **common) if lp_150hz else None
        bank = own(
            "modulation_kwargs", modulation_kwargs, mflow=mflow, mfhigh=mfhigh, nmod=modbank_nmod,
            qfactor=modbank_qfactor, phase_insens=phase_insens,
        )  # fmt: skip
        self.modulation_filterbank = King2019ModulationFilterbank(**bank)
        self.resampler = None if subfs is None else Resampler(fs, subfs, dtype)

    @property
    def mfc(self) -> Tensor:
        """Modulation centre frequencies in Hz, (modulation,)."""
        return self.modulation_filterbank.mfc

    def arranged(self, out: Tensor) -> Tensor:
        """(.., channel, modulation, time) -> (.., time, channel, modulation)."""
        return out.movedim(-1, -3)

    def whole_bands(self, stream: str) -> WholeSignalBands | None:
        """The modulation stream of whole signals, with the Hilbert envelope or resampled."""
        bank, resampler = self.modulation_filterbank, self.resampler
        if stream != "modulation" or (resampler is None and bank.can_stream):
            return None
        if resampler is None:
            filters = bank.envelope_filters(self.num_channels)
            return WholeSignalBands(bank.bands, bank.num_filters, self.fs, filters=filters)

        def resampled(x: Tensor, samples: Sequence[int]) -> Iterator[list[Tensor]]:
            for band in bank.bands(x, samples):
                yield [resampler(of_signal) for of_signal in band]

        rates = (resampler.up, resampler.down)
        return WholeSignalBands(resampled, bank.num_filters, resampler.fs_out, rates)

    def mfc_by_column(self) -> Tensor:
        return self.mfc.repeat(self.num_channels)
