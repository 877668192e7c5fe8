"""Spike trains as a feature stream: the fused kernel's frames drive neurons, stretch by stretch.

    clip -> fused chain of the source stream, pooled to the neurons' steps -> neurons -> events

Frames of a stretch are dropped once the neurons have heard them, so that steps at the sampling rate
cost no more memory than those at 1000 Hz.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from amtcore.errors import ParameterError, nearest_hint
from amtcore.features.base import StreamKind, StreamOptions
from amtcore.features.filterbank import FusedFeatures, PooledStream
from amtcore.features.spike_encoder import SpikeEncoder, SpikeOptions
from amtcore.features.spike_events import SpikeEvents
from amtcore.kernels.backend import Samples
from amtcore.models.base import TimeDomainModel

#: Frames of all clips of a batch that are held at a time.
STRETCH_BYTES = 32 * 2**20


def join(parts: Sequence[Any]) -> Any:
    """Stretches of one stream in order as one: arrays of frames, or events.

    >>> join([np.zeros((2, 3)), np.ones((1, 3))]).shape
    (3, 3)
    """
    if isinstance(parts[0], SpikeEvents):
        return SpikeEvents.concatenate(parts)
    return np.concatenate(parts)


class SpikeFeatures:
    """A stream of spike events.

    Args:
        source: Frames of the driving stream, one a step.
        encoder: The neurons.
    """

    def __init__(self, source: FusedFeatures, encoder: SpikeEncoder) -> None:
        self.source, self.encoder = source, encoder
        self.width = encoder.n_neurons
        self.hops = source.hops

    def n_frames(self, n_samples: int) -> int:
        """Whole steps in so many samples."""
        return self.source.n_frames(n_samples)

    def extract(self, clips: Sequence[Samples]) -> list[SpikeEvents]:
        """Events of each clip; its neurons start at rest, whatever the others do."""
        states = self.source.chain.fresh(len(clips))
        neurons = [self.encoder.open_stream() for _ in clips]
        parts: list[list[SpikeEvents]] = [[] for _ in clips]
        longest = max((len(clip) for clip in clips), default=0)
        stretch = self._stretch_samples(longest, len(clips))
        for start in range(0, longest, stretch):
            # Of a clip that has ended there is nothing, which makes no frames.
            pieces = [clip[start : start + stretch] for clip in clips]
            for i, heard in enumerate(self.source.push(pieces, states, start)):
                if len(heard):
                    parts[i].append(neurons[i].push_frames(heard))
        for i, heard in enumerate(self.source.finish(states, [len(clip) for clip in clips])):
            parts[i].append(neurons[i].push_frames(heard))
        return [SpikeEvents.concatenate(of_clip) for of_clip in parts]

    def _stretch_samples(self, samples: int, clips: int) -> int:
        """Samples of each clip whose frames fit the bound."""
        row_bytes = self.source.width * self.source.itemsize
        held = self.n_frames(samples) * row_bytes * clips
        return max(1, samples // max(1, -(-held // STRETCH_BYTES)))

    def open(self) -> EventStream:
        """Start on a long signal."""
        return EventStream(self.source.open(), self.encoder)

    def constants(self) -> dict[str, Tensor]:
        """Every constant of the neurons, by name."""
        return self.encoder.constants()


class EventStream:
    """Events of one long signal, chunk by chunk."""

    def __init__(self, source: PooledStream, encoder: SpikeEncoder) -> None:
        self._source, self._neurons = source, encoder.open_stream()

    def push(self, samples: Samples) -> SpikeEvents:
        """Events of the steps that the next samples complete."""
        return self._neurons.push_frames(self._source.push(samples))

    def finish(self) -> SpikeEvents:
        """Events of steps that were waiting for what follows the last sample."""
        return self._neurons.push_frames(self._source.finish())


def build_spikes(
    streams: Mapping[str, StreamKind],
    model: TimeDomainModel,
    name: str,
    given: StreamOptions,
    features: Callable[[TimeDomainModel, str, str, float], tuple[Any, tuple[int, ...]]],
) -> SpikeFeatures:
    """The neurons of a stream and what they hear; an error names the stream and the option.

    Args:
        streams: All streams of the model.
        model: The model.
        name: Name of the stream.
        given: Its options, those of `SpikeOptions`.
        features: Makes frames of another stream from model, name, pooling and rate.
    """
    kind = streams[name]
    heard = [k for k, each in streams.items() if each != kind and each.axes == kind.axes]
    try:
        options = SpikeOptions.from_dict(given)
        if options.source not in heard:
            raise ParameterError(
                f"source must be a stream with a column a channel, got {options.source!r}"
                f"{nearest_hint(str(options.source), heard)}"
            )
        source, _ = features(model, options.source, options.pool, options.step_rate_hz)
        unit = streams[options.source].unit
        encoder = SpikeEncoder(options, source.width, unit, model.dtype)
    except ParameterError as error:
        raise ParameterError(f"stream {name!r}: {error}") from error
    return SpikeFeatures(source, encoder)
