"""Moore, Glasberg and Schlittenlacher (2016): loudness of time-varying sounds at two ears.

Ear filter, six running spectra, excitation pattern and specific loudness of each ear; short-term
smoothing, binaural inhibition, long-term smoothing (rates of Moore et al. 2018). Input in Pa. Not
copied from the interface's page: 10^(dB/20) once in the ear filter, and the published constants.
With them 1 kHz at 40 dB SPL is 1 sone (page: 2.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.errors import ParameterError, ShapeError
from amtcore.kernels.operations.attack_release import smooth_rows
from amtcore.kernels.operations.binaural_inhibition import inhibition_of_rows, sides_of
from amtcore.kernels.operations.loudness_frames import LoudnessKernel
from amtcore.kernels.operations.specific_loudness import audible
from amtcore.models.composition import stage_arguments
from amtcore.models.frame_blocks import BLOCK_FRAMES, map_blocks
from amtcore.models.loudness import Loudness, LoudnessModel, OverTime, Rows, loudness_kernel
from amtcore.models.time_domain import Kwargs
from amtcore.stages.ears import LoudnessEar
from amtcore.stages.excitation import Moore2016ExcitationPattern
from amtcore.stages.loudness import (
    Moore2016AGC,
    Moore2016BinauralLoudness,
    Moore2016SpecificLoudness,
    Moore2016TemporalIntegration,
)
from amtcore.stages.spectrum import FAINTEST, Moore2016Spectrum, faintest, level_db

FS_HZ = 32000.0
EARS = ("left", "right")
#: Frames of both ears that are inhibited at a time: 600 kB of loudness.
_INHIBITED = 512


class Moore2016(LoudnessModel):
    """Binaural loudness in sone.

    Args:
        fs: Sampling rate in Hz, must be 32000.
        learnable: Make the constants of all stages parameters.
        return_stages: Also return the output of every stage.
        dtype: torch.float32 or torch.float64.
        outer_middle_ear_kwargs: Passed to `LoudnessEar` (not `OuterMiddleEarFilter`, whose finer
            filter is not the published one): compensation_type, field_type, order.
        spectrum_kwargs: Passed to `Moore2016Spectrum`; `hop_length` in samples.
        excitation_kwargs: Passed to `Moore2016ExcitationPattern`.
        specific_loudness_kwargs: Passed to `Moore2016SpecificLoudness`.
        temporal_integration_kwargs: Passed to `Moore2016TemporalIntegration`.
        binaural_loudness_kwargs: Passed to `Moore2016BinauralLoudness`.
        ltl_agc_kwargs: Passed to the two `Moore2016AGC`.

    Shape:
        (batch, 2, time) or (2, time), left and right; (batch, 1, time), (1, time) or (time,) is one
        signal at both ears. Returns short-term loudness (batch, frame), long-term loudness
        (batch, frame) and the maximum of the latter (batch,); a chunk of a stream gives the
        maximum so far. frame = time // hop + 1, a frame centred on sample 0 and on every hop.

    Invariants:
        A tone of 1 kHz at 40 dB SPL is 1 sone; a sound at both ears is 1.5 times as loud as at one.

    >>> short, long, loudest = Moore2016()(torch.zeros(1, 2, 3200))
    >>> short.shape, loudest.shape, bool(loudest < 1e-6)
    (torch.Size([1, 101]), torch.Size([1]), True)
    """

    input_channels = (1, 2)

    @checked_arguments()
    def __init__(
        self,
        fs: float = FS_HZ,
        learnable: bool = False,
        return_stages: bool = False,
        dtype: torch.dtype = torch.float32,
        outer_middle_ear_kwargs: Kwargs = None,
        spectrum_kwargs: Kwargs = None,
        excitation_kwargs: Kwargs = None,
        specific_loudness_kwargs: Kwargs = None,
        temporal_integration_kwargs: Kwargs = None,
        binaural_loudness_kwargs: Kwargs = None,
        ltl_agc_kwargs: Kwargs = None,
    ) -> None:
        super().__init__(fs, learnable, return_stages)
        if fs != FS_HZ:
            raise ParameterError(f"Moore2016 works at 32000 Hz, got {fs}; resample the signal")
        common: dict[str, Any] = {"fs": fs, "learnable": learnable, "dtype": dtype}
        own = partial(stage_arguments, models=common)
        ear = own("outer_middle_ear_kwargs", outer_middle_ear_kwargs)
        self.outer_middle_ear = LoudnessEar(**ear)
        self.spectrum = Moore2016Spectrum(**own("spectrum_kwargs", spectrum_kwargs))
        components_hz = self.spectrum.frequencies.double()
        pattern = own("excitation_kwargs", excitation_kwargs)
        self.excitation = Moore2016ExcitationPattern(components_hz, **pattern)
        law = own("specific_loudness_kwargs", specific_loudness_kwargs)
        self.specific_loudness = Moore2016SpecificLoudness(self.excitation.fc.double(), **law)
        self.hop_length = self.spectrum.hop_length
        timed = {**common, "hop_length": self.hop_length}
        self.temporal_integration = Moore2016TemporalIntegration(
            **stage_arguments("temporal_integration_kwargs", temporal_integration_kwargs, timed)
        )
        spaced = {**common, "erb_step": self.excitation.erb_step}
        spaced = stage_arguments("binaural_loudness_kwargs", binaural_loudness_kwargs, spaced)
        self.binaural_loudness = Moore2016BinauralLoudness(**spaced)
        agc = stage_arguments("ltl_agc_kwargs", ltl_agc_kwargs, timed)
        self.ltl_agc_left, self.ltl_agc_right = Moore2016AGC(**agc), Moore2016AGC(**agc)

    @property
    def memories_s(self) -> tuple[float, float]:
        agcs = self.ltl_agc_left, self.ltl_agc_right
        return self.temporal_integration.memory_s, max(agc.memory_s for agc in agcs)

    @property
    def running_spectrum(self) -> Moore2016Spectrum:
        return self.spectrum

    @property
    def fc(self) -> Tensor:
        return self.excitation.fc

    def _as_batch(self, x: Tensor) -> tuple[Tensor, bool]:
        x = self._stage().as_input(x, (1, 2, 3), "(batch, 2, time), (2, time) or (time,)")
        ears = x if x.ndim > 1 else x.unsqueeze(0)
        signal = ears if x.ndim == 3 else ears.unsqueeze(0)
        if signal.shape[1] not in self.input_channels:
            raise ShapeError(
                f"expected 2 ears, or 1 for the same signal at both, got {signal.shape[1]}; a "
                "batch of mono signals is (batch, 1, time)"
            )
        return signal, x.ndim == 3

    def _analyse(self, filtered: Tensor) -> dict[str, Tensor]:
        intensity = self.spectrum.intensities(filtered)
        least = faintest(intensity)
        excitation = self.excitation.forward(intensity, least)
        stages = {"specific": self.specific_loudness(excitation)}
        if self.return_stages:
            stages |= {"components": audible(intensity, least), "excitation": excitation}
        return stages

    def _integrate(self, analysed: dict[str, Tensor], over_time: OverTime) -> Loudness:
        specific = analysed["specific"]
        smooth = over_time("short", self.temporal_integration.stream, _rows(specific))
        by_ear = _ears(smooth, specific)
        left, right = self._inhibited(by_ear)
        short = [self.binaural_loudness.total(ear) for ear in (left, right)]
        long, total = self._long_term(short, over_time)
        stages = self._stages(analysed, by_ear, short, long) if self.return_stages else {}
        return Loudness(short[0] + short[1], total, left + right, stages, over_time.after)

    def _long_term(
        self, short: Sequence[Tensor], over_time: OverTime
    ) -> tuple[list[Tensor], Tensor]:
        """Return long-term loudness of each ear, and of both together."""
        left = over_time("left", self.ltl_agc_left.stream, short[0])
        right = over_time("right", self.ltl_agc_right.stream, short[1])
        return [left, right], over_time("loudest", _loudest, left + right)

    def _kernel(self) -> LoudnessKernel | None:
        return loudness_kernel(
            self.spectrum, FAINTEST, self.excitation, "between_nodes", self.excitation,
            self.specific_loudness,
        )  # fmt: skip

    def _integrate_rows(self, rows: Rows, over_time: OverTime) -> Loudness:
        """Gain controls in place, and a few frames of both ears from there to their loudness."""
        if rows.ears == 1 or self.temporal_integration.backend is not None:
            return super()._integrate_rows(rows, over_time)
        channels, binaural = rows.channels, self.binaural_loudness

        def smoothed(rows: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
            state = rows.new_zeros(len(rows), 2 * channels) if state is None else state
            coef = self.temporal_integration.coefficients(2 * channels)
            return rows, smooth_rows(rows, coef, state)

        values = over_time("short", smoothed, rows.values)
        sides = sides_of(binaural.smoothing(channels))
        specific = values.new_empty(*values.shape[:2], channels)
        short = values.new_empty(2, *values.shape[:2])

        def inhibited(place: tuple[int, slice]) -> None:
            ears = inhibition_of_rows(values[place], channels, sides, binaural.p)
            torch.add(*ears, out=specific[place])
            for ear, of_ear in zip(ears, short, strict=True):
                of_ear[place] = binaural.total(ear)

        frames, batch = range(0, values.shape[1], _INHIBITED), range(len(values))
        places = [(b, slice(at, at + _INHIBITED)) for b in batch for at in frames]
        map_blocks(inhibited, places, values)
        _, total = self._long_term(short.unbind(), over_time)
        return Loudness(short[0] + short[1], total, specific, {}, over_time.after)

    def _by_modules(self, signal: Tensor) -> Loudness:
        analysed = {"filtered": self.outer_middle_ear(signal)}
        analysed["components"] = self.spectrum(analysed["filtered"])
        analysed["excitation"] = self.excitation(analysed["components"])
        analysed["specific"] = specific = self.specific_loudness(analysed["excitation"])
        by_ear = _ears(self.temporal_integration(_rows(specific)), specific)
        short = list(self.binaural_loudness(by_ear[0], by_ear[-1]))
        long = [self.ltl_agc_left(short[0]), self.ltl_agc_right(short[1])]
        total, loudest = _loudest(long[0] + long[1], None)
        stages = self._stages(analysed, by_ear, short, long) if self.return_stages else {}
        return Loudness(short[0] + short[1], total, specific.sum(1), stages, {"loudest": loudest})

    def _inhibited(self, by_ear: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        if len(by_ear) == 1:
            either = self.binaural_loudness.diotic(by_ear[0])
            return either, either
        kernel = self.binaural_loudness.smoothing(by_ear[0].shape[-1])
        left, right = (ear.split(BLOCK_FRAMES, 1) for ear in by_ear)
        parts = map_blocks(
            lambda ears: self.binaural_loudness.inhibited_by(*ears, kernel),
            list(zip(left, right, strict=True)),
            by_ear[0],
        )
        left, right = (torch.cat(of_ear, 1) for of_ear in zip(*parts, strict=True))
        return left, right

    def _stages(
        self,
        analysed: dict[str, Tensor],
        by_ear: tuple[Tensor, ...],
        short: list[Tensor],
        long: list[Tensor],
    ) -> dict[str, Tensor]:
        """Return the page's stages, with time as axis 1; a single signal counts for both ears."""
        stages: dict[str, Tensor] = {}
        heard = self.spectrum if hasattr(self.spectrum, "frequencies") else self.excitation
        for number, ear in enumerate(EARS):
            source = min(number, len(by_ear) - 1)
            components = analysed["components"][:, source]
            # Copies: one ear saved alone must not take the other one with it.
            stages[f"filtered_{ear}"] = analysed["filtered"][:, source].clone()
            stages[f"freqs_{ear}"] = heard.frequencies.expand_as(components)
            stages[f"levels_{ear}"] = level_db(components)
            stages[f"excitation_{ear}"] = analysed["excitation"][:, source].clone()
            stages[f"inst_spec_loud_{ear}"] = analysed["specific"][:, source].clone()
            stages[f"stl_spec_loud_{ear}"] = by_ear[source].clone()
            stages[f"stl_loud_{ear}"] = short[number]
            stages[f"ltl_loud_{ear}"] = long[number]
        return stages

    def _result(self, loudness: Loudness, batched: bool) -> Any:
        outputs: tuple[Tensor, ...] = (loudness.short, loudness.long, loudness.state["loudest"])
        stages = loudness.stages
        if not batched:
            outputs = tuple(values.squeeze(0) for values in outputs)
            stages = {name: values.squeeze(0) for name, values in stages.items()}
        return (outputs, stages) if self.return_stages else outputs

    def steady_loudness(self, specific: Tensor) -> Tensor:
        return 2.0 * self.binaural_loudness.total(self.binaural_loudness.diotic(specific[:, 0]))


def _rows(specific: Tensor) -> Tensor:
    """Return (batch, frame, ear * channel) of (batch, ear, frame, channel)."""
    return specific.transpose(1, 2).flatten(2)


def _ears(rows: Tensor, specific: Tensor) -> tuple[Tensor, ...]:
    """Return (batch, frame, channel) of each ear, the inverse of `_rows`."""
    batch, ears, frames, channels = specific.shape
    return rows.reshape(batch, frames, ears, channels).unbind(2)


def _loudest(total: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return `total` (batch, frame), and the largest value so far (batch,)."""
    most = total.new_zeros(total.shape[0]) if before is None else before
    return total, torch.cat((most.unsqueeze(-1), total), -1).amax(-1)
