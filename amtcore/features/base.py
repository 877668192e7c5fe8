"""What a feature stream is, and what every extractor does: clips or chunks in, frames out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from amtcore.errors import ShapeError
from amtcore.features.filterbank import FrontEnd, FusedFeatures, WholeFeatures
from amtcore.features.spike_stream import SpikeFeatures, join
from amtcore.kernels.vector.threads import get_num_threads
from amtcore.models.entry import ModelEntry

Frames = NDArray[np.floating[Any]]


Features = FusedFeatures | WholeFeatures | SpikeFeatures


#: What a stretch of signal gives, by stream: frames (frame, column), or `spikes.SpikeEvents`.
Made = dict[str, Any]


DEFAULT_FRAME_RATE_HZ = 100.0


DEFAULT_POOL = "mean"


@dataclass(frozen=True)
class StreamInfo:
    """One feature stream.

    Args:
        name: Name of the stream.
        model: Name of the model.
        unit: Unit of the values.
        width: Columns per frame.
        frame_rate_hz: Frames per second.
        pool: Statistic of a frame: mean, rms, max or subsample.
        axes: Names of the two axes.
        channel_offsets: (channel + 1), cuts the columns into channels of M_i columns.
        fc_hz: Centre frequency of each channel.
        mfc_hz: Modulation centre frequency of each column; empty where there is no modulation axis.
        columns: Name of each column, for streams whose columns are different quantities.
        layout: "frames", or "events": sparse, a column being a neuron and a frame one of its steps.
        scale_factor: What stored values are multiplied by to be in `unit`; models leave it at 1.
    """

    name: str
    model: str
    unit: str
    width: int
    frame_rate_hz: float
    pool: str
    axes: tuple[str, ...]
    channel_offsets: tuple[int, ...]
    fc_hz: tuple[float, ...]
    mfc_hz: tuple[float, ...]
    columns: tuple[str, ...] = ()
    layout: str = "frames"
    scale_factor: float = 1.0

    def __repr__(self) -> str:
        """One line; the numbers of each channel and column are in the attributes."""
        low_high = f" of {self.fc_hz[0]:.6g} to {self.fc_hz[-1]:.6g} Hz" if self.fc_hz else ""
        channels = len(self.channel_offsets) - 1
        rate = f" at {self.frame_rate_hz:g} Hz" if self.frame_rate_hz else " once a clip"
        return (
            f"<{self.model} {self.name}: {self.width} columns in {channels} channels{low_high}, "
            f"{self.layout}{rate} ({self.pool}), {self.unit}>"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; the last three only where they are not usual."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        if not self.columns:
            del plain["columns"]
        if self.layout == "frames":
            del plain["layout"]
        if self.scale_factor == 1.0:
            del plain["scale_factor"]
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> StreamInfo:
        """The inverse of `to_dict`."""
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**plain)


class ExtractStream:
    """Features of one long signal, chunk by chunk, in memory that does not grow.

    Invariants:
        The frames of all pushes and of `finish`, put together, are those of the whole signal.
    """

    def __init__(self, features: Mapping[str, Features], front_end: FrontEnd, dtype: Any) -> None:
        self._front_end, self._dtype = front_end, dtype
        self._streams = {name: each.open() for name, each in features.items()}

    def push(self, chunk: NDArray[np.floating[Any]]) -> Made:
        """Feed the next samples (1-D, input unit); returns the frames they complete."""
        samples = self._front_end.push(_as_clip(chunk, self._dtype))
        return {name: stream.push(samples) for name, stream in self._streams.items()}

    def finish(self) -> Made:
        """End the signal; returns the frames that were waiting for what follows its last sample.

        A model that looks ahead holds some back; others have none left.
        """
        tail = self._front_end.push(np.zeros(0, self._dtype), last=True)
        return {
            name: join((stream.push(tail), stream.finish()))
            for name, stream in self._streams.items()
        }


class Extractor:
    """One warm model and its streams; not for several callers at once.

    Build it with `build_extractor`.
    """

    #: How many signals, such as ears, a clip may have; one is a clip of (time,).
    input_channels: tuple[int, ...] = (1,)

    def __init__(
        self,
        entry: ModelEntry,
        model: Any,
        streams: tuple[StreamInfo, ...],
        features: Mapping[str, Features],
        params: Mapping[str, Any],
    ) -> None:
        self.fs_hz: float = model.fs
        self.input_unit: str = model.input_unit
        self.streams = streams
        self._entry, self._model, self._features = entry, model, features
        self._params, self._front_end = dict(params), model.front_end()
        self._dtype = model.fc.detach().numpy().dtype
        #: Whether `open_stream` works: no stream needs whole clips.
        self.can_stream = not any(isinstance(f, WholeFeatures) for f in features.values())

    def n_frames(self, n_samples: int) -> dict[str, int]:
        """Whole frames of each stream in so many samples."""
        return {name: each.n_frames(n_samples) for name, each in self._features.items()}

    def extract(self, clips: Sequence[NDArray[np.floating[Any]]]) -> list[Made]:
        """Features of several clips.

        Args:
            clips: 1-D signals in the model's input unit at `fs_hz`, of any lengths.
        Returns:
            Per clip, stream name -> (frames, width), or events of the whole clip. A clip's values
            do not depend on its neighbours.
        """
        ear = FrontEnd(self._front_end)
        signals = [ear.whole(_as_clip(clip, self._dtype)) for clip in clips]
        frames: dict[str, Sequence[Any]] = {
            name: each.extract(signals) for name, each in self._features.items()
        }
        return [{name: of_clips[i] for name, of_clips in frames.items()} for i in range(len(clips))]

    def open_stream(self) -> ExtractStream:
        """Start on a long signal; end it with `finish`. Raises where a stream needs whole clips."""
        return ExtractStream(self._features, FrontEnd(self._front_end), self._dtype)

    def buffers_sha256(self) -> str:
        """Hash of every constant of the model: two equal hashes compute the same features."""
        digest = hashlib.sha256()
        # Taps follow from constants and settings, but also from the transforms of a library.
        made = dict(self._model.named_buffers())
        taps = {key: made[key] for key in made if key.rpartition(".")[2] in ("taps", "phases")}
        constants = sorted({**self._model.state_dict(), **taps}.items())
        for stream, features in self._spikes().items():
            constants += sorted((f"{stream}.{k}", v) for k, v in features.constants().items())
        for name, tensor in constants:
            digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _spikes(self) -> dict[str, SpikeFeatures]:
        """The streams of events; a model of another family has none."""
        features = getattr(self, "_features", {})
        return {k: each for k, each in features.items() if isinstance(each, SpikeFeatures)}

    def describe(self) -> dict[str, Any]:
        """What provenance records of the model; streams of events with all their options."""
        neurons = {
            name: {"options": each.encoder.options.to_dict()}
            for name, each in self._spikes().items()
        }
        return {
            "model": self._entry.name,
            "fs_hz": self.fs_hz,
            "params": self._params,
            "input_unit": self.input_unit,
            "dtype": str(self._dtype),
            "backend": "cpu",
            "threads": get_num_threads(),
            "buffers_sha256": self.buffers_sha256(),
            "streams": [info.to_dict() | neurons.get(info.name, {}) for info in self.streams],
        }


def _as_clip(clip: NDArray[np.floating[Any]], dtype: np.dtype[Any]) -> Frames:
    array = np.asarray(clip)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.floating):
        raise ShapeError(
            f"expected a 1-D floating-point signal, got {array.dtype} of shape {array.shape}"
        )
    return np.ascontiguousarray(array, dtype)
