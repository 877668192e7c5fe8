"""Spike trains as a feature: pooled frames of a model drive leaky integrate-and-fire neurons.

    Clip -> fused chain of the source stream, pooled to the neurons' steps -> neurons -> events.

Frames of a stage with one column a channel go through `LIFExodus` at the neurons' step rate; the
events are sparse. A clip is processed in stretches, so that steps at the sampling rate need no more
memory than steps at 1000 Hz. For learning use the layer itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import ParameterError, ShapeError, check_known
from amtcore.features.feature_model import ExtractStream
from amtcore.features.pooled_streams import FusedFeatures
from amtcore.features.spike_events import SpikeEvents
from amtcore.kernels.backend import Samples
from amtcore.plain_numbers import plain_number
from amtcore.stages import LIFExodus
from amtcore.stages.lif import checked

Numbers = float | tuple[float, ...]

#: Gain by the unit of the source. Steady sound of 60 dB SPL is about 60 model units after the
#: adaptation loops, which gives about 65 spikes/s with the default leak.
DEFAULT_GAINS = {"model units": 2.0}
#: Options that may differ from neuron to neuron.
_PER_NEURON = ("gain", "tau_mem", "tau_syn", "threshold", "bias")


@dataclass(frozen=True)
class SpikeOptions:
    """Options of a spike stream.

    Args:
        source: Stream of the model that drives the neurons.
        step_rate_hz: Steps of the neurons per second, up to the sampling rate.
        pool: Statistic of the source within a step: mean, rms, max or subsample.
        gain: Spikes per second that one unit of the source drives at threshold 1, the leak aside:
            a steady source s puts gain * s * step into the membrane at every step, whatever the
            step and the time constants. None takes the entry of the source's unit in
            `DEFAULT_GAINS`.
        tau_mem: Membrane time constant in s.
        tau_syn: Synaptic time constant in s.
        threshold: Firing threshold.
        bias: Added to the membrane at every step.
        neurons_per_channel: Neurons that hear the same channel; neuron n hears n // this.
        max_spikes_per_step: Most spikes of a neuron in one step; None for no limit.

    `gain` to `bias` are one number, one per neuron of a channel, or one per neuron of all channels.

    >>> SpikeOptions(step_rate_hz=500, threshold=(1, 2), neurons_per_channel=2).source_streams()
    {'adaptation': {'frame_rate_hz': 500.0, 'pool': 'mean'}}
    """

    source: str = "adaptation"
    step_rate_hz: float = 1000.0
    pool: str = "mean"
    gain: Numbers | None = None
    tau_mem: Numbers = 0.02
    tau_syn: Numbers = 0.005
    threshold: Numbers = 1.0
    bias: Numbers = 0.0
    neurons_per_channel: int = 1
    max_spikes_per_step: int | None = None

    def __post_init__(self) -> None:
        checked("step_rate_hz", self.step_rate_hz, above=0.0)
        for name, optional in (("neurons_per_channel", ""), ("max_spikes_per_step", ", or None")):
            given = getattr(self, name)
            number = plain_number(given)
            if not (given is None and optional) and not (isinstance(number, int) and number >= 1):
                raise ParameterError(
                    f"{name} must be a whole number of 1 or more{optional}, got {given!r}"
                )
            object.__setattr__(self, name, number)
        object.__setattr__(self, "step_rate_hz", float(self.step_rate_hz))
        for name in _PER_NEURON:
            value = getattr(self, name)
            if name != "gain" or value is not None:
                object.__setattr__(self, name, _numbers(name, value))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpikeOptions:
        """Build from a mapping, as a job states it."""
        known = [field.name for field in fields(cls)]
        check_known("a spike stream has no option", values, known)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; the inverse of `from_dict`."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def source_streams(self) -> dict[str, dict[str, Any]]:
        """Return `streams` for `build_extractor` whose frames are the neurons' steps."""
        return {self.source: {"frame_rate_hz": self.step_rate_hz, "pool": self.pool}}


def _numbers(name: str, value: Any) -> Numbers:
    """Return one number or a tuple of numbers as floats."""
    many = isinstance(value, (list, tuple, np.ndarray))
    for number in value if many else [value]:
        if isinstance(number, bool) or not isinstance(number, (int, float, np.number)):
            raise ParameterError(f"{name} must be a number or a list of numbers, got {value!r}")
    return tuple(float(number) for number in value) if many else float(value)


class SpikeStream:
    """Spikes of one long signal, chunk by chunk, in memory that does not grow.

    Invariants:
        Events of all pushes and of `finish`, concatenated, equal the events of the whole signal.
    """

    def __init__(self, encoder: SpikeEncoder, source: ExtractStream | None = None) -> None:
        self._encoder, self._source = encoder, source
        self._state: Tensor | None = None
        self._frames = 0

    def push_frames(self, frames: NDArray[np.floating[Any]]) -> SpikeEvents:
        """Return the events of the next frames (step, channel)."""
        counts, self._state = self._encoder.step(frames, self._state)
        events = SpikeEvents.from_dense(counts, self._frames)
        self._frames += events.n_frames
        return events

    def push(self, chunk: NDArray[np.floating[Any]]) -> SpikeEvents:
        """Return the events of the next samples (1-D, the model's input unit)."""
        return self._push_frames_of(lambda source: source.push(chunk))

    def finish(self) -> SpikeEvents:
        """End the signal; return the events of frames that the model held back."""
        return self._push_frames_of(lambda source: source.finish())

    def _push_frames_of(self, call: Callable[[ExtractStream], Any]) -> SpikeEvents:
        if self._source is None:
            raise ParameterError("this stream has no source of frames: use push_frames")
        return self.push_frames(call(self._source)[self._encoder.options.source])


class SpikeEncoder:
    """Neurons that turn frames of a stage into events.

    Args:
        options: Parameters of the stream.
        n_channels: Channels of the source.
        unit: Unit of the source, which decides the gain where none is given.
        dtype: torch.float32 or torch.float64.

    >>> from amtcore.features.registry import build_extractor
    >>> options = SpikeOptions(step_rate_hz=1000)
    >>> extractor = build_extractor("dau1997", fs_hz=16000, streams=options.source_streams())
    >>> (info,) = extractor.streams
    >>> encoder = SpikeEncoder(options, info.width, info.unit)
    >>> stream = encoder.open_stream(extractor.open_stream())
    >>> tone = 0.05 * np.sin(2 * np.pi * 1000 / 16000 * np.arange(1600))
    >>> events = stream.push(tone)
    >>> events.n_frames, events.n_channels, len(events) > 0
    (100, 31, True)
    """

    def __init__(
        self,
        options: SpikeOptions,
        n_channels: int,
        unit: str = "model units",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if options.gain is None:
            if unit not in DEFAULT_GAINS:
                raise ParameterError(
                    f"source {options.source!r} in {unit} has no usual gain, got None: give the "
                    "spikes per second that one unit of it should drive"
                )
            options = replace(options, gain=DEFAULT_GAINS[unit])
        self.options, self.n_channels = options, n_channels
        self.n_neurons = n_channels * options.neurons_per_channel
        most = options.max_spikes_per_step
        step_s = 1.0 / options.step_rate_hz
        constants: Any = {name: self._per_neuron(name) for name in _PER_NEURON if name != "gain"}
        self.layer = LIFExodus(
            (self.n_neurons, self.n_neurons),
            **constants,
            dt=step_s,
            max_spikes_per_dt=math.inf if most is None else most,
            learnable=False,
            dtype=dtype,
        )
        # A steady input x makes a current of x beta / (1 - beta).
        beta = torch.exp(-step_s / checked("tau_syn", self._per_neuron("tau_syn"),
                                           ((self.n_neurons,),), above=0.0))  # fmt: skip
        gain = checked("gain", self._per_neuron("gain"), ((self.n_neurons,),))
        self._scale = (gain * step_s * (1.0 - beta) / beta).to(dtype)

    @property
    def memory_s(self) -> float:
        """Sum of the slowest membrane and synapse time constants in s."""
        slowest = (torch.as_tensor(self._per_neuron(name)).max() for name in ("tau_mem", "tau_syn"))
        return float(sum(slowest))

    def _per_neuron(self, name: str) -> float | list[float]:
        """Return an option as one number or one per neuron."""
        value = getattr(self.options, name)
        if not isinstance(value, tuple):
            return float(value)
        if len(value) == self.options.neurons_per_channel:
            return [*value] * self.n_channels
        if len(value) == self.n_neurons:
            return [*value]
        raise ParameterError(
            f"{name} must be one number, {self.options.neurons_per_channel} (one per neuron of a "
            f"channel) or {self.n_neurons} (one per neuron), got {len(value)}"
        )

    @property
    def channel_offsets(self) -> tuple[int, ...]:
        """First neuron of every channel, and the number of neurons."""
        return tuple(range(0, self.n_neurons + 1, self.options.neurons_per_channel))

    def constants(self) -> dict[str, Tensor]:
        """Return the constants that decide the events of given frames, by name."""
        most = torch.tensor(self.layer.max_spikes_per_dt, dtype=torch.float64)
        coefficients = self.layer.coefficients().detach()
        made = {"scale": self._scale, "coefficients": coefficients, "max_spikes": most}
        return {**self.layer.state_dict(), **made}

    def step(
        self, frames: NDArray[np.floating[Any]], state: Tensor | None = None
    ) -> tuple[NDArray[np.floating[Any]], Tensor]:
        """Return the spike counts (step, neuron) of frames (step, channel), and the next state.

        `state` is the state that the previous call returned; None at the start.
        """
        if frames.ndim != 2 or frames.shape[1] != self.n_channels:
            raise ShapeError(
                f"expected frames (step, {self.n_channels} channels), got {frames.shape}"
            )
        drive = torch.from_numpy(np.ascontiguousarray(frames)).to(self.layer.dtype)
        drive = drive.repeat_interleave(self.options.neurons_per_channel, 1) * self._scale
        counts, state = self.layer.stream(drive.unsqueeze(0), state)
        return counts[0].numpy(), state

    def encode(self, frames: NDArray[np.floating[Any]]) -> SpikeEvents:
        """Return the events of a whole signal from its frames (step, channel)."""
        return self.open_stream().push_frames(frames)

    def open_stream(self, source: ExtractStream | None = None) -> SpikeStream:
        """Start on a long signal; without a source its frames are pushed directly."""
        return SpikeStream(self, source)


#: Frames of all clips of a batch that are held at a time.
STRETCH_BYTES = 32 * 2**20


def join(parts: Sequence[Any]) -> Any:
    """Concatenate stretches of one stream: arrays of frames, or events.

    >>> join([np.zeros((2, 3)), np.ones((1, 3))]).shape
    (3, 3)
    """
    if isinstance(parts[0], SpikeEvents):
        return SpikeEvents.concatenate(parts)
    return np.concatenate(parts)


class SpikeFeatures:
    """A stream of spike events: frames of the driving stream, one a step, and the neurons."""

    def __init__(self, source: FusedFeatures, encoder: SpikeEncoder) -> None:
        self.source, self.encoder = source, encoder
        self.width = encoder.n_neurons
        self.hops = source.hops

    def n_frames(self, n_samples: int) -> int:
        """Return the number of whole steps in `n_samples` samples."""
        return self.source.n_frames(n_samples)

    def fresh(self, clips: int) -> tuple[Any, list[SpikeStream]]:
        """Return the states of `clips` signals before their first sample, neurons at rest."""
        return self.source.fresh(clips), [self.encoder.open_stream() for _ in range(clips)]

    def push(self, clips: Sequence[Samples], states: Any, start: int) -> list[SpikeEvents]:
        """Return the events of the steps that the next samples of each clip complete."""
        sources, neurons = states
        frames = self.source.push(clips, sources, start)
        return [each.push_frames(part) for each, part in zip(neurons, frames, strict=True)]

    def finish(self, states: Any, samples: Sequence[int]) -> list[SpikeEvents]:
        """Return the last events of each clip, which ended after its `samples` samples."""
        sources, neurons = states
        frames = self.source.finish(sources, samples)
        return [each.push_frames(part) for each, part in zip(neurons, frames, strict=True)]

    def extract(self, clips: Sequence[Samples]) -> list[SpikeEvents]:
        """Return the events of each clip, in stretches that bound the memory of the frames."""
        states, lengths = self.fresh(len(clips)), [len(clip) for clip in clips]
        longest = max(lengths, default=0)
        held_bytes = self.n_frames(longest) * self.source.width * self.source.itemsize * len(clips)
        size = max(1, longest // max(1, -(-held_bytes // STRETCH_BYTES)))
        # A clip that has ended gives an empty piece, which completes no frames.
        parts = [
            self.push([clip[at : at + size] for clip in clips], states, at)
            for at in range(0, longest, size)
        ]
        parts.append(self.finish(states, lengths))
        return [SpikeEvents.concatenate(of_clip) for of_clip in zip(*parts, strict=True)]
