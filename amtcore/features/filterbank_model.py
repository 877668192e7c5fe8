"""The time-domain models as feature streams: filters, hair cells, adaptation, modulation, spikes.

The fused kernel pools frames, so that full-rate modulation output is never in memory; a stream that
needs whole clips has one band in memory. Stream descriptions come from the compiled chain. For
full-rate outputs or gradients call the model instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from amtcore.features.feature_model import (
    DEFAULT_FRAME_RATE_HZ,
    DEFAULT_POOL,
    ClipFeatures,
    Extractor,
    ExtractStream,
    Frames,
    ModuleModel,
    Params,
    StreamOptions,
    as_clip,
    check_options,
    module_constants,
)
from amtcore.features.pooled_streams import FrontEnd, FusedFeatures, WholeClipFeatures
from amtcore.features.spike_encoder import SpikeFeatures, build_spikes, join
from amtcore.features.stream_info import StreamInfo
from amtcore.kernels.backend import Backend
from amtcore.kernels.chain import compile_chain, identity_bank
from amtcore.models.time_domain import TimeDomainModel

Features = FusedFeatures | WholeClipFeatures | SpikeFeatures


class FilterbankModel(ModuleModel[TimeDomainModel]):
    """A time-domain model as a job runs it."""

    def build(
        self,
        fs_hz: float,
        params: Params,
        streams: Mapping[str, StreamOptions],
        dtype: str = "float32",
    ) -> FilterbankExtractor:
        """Build the extractor; stream options are `frame_rate_hz` (default 100) and `pool`
        (default mean), or for "spikes" the fields of `SpikeOptions`."""
        model = self.module(fs_hz, params, dtype)
        infos, features = [], {}
        for name, options in streams.items():
            info, features[name] = self._stream(model, name, options)
            infos.append(info)
        return FilterbankExtractor(self.name, model, infos, features, params)

    def _stream(
        self, model: TimeDomainModel, name: str, options: StreamOptions
    ) -> tuple[StreamInfo, Features]:
        kind = self.kind(name)
        features: Features
        if kind.layout == "events":
            features = build_spikes(self.streams, model, name, options, _features)
            spikes, offsets = features.encoder.options, features.encoder.channel_offsets
            rate, pool = spikes.step_rate_hz, spikes.pool
        else:
            rate, pool = _frame_options(name, options)
            features, offsets = _features(model, name, pool, rate)
        modulated = "modulation" in kind.axes[-1]
        info = StreamInfo(
            name=name,
            model=self.name,
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


class FilterbankExtractor(Extractor):
    """One warm time-domain model and its streams; nothing in it changes when it is used."""

    takes_several_callers = True

    def __init__(
        self,
        name: str,
        model: TimeDomainModel,
        streams: Sequence[StreamInfo],
        features: Mapping[str, Features],
        params: Params,
    ) -> None:
        super().__init__(
            name,
            fs_hz=model.fs,
            input_unit=model.input_unit,
            streams=streams,
            params=params,
            dtype=model.fc.detach().numpy().dtype,
            can_stream=not any(isinstance(f, WholeClipFeatures) for f in features.values()),
            memory_s=_memory_s(model, features.values()),
            hops=[hop for each in features.values() for hop in each.hops],
        )
        self.streaming_advice = model.streaming_advice
        self._module, self._features, self._front_end = model, features, model.front_end()

    def place(self, backend: Backend) -> None:
        """Compute with this backend from now on, but neurons on the CPU."""
        self.backend = backend
        self._module.to(backend.device)
        for each in self._features.values():
            (each.source if isinstance(each, SpikeFeatures) else each).place(backend)

    def n_frames(self, n_samples: int) -> dict[str, int]:
        return {name: each.n_frames(n_samples) for name, each in self._features.items()}

    def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
        ear = FrontEnd(self._front_end, self.backend)
        with self.backend.stream():
            signals = [ear.whole(as_clip(clip, self.dtype)) for clip in clips]
            if len(self._features) > 1:
                signals = self.backend.share(signals)
            frames: dict[str, Sequence[Any]] = {
                name: each.extract(signals) for name, each in self._features.items()
            }
        return [{name: of_clips[i] for name, of_clips in frames.items()} for i in range(len(clips))]

    def open_stream(self) -> FilterbankStream:
        front_end = FrontEnd(self._front_end, self.backend)
        return FilterbankStream(self._features, front_end, self.dtype, self.backend)

    def constants(self) -> list[tuple[str, Tensor]]:
        found = module_constants(self._module)
        for stream, features in self._spikes().items():
            constants = features.encoder.constants()
            found += sorted((f"{stream}.{k}", v) for k, v in constants.items())
        return found

    def describe_stream(self, info: StreamInfo) -> dict[str, Any]:
        spikes = self._spikes().get(info.name)
        neurons = {} if spikes is None else {"options": spikes.encoder.options.to_dict()}
        return info.to_dict() | neurons

    def _spikes(self) -> dict[str, SpikeFeatures]:
        return {k: each for k, each in self._features.items() if isinstance(each, SpikeFeatures)}


class FilterbankStream(ExtractStream):
    """Features of one long signal, chunk by chunk, in memory that does not grow."""

    def __init__(
        self,
        features: Mapping[str, Features],
        front_end: FrontEnd,
        dtype: np.dtype[Any],
        backend: Backend,
    ) -> None:
        self._front_end, self._dtype, self._backend = front_end, dtype, backend
        self._streams = {name: each.open() for name, each in features.items()}

    def push(self, chunk: Frames) -> ClipFeatures:
        with self._backend.stream():
            samples = self._front_end.push(as_clip(chunk, self._dtype))
            return {name: stream.push(samples) for name, stream in self._streams.items()}

    def finish(self) -> ClipFeatures:
        with self._backend.stream():
            tail = self._front_end.push(np.zeros(0, self._dtype), last=True)
            return {
                name: join((stream.push(tail), stream.finish()))
                for name, stream in self._streams.items()
            }


def _memory_s(model: TimeDomainModel, features: Collection[Features]) -> float | None:
    """Return the time constant of the slowest stream; neurons add theirs to the model's."""
    if model.memory_s is None or any(isinstance(each, WholeClipFeatures) for each in features):
        return None
    neurons = [each.encoder.memory_s for each in features if isinstance(each, SpikeFeatures)]
    return model.memory_s + max(neurons, default=0.0)


def _frame_options(name: str, options: StreamOptions) -> tuple[Any, Any]:
    """Return frame rate and pooling of a stream of frames, which `compile_chain` checks."""
    check_options(name, options, ("frame_rate_hz", "pool"))
    return options.get("frame_rate_hz", DEFAULT_FRAME_RATE_HZ), options.get("pool", DEFAULT_POOL)


def _features(
    model: TimeDomainModel, name: str, pool: str, rate: float
) -> tuple[FusedFeatures | WholeClipFeatures, tuple[int, ...]]:
    """Return the features of a stream, and the offsets of its channels."""
    ops, bank = model.chain(name)
    whole = model.whole_bands(name)
    if whole is None:
        return FusedFeatures(compile_chain(ops, bank, pool, model.fs, rate)), bank.offsets
    channels, count = model.num_channels, whole.count
    pooling = compile_chain([], identity_bank(channels, model.fc), pool, whole.fs_hz, rate)
    features = WholeClipFeatures(ops, whole.bands, count, pooling, whole.rates)
    return features, tuple(range(0, channels * count + 1, count))
