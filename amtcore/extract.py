"""From a model to feature streams: names, widths, rates, axes, and the numbers themselves.

An `Extractor` is one warm model with the streams a job asked for. Frames come out of the fused
kernel, already pooled; full-rate modulation output is never held (but for streams that need whole
clips: there one band is). Stream descriptions are read off the compiled chain itself. For full-rate
outputs or gradients call the model instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .errors import ParameterError, ShapeError
from .models.registry import MODELS, ModelEntry, get_model, nearest_hint
from .pooled import FrontEnd, FusedFeatures, WholeFeatures
from .recurrence.chain.program import compile_chain, identity_bank
from .recurrence.threads import get_num_threads, set_num_threads
from .spike_features import SpikeFeatures, build_spikes, join

Frames = NDArray[np.floating[Any]]
Features = FusedFeatures | WholeFeatures | SpikeFeatures
#: What a stretch of signal gives, by stream: frames (frame, column), or `spikes.SpikeEvents`.
Made = dict[str, Any]

DEFAULT_FRAME_RATE_HZ = 100.0
DEFAULT_POOL = "mean"
_DTYPES = {"float32": torch.float32, "float64": torch.float64}


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


@dataclass(frozen=True)
class ModelInfo:
    """What `list_models` tells of a model."""

    name: str
    summary: str
    input_unit: str
    default_fs_hz: float
    params: Mapping[str, Any]
    streams: Mapping[str, str]


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
        rest = self._front_end.push(np.zeros(0, self._dtype), last=True)
        return {
            name: join((stream.push(rest), stream.finish()))
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


def build_extractor(
    model: str,
    *,
    fs_hz: float | None = None,
    params: Mapping[str, Any] | None = None,
    streams: Mapping[str, Mapping[str, Any] | None] | None = None,
    threads: int | None = None,
    dtype: str = "float32",
    backend: str | None = None,
) -> Extractor:
    """Build a model with its streams; everything wrong with the request is raised here.

    Args:
        model: Registered name, see `list_models`.
        fs_hz: Sampling rate of the input; None takes the model's default.
        params: Constructor arguments of the model.
        streams: Stream name -> options `frame_rate_hz` (default 100) and `pool` (default mean), or
            for "spikes" those of `spikes.SpikeOptions`; None asks for the model's first stream.
        threads: Threads for the kernels of this process; None keeps the number.
        dtype: "float32" or "float64".
        backend: None or "cpu": the fused kernel has no other backend yet.
    """
    entry = get_model(model)
    if dtype not in _DTYPES:
        raise ParameterError(f"dtype must be float32 or float64, got {dtype!r}")
    if backend not in (None, "cpu"):
        raise ParameterError(f"extraction runs on backend 'cpu' only, got {backend!r}")
    if threads is not None:
        set_num_threads(threads)
    built = entry.build(
        entry.default_fs_hz if fs_hz is None else fs_hz, params or {}, _DTYPES[dtype]
    )
    if hasattr(built, "make_extractor"):  # a model whose features are no chain of recurrences
        return built.make_extractor(entry, streams, params or {})
    infos, features = [], {}
    for name, options in (streams or {next(iter(entry.streams)): {}}).items():
        info, features[name] = _build_stream(entry, built, name, dict(options or {}))
        infos.append(info)
    return Extractor(entry, built, tuple(infos), features, params or {})


def _build_stream(
    entry: ModelEntry, model: Any, name: str, options: dict[str, Any]
) -> tuple[StreamInfo, Features]:
    if name not in entry.streams:
        raise ParameterError(
            f"model {entry.name!r} has no stream {name!r}{nearest_hint(name, entry.streams)}"
        )
    kind = entry.streams[name]
    features: Features
    if kind.layout == "events":
        features = build_spikes(entry, model, name, options, _features)
        spikes, offsets = features.encoder.options, features.encoder.channel_offsets
        rate, pool = spikes.step_rate_hz, spikes.pool
    else:
        rate, pool = _frame_options(name, options)
        features, offsets = _features(model, name, pool, rate)
    modulated = "modulation" in kind.axes[-1]
    info = StreamInfo(
        name=name,
        model=entry.name,
        unit=kind.unit,
        width=features.width,
        frame_rate_hz=float(rate),
        pool=pool,
        axes=kind.axes,
        channel_offsets=offsets,
        fc_hz=tuple(model.fc.double().tolist()),
        mfc_hz=tuple(model.mfc_by_column().double().tolist()) if modulated else (),
        layout=kind.layout,
    )
    return info, features


def _frame_options(name: str, options: Mapping[str, Any]) -> tuple[float, str]:
    """Frame rate and pooling of a stream of frames."""
    known = ("frame_rate_hz", "pool")
    for extra in options:
        if extra not in known:
            raise ParameterError(
                f"stream {name!r} has no option {extra!r}{nearest_hint(extra, known)}"
            )
    return options.get("frame_rate_hz", DEFAULT_FRAME_RATE_HZ), options.get("pool", DEFAULT_POOL)


def _features(model: Any, name: str, pool: str, rate: float) -> tuple[Features, tuple[int, ...]]:
    """What makes a stream, and where its columns are cut into channels."""
    ops, bank = model.chain(name)
    whole = model.whole_bands(name)
    if whole is None:
        return FusedFeatures(compile_chain(ops, bank, pool, model.fs, rate)), bank.offsets
    channels, count = model.num_channels, whole.count
    pooling = compile_chain([], identity_bank(channels, model.fc), pool, whole.fs_hz, rate)
    features = WholeFeatures(ops, whole.bands, count, pooling, whole.rates)
    return features, tuple(range(0, channels * count + 1, count))


def list_models() -> list[ModelInfo]:
    """Every registered model with its parameters and streams."""
    return [
        ModelInfo(
            entry.name,
            entry.summary,
            entry.model.input_unit,
            entry.default_fs_hz,
            entry.parameters(),
            {name: kind.summary for name, kind in entry.streams.items()},
        )
        for entry in MODELS.values()
    ]
