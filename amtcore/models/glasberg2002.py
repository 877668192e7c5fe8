"""Glasberg and Moore (2002): loudness of time-varying sounds, one signal for both ears.

Ear filter (1997 tables), six running spectra, level per ERB, excitation pattern, specific loudness,
instantaneous loudness, short-term and long-term smoothing. Input in Pa; excitation is relative to
(20 uPa)^2. The interface's page has a law in three regimes and one filter of 50 and 200 ms. With
these 1 kHz at 40 dB SPL would be 11.5 sone, so this model uses the published law and filters.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from amtcore.arguments import checked_arguments
from amtcore.kernels.operations.loudness_frames import LoudnessKernel
from amtcore.kernels.operations.specific_loudness import audible
from amtcore.models.composition import stage_arguments
from amtcore.models.loudness import Loudness, LoudnessModel, OverTime, loudness_kernel
from amtcore.models.time_domain import Kwargs
from amtcore.stages.ears import LoudnessEar
from amtcore.stages.excitation import ERBIntegration, ExcitationPattern
from amtcore.stages.loudness import LoudnessIntegration, SpecificLoudness
from amtcore.stages.spectrum import INAUDIBLE, MultiResolutionFFT, inaudible
from amtcore.stages.stage import Stage
from amtcore.units import REFERENCE_PA


class Glasberg2002(LoudnessModel):
    """Monaural loudness model, in sone for a sound presented to both ears.

    Args:
        fs: Sampling rate in Hz; spectra reach up to 15 kHz or fs/2.
        learnable: Make the constants of all stages parameters.
        return_stages: Also return the output of every stage.
        multi_fft_kwargs: Passed to `MultiResolutionFFT`; `hop_length` in samples.
        erb_kwargs: Passed to `ERBIntegration`; sets the channels of all later stages.
        excitation_kwargs: Passed to `ExcitationPattern`.
        specific_loudness_kwargs: Passed to `SpecificLoudness`.
        loudness_integration_kwargs: Passed to `LoudnessIntegration`.
        dtype: torch.float32 or torch.float64 (torch_amt has none).
        outer_middle_ear_kwargs: Passed to `LoudnessEar` (torch_amt has no ear at all):
            compensation_type "tfOuterMiddle1997" by default, field_type, order.

    Shape:
        (batch, time) -> long-term loudness (batch, frame); (time,) -> (frame,).
        frame = time // hop + 1, a frame centred on sample 0 and on every hop.
        With `return_stages`, a pair of that and a dict: stl (batch, frame) in sone,
        specific_loudness (batch, frame, channel) in sone per Cam and ear, excitation and
        erb_excitation (batch, frame, channel) in dB SPL, psd (batch, frame, component) in Pa^2/Hz,
        freqs (component,) in Hz; also inst, the instantaneous loudness (batch, frame) in sone.

    Invariants:
        A tone of 1 kHz at 40 dB SPL is 1 sone within 2 %.

    >>> Glasberg2002()(torch.zeros(2, 3200)).shape
    torch.Size([2, 101])
    """

    @checked_arguments()
    def __init__(
        self,
        fs: float = 32000,
        learnable: bool = False,
        return_stages: bool = False,
        multi_fft_kwargs: Kwargs = None,
        erb_kwargs: Kwargs = None,
        excitation_kwargs: Kwargs = None,
        specific_loudness_kwargs: Kwargs = None,
        loudness_integration_kwargs: Kwargs = None,
        dtype: torch.dtype = torch.float32,
        outer_middle_ear_kwargs: Kwargs = None,
    ) -> None:
        super().__init__(fs, learnable, return_stages)
        common: dict[str, Any] = {"fs": fs, "learnable": learnable, "dtype": dtype}
        own = partial(stage_arguments, models=common)
        ear = own("outer_middle_ear_kwargs", outer_middle_ear_kwargs)
        self.outer_middle_ear = LoudnessEar(**{"compensation_type": "tfOuterMiddle1997", **ear})
        self.multi_fft = MultiResolutionFFT(**own("multi_fft_kwargs", multi_fft_kwargs))
        components_hz = self.multi_fft.frequencies.double()
        self.erb_integration = ERBIntegration(components_hz, **own("erb_kwargs", erb_kwargs))
        fc_hz = self.erb_integration.fc_erb.double()
        pattern = own("excitation_kwargs", excitation_kwargs)
        self.excitation_pattern = ExcitationPattern(components_hz, fc_hz, **pattern)
        law = own("specific_loudness_kwargs", specific_loudness_kwargs)
        self.specific_loudness = SpecificLoudness(fc_hz, **law)
        self.hop_length, self._bin_hz = self.multi_fft.hop_length, self.multi_fft.bin_hz
        self._erb_step = self.erb_integration.erb_step
        timed = {**common, "hop_length": self.hop_length, "erb_step": self._erb_step}
        timed = stage_arguments("loudness_integration_kwargs", loudness_integration_kwargs, timed)
        self.loudness_integration = LoudnessIntegration(**timed)

    @property
    def memories_s(self) -> tuple[float, float]:
        return self.loudness_integration.memories_s

    @property
    def running_spectrum(self) -> MultiResolutionFFT:
        return self.multi_fft

    @property
    def fc(self) -> Tensor:
        return self.erb_integration.fc_erb

    def _as_batch(self, x: Tensor) -> tuple[Tensor, bool]:
        x = self._stage().as_input(x, (1, 2), "(batch, time) or (time,)")
        signal = x if x.ndim == 2 else x.unsqueeze(0)
        return signal.unsqueeze(1), x.ndim == 2

    def _analyse(self, filtered: Tensor) -> dict[str, Tensor]:
        spectrum = self.multi_fft.intensities(filtered)
        # Bands and channels have equal centres, and therefore equal nodes.
        nodes = self.erb_integration.at_nodes(spectrum[:, 0], inaudible(spectrum))
        levels = self.erb_integration.of_nodes(nodes)
        excitation = self.excitation_pattern.pattern(nodes, levels)
        stages = {"specific": self.specific_loudness(excitation).unsqueeze(1)}
        if self.return_stages:
            stages |= {
                "excitation": excitation.unsqueeze(1),
                "erb_excitation": levels.unsqueeze(1),
                "psd": self.multi_fft.density(spectrum),
            }
        return stages

    def _kernel(self) -> LoudnessKernel | None:
        return loudness_kernel(
            self.multi_fft, INAUDIBLE, self.erb_integration, "bands", self.excitation_pattern,
            self.specific_loudness,
        )  # fmt: skip

    def _integrate(self, analysed: dict[str, Tensor], over_time: OverTime) -> Loudness:
        specific = analysed["specific"][:, 0]
        now = self.loudness_integration.instantaneous(specific)
        short = over_time("short", self.loudness_integration.short_term, now)
        long = over_time("long", self.loudness_integration.long_term, short)
        stages = {}
        if self.return_stages:
            stages = {"stl": short, "specific_loudness": specific}
            stages |= {name: analysed[name][:, 0] for name in ("excitation", "erb_excitation")}
            stages |= {"psd": analysed["psd"][:, 0], "inst": now}
        return Loudness(short, long, 2.0 * specific, stages, over_time.after)

    def _by_modules(self, signal: Tensor) -> Loudness:
        psd, freqs = self.multi_fft(self.outer_middle_ear(signal)[:, 0])
        intensity = psd * (self._bin_hz / REFERENCE_PA**2)
        components = audible(intensity, inaudible(intensity))
        levels = self.erb_integration(components)
        excitation = self.excitation_pattern(components, levels)
        specific = self.specific_loudness(excitation)
        short, long = self.loudness_integration(specific)
        stages = {
            "stl": short, "specific_loudness": specific, "excitation": excitation,
            "erb_excitation": levels, "psd": psd, "freqs": freqs,
            "inst": 2.0 * self._erb_step * specific.sum(-1),
        }  # fmt: skip
        return Loudness(short, long, 2.0 * specific, stages, {})

    def _result(self, loudness: Loudness, batched: bool) -> Any:
        long, stages = loudness.long, dict(loudness.stages)
        freqs = stages.pop("freqs", None)
        if not batched:
            long = long.squeeze(0)
            stages = {name: values.squeeze(0) for name, values in stages.items()}
        if not self.return_stages:
            return long
        return long, {**stages, "freqs": self.multi_fft.frequencies if freqs is None else freqs}

    def steady_loudness(self, specific: Tensor) -> Tensor:
        return self.loudness_integration.instantaneous(specific[:, 0])

    def get_learnable_parameters(self) -> dict[str, dict[str, Any]]:
        """Values of the constants by component; empty unless `learnable`.

        Numbers as floats, one value a channel as tensors; `multi_fft` has its fixed hop and window
        lengths, as in torch_amt.
        """
        if not self.learnable:
            return {}
        hop, windows = self.multi_fft.hop_length, list(self.multi_fft.windows)
        groups: dict[str, dict[str, Any]] = {"multi_fft": {"hop_length": hop, "n_ffts": windows}}
        for name in (
            "outer_middle_ear", "erb_integration", "excitation_pattern", "specific_loudness",
            "loudness_integration",
        ):  # fmt: skip
            stage = cast(Stage, self.get_submodule(name))
            values = {key: getattr(stage, key).detach() for key in stage.learnt}
            groups[name] = {k: v.item() if v.ndim == 0 else v for k, v in values.items()}
        groups["erb_integration"]["fc_erb"] = self.fc.clone()
        return groups
