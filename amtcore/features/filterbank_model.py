"""The time-domain models as feature streams: filters, hair cells, adaptation, modulation, spikes.

The fused kernel pools frames, so that full-rate modulation output is never in memory; a stream that
needs whole clips has one band in memory. Stream descriptions come from the compiled chain. For
full-rate outputs or gradients call the model instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from amtcore.errors import ParameterError, check_known
from amtcore.features.feature_model import (
    DEFAULT_FRAME_RATE_HZ,
    DEFAULT_POOL,
    ClipFeatures,
    Extractor,
    ExtractStream,
    Frames,
    ModuleModel,
    OptionsByStream,
    Params,
    StreamOptions,
    as_clip,
    check_options,
    module_constants,
)
from amtcore.features.pooled_streams import (
    FrontEnd,
    FusedFeatures,
    WholeClipFeatures,
    filtered,
)
from amtcore.features.spike_encoder import SpikeEncoder, SpikeFeatures, SpikeOptions, join
from amtcore.features.stream_info import StreamInfo
from amtcore.kernels.backend import Backend
from amtcore.kernels.chain import compile_chain, identity_bank
from amtcore.models.time_domain import TimeDomainModel

Features = FusedFeatures | WholeClipFeatures | SpikeFeatures


class FilterbankModel(ModuleModel[TimeDomainModel]):
    """A time-domain model as a job runs it."""

    def build(
        self, fs_hz: float, params: Params, streams: OptionsByStream, dtype: str = "float32"
    ) -> FilterbankExtractor:
        """Build the extractor; stream options are `frame_rate_hz` (default 100) and `pool`
        (default mean), or for "spikes" the fields of `SpikeOptions`."""
        model = self.module(fs_hz, params, dtype)
        made = [self._stream(model, name, options) for name, options in streams.items()]
        return FilterbankExtractor(self.name, model, made, params)

    def _stream(
        self, model: TimeDomainModel, name: str, options: StreamOptions
    ) -> tuple[StreamInfo, Features]:
        kind = self.kind(name)
        features: Features
        if kind.layout == "events":
            features = self._spikes(model, name, options)
            spikes, offsets = features.encoder.options, features.encoder.channel_offsets
            rate, pool = spikes.step_rate_hz, spikes.pool
        else:
            check_options(name, options, ("frame_rate_hz", "pool"))
            given: Mapping[str, Any] = options  # `compile_chain` checks the values
            rate = given.get("frame_rate_hz", DEFAULT_FRAME_RATE_HZ)
            pool = given.get("pool", DEFAULT_POOL)
            features, offsets = _features(model, name, pool, rate)
        modulated = "modulation" in kind.axes[-1]
        mfc_hz = tuple(model.mfc_by_column().double().tolist()) if modulated else ()
        centres = {"fc_hz": tuple(model.fc.double().tolist()), "mfc_hz": mfc_hz}
        info = kind.info(
            name, self.name, features.width, float(rate), pool, channel_offsets=offsets, **centres
        )
        return info, features

    def _spikes(self, model: TimeDomainModel, name: str, given: StreamOptions) -> SpikeFeatures:
        """Build a stream of spikes; an error names the stream and the option."""
        kind = self.streams[name]
        heard = [k for k, each in self.streams.items() if each != kind and each.axes == kind.axes]
        try:
            options = SpikeOptions.from_dict(given)
            wanted = "source must be a stream with a column a channel, got"
            check_known(wanted, [options.source], heard)
            source, _ = _features(model, options.source, options.pool, options.step_rate_hz)
            assert isinstance(source, FusedFeatures), "only modulation streams need whole clips"
            unit = self.streams[options.source].unit
            return SpikeFeatures(source, SpikeEncoder(options, source.width, unit, model.dtype))
        except ParameterError as error:
            raise ParameterError(f"stream {name!r}: {error}") from error


def _features(
    model: TimeDomainModel, name: str, pool: str, rate: float
) -> tuple[FusedFeatures | WholeClipFeatures, tuple[int, ...]]:
    """Return the features of a stream, and the offsets of its channels."""
    ops, bank = model.chain(name)
    whole = model.whole_bands(name)
    if whole is None:
        return FusedFeatures(compile_chain(ops, bank, pool, model.fs, rate)), bank.offsets
    channels = model.num_channels
    pooling = compile_chain([], identity_bank(channels, model.fc), pool, whole.fs_hz, rate)
    offsets = tuple(range(0, channels * whole.count + 1, whole.count))
    return WholeClipFeatures(ops, whole, pooling), offsets


class FilterbankExtractor(Extractor):
    """One warm time-domain model and its streams; nothing in it changes when it is used."""

    takes_several_callers = True

    def __init__(
        self,
        name: str,
        model: TimeDomainModel,
        streams: Sequence[tuple[StreamInfo, Features]],
        params: Params,
    ) -> None:
        self._features = {info.name: features for info, features in streams}
        self._spikes = {k: v for k, v in self._features.items() if isinstance(v, SpikeFeatures)}
        whole = any(isinstance(each, WholeClipFeatures) for _, each in streams)
        memory_s = None if whole else model.memory_s
        if memory_s is not None:  # neurons add the slowest of theirs
            memory_s += max((each.encoder.memory_s for each in self._spikes.values()), default=0.0)
        super().__init__(
            name,
            fs_hz=model.fs,
            input_unit=model.input_unit,
            streams=[info for info, _ in streams],
            params=params,
            dtype=model.fc.detach().numpy().dtype,
            can_stream=not whole,
            memory_s=memory_s,
            hops=[hop for _, each in streams for hop in each.hops],
        )
        self.streaming_advice = model.streaming_advice
        self._module, self._front_end = model, model.front_end()

    def place(self, backend: Backend) -> None:
        """Compute with this backend from now on, but neurons on the CPU."""
        self.backend = backend
        self._module.to(backend.device)
        for each in self._features.values():
            (each.source if isinstance(each, SpikeFeatures) else each).place(backend)

    def n_frames(self, n_samples: int) -> dict[str, int]:
        return {name: each.n_frames(n_samples) for name, each in self._features.items()}

    def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
        with self.backend.stream():
            signals = filtered(
                self._front_end, self.backend, [as_clip(clip, self.dtype) for clip in clips]
            )
            if len(self._features) > 1:
                signals = self.backend.share(signals)
            frames: dict[str, Sequence[Any]] = {
                name: each.extract(signals) for name, each in self._features.items()
            }
        return [{name: of_clips[i] for name, of_clips in frames.items()} for i in range(len(clips))]

    def open_stream(self) -> FilterbankStream:
        if not self.can_stream:
            raise ParameterError(
                "a stream needs whole clips and cannot run chunk by chunk; for King2019 that is "
                "phase_insens='hilbert' or subfs: use phase_insens='none' without subfs"
            )
        front_end = FrontEnd(self._front_end, self.backend)
        return FilterbankStream(self._features, front_end, self.dtype)

    def constants(self) -> list[tuple[str, Tensor]]:
        found = module_constants(self._module)
        for stream, features in self._spikes.items():
            constants = features.encoder.constants()
            found += sorted((f"{stream}.{k}", v) for k, v in constants.items())
        return found

    def describe_stream(self, info: StreamInfo) -> dict[str, Any]:
        spikes = self._spikes.get(info.name)
        neurons = {} if spikes is None else {"options": spikes.encoder.options.to_dict()}
        return info.to_dict() | neurons


class FilterbankStream(ExtractStream):
    """Features of one long signal, chunk by chunk, in memory that does not grow."""

    def __init__(
        self, features: Mapping[str, Any], front_end: FrontEnd, dtype: np.dtype[Any]
    ) -> None:
        self._front_end, self._dtype, self._samples = front_end, dtype, 0
        self._streams = {name: (each, each.fresh(1)) for name, each in features.items()}

    def push(self, chunk: Frames) -> ClipFeatures:
        with self._front_end.backend.stream():
            return self._push(self._front_end.push(as_clip(chunk, self._dtype)))

    def finish(self) -> ClipFeatures:
        with self._front_end.backend.stream():
            made = self._push(self._front_end.push(np.zeros(0, self._dtype), last=True))
            return {
                name: join((made[name], each.finish(states, [self._samples])[0]))
                for name, (each, states) in self._streams.items()
            }

    def _push(self, samples: Any) -> ClipFeatures:
        start = self._samples
        self._samples += len(samples)
        return {
            name: each.push([samples], states, start)[0]
            for name, (each, states) in self._streams.items()
        }
