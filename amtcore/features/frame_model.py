"""The short way to a model of one's own: whole clips in, frames of fixed width out.

    @dataclass(frozen=True)
    class LevelParams:
        '''Args:
            hop_s: Seconds between frames.
        '''
        hop_s: float = 0.01

    class Level(FrameModel[LevelParams]):
        name, summary, default_fs_hz = "level", "Level of each stretch", 16000.0
        streams = {"level": StreamKind("dB", ("time", "channel"), "level of a stretch")}
        params_class = LevelParams

        def design(self, fs_hz, params):
            hop = round(params.hop_s * fs_hz)
            return FrameDesign({"level": FrameGrid(1, hop)}, lambda signal: ...)

Register it by an entry point of the group `amtcore.models` and test it with
`ModelConformance`.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import ParameterError, ShapeError
from amtcore.features.feature_model import (
    ClipFeatures,
    Extractor,
    ExtractStream,
    FeatureModel,
    Frames,
    OptionsByStream,
    Params,
    as_clip,
    check_options,
)
from amtcore.features.parameters import Parameter, built, checked_params, parameters_of
from amtcore.features.stream_info import PER_CLIP, PER_CLIP_RATE_HZ, StreamInfo, StreamKind
from amtcore.kernels.backend import Backend
from amtcore.kernels.vector.threads import parallel_map
from amtcore.models.frame_module import FrameGrid as FrameGrid

#: `StreamInfo.pool` of frames that a model makes itself.
OWN_FRAMES = "model"

Signal = NDArray[np.float32]
Compute = Callable[[Signal], Mapping[str, Frames]]
ComputeBatch = Callable[[Sequence[Signal]], Sequence[Mapping[str, Frames]]]


@dataclass(frozen=True)
class NoParams:
    """Parameters of a model that has none."""


def stream_info(
    grid: FrameGrid, name: str, model: str, kind: StreamKind, fs_hz: float
) -> StreamInfo:
    """Return the description of a stream whose frames lie on a grid."""
    hop = grid.hop_length
    rate_hz = PER_CLIP_RATE_HZ if hop is None else float(Fraction(fs_hz) / hop)
    more: dict[str, Any] = {"unit": grid.unit or kind.unit, "fc_hz": grid.fc_hz}
    more |= {"mfc_hz": grid.mfc_hz, "columns": grid.columns}
    if grid.channel_offsets:
        more["channel_offsets"] = grid.channel_offsets
    pool = OWN_FRAMES if hop is not None else PER_CLIP
    return kind.info(name, model, grid.width, rate_hz, pool, **more)


@dataclass(frozen=True)
class FrameDesign:
    """A model at one rate with its parameters.

    Args:
        grids: Grid of every stream, by name.
        compute: Computes the frames (frame, column) of every stream from a signal, float32 in the
            model's input unit; must not depend on earlier signals.
        constants: Arrays that decide the values, such as filters or weights: provenance hashes
            them beside the parameters.
        open_stream: Starts on a long signal, chunk by chunk, with the frames of `compute`. None for
            a model that needs whole clips.
        memory_s: See `Extractor`; 0 if a frame depends on its window alone. Frames may depend on up
            to a second that follows. None if long recordings must go in order.
        compute_batch: Computes the frames of several signals, in their order; None is `compute` of
            each signal. The values of a signal must not depend on the other signals.
        on_threads: Whether `compute` may run on several threads at once.
        place: Moves the model to another backend. Both functions then get tensors on its device,
            and still return arrays. None for a model that stays on the CPU.
        gpu_tolerance: See `Extractor`.
        reads_only: True if both functions leave their signals as they are; else they get copies.
    """

    grids: Mapping[str, FrameGrid]
    compute: Compute
    constants: Mapping[str, NDArray[Any] | Tensor] = field(default_factory=dict)
    open_stream: Callable[[], ExtractStream] | None = None
    memory_s: float | None = None
    compute_batch: ComputeBatch | None = None
    on_threads: bool = False
    place: Callable[[Backend], None] | None = None
    gpu_tolerance: float = Extractor.gpu_tolerance
    reads_only: bool = False


P = TypeVar("P")


class FrameModel(FeatureModel, Generic[P]):
    """A model of whole clips that gives frames of fixed width.

    Attributes:
        params_class: A frozen dataclass: its fields are the model's parameters, its docstring
            (`Args`) says what they mean; it may refuse values with a `ParameterError`.
    """

    params_class: type[P] = NoParams  # type: ignore[assignment]

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        return parameters_of(self.params_class)

    @abstractmethod
    def design(self, fs_hz: float, params: P) -> FrameDesign:
        """Return the model at a sampling rate, with an object of `params_class`."""

    def build(
        self, fs_hz: float, params: Params, streams: OptionsByStream, dtype: str = "float32"
    ) -> FrameExtractor:
        """Build the extractor; streams have no options, and the working type is float32."""
        asked = asked_params(self, self.params_class, params, dtype)
        for stream, options in streams.items():
            check_options(stream, options, ())
        all_params = {name: getattr(asked, name) for name in self.parameters}
        return FrameExtractor(self, fs_hz, self.design(fs_hz, asked), streams, params, all_params)


class FrameExtractor(Extractor):
    """A model of whole clips, one by one, in batches, or each on a thread."""

    def __init__(
        self,
        model: FeatureModel,
        fs_hz: float,
        design: FrameDesign,
        streams: Iterable[str],
        params: Params,
        all_params: Params,
    ) -> None:
        kinds = {name: model.kind(name) for name in streams}
        grids = design.grids
        hops = [grids[name].hop_length for name in kinds]
        super().__init__(
            model.name,
            fs_hz=fs_hz,
            input_unit=model.input_unit,
            streams=[
                stream_info(grids[k], k, model.name, kind, fs_hz) for k, kind in kinds.items()
            ],
            params=params,
            dtype=np.dtype(np.float32),
            can_stream=design.open_stream is not None,
            memory_s=None if None in hops else design.memory_s,
            hops=[Fraction(hop) for hop in hops if hop is not None],
        )
        self._design, self._all_params = design, all_params
        self.takes_several_callers = design.on_threads
        self.gpu_tolerance = design.gpu_tolerance

    def place(self, backend: Backend) -> None:
        """Compute with this backend from now on, or stay on the CPU if the design does."""
        if self._design.place is not None:
            self.backend = backend
            self._design.place(backend)

    def n_frames(self, n_samples: int) -> dict[str, int]:
        grids = self._design.grids
        return {info.name: grids[info.name].n_frames(n_samples) for info in self.streams}

    def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
        arrays = [as_clip(clip, self.dtype) for clip in clips]
        with self.backend.stream():
            if self.backend.name == "cpu":
                signals = [x.cpu().numpy() if isinstance(x, Tensor) else x for x in arrays]
                if not self._design.reads_only:
                    signals = [signal.copy() for signal in signals]
            else:
                signals = self.backend.share(arrays)
            # A model need not accept signals without frames.
            asked = [i for i, each in enumerate(signals) if any(self.n_frames(len(each)).values())]
            chosen = [signals[i] for i in asked]
            frames = dict(zip(asked, self._computed(chosen), strict=True))
        return [self._checked(len(each), frames.get(i, {})) for i, each in enumerate(signals)]

    def _computed(self, signals: Sequence[Signal]) -> Iterable[Mapping[str, Frames]]:
        if self._design.compute_batch is not None:
            return self._design.compute_batch(signals)
        if not self._design.on_threads:
            return map(self._design.compute, signals)
        return parallel_map(lambda i: self._design.compute(signals[i]), len(signals))

    def _checked(self, n_samples: int, found: Mapping[str, Frames]) -> ClipFeatures:
        wanted, made = self.n_frames(n_samples), ClipFeatures()
        for info in self.streams:
            shape = (wanted[info.name], info.width)
            frames = np.asarray(found[info.name]) if shape[0] else np.empty(shape)
            if frames.shape != shape:
                raise ShapeError(
                    f"model {self.model!r}, stream {info.name!r}: expected (frame, column) "
                    f"{shape} for {n_samples} samples, got {frames.shape}"
                )
            made[info.name] = np.ascontiguousarray(frames, np.float32)
        return made

    def open_stream(self) -> ExtractStream:
        if self._design.open_stream is None:
            raise ParameterError(
                f"model {self.model!r} needs whole clips and cannot run chunk by chunk"
            )
        return _AskedStreams(self._design.open_stream(), [info.name for info in self.streams])

    def constants(self) -> list[tuple[str, Tensor]]:
        return [
            (name, torch.as_tensor(value).detach().cpu())
            for name, value in sorted(self._design.constants.items())
        ]

    def settings(self) -> str:
        """Return rate, parameters and streams, which decide the values beside the constants."""
        streams = [info.to_dict() for info in self.streams]
        facts = [self.model, self.fs_hz, dict(self._all_params), streams]
        return json.dumps(facts, sort_keys=True, default=str)


class _AskedStreams(ExtractStream):
    """Streams of a model for a long signal, without streams that the job did not ask for."""

    def __init__(self, stream: ExtractStream, names: Sequence[str]) -> None:
        self._stream, self._names = stream, names

    def push(self, chunk: Frames) -> ClipFeatures:
        return self._asked(self._stream.push(as_clip(chunk, np.dtype(np.float32))))

    def finish(self) -> ClipFeatures:
        return self._asked(self._stream.finish())

    def _asked(self, made: ClipFeatures) -> ClipFeatures:
        return {name: np.ascontiguousarray(made[name], np.float32) for name in self._names}


def asked_params(model: FeatureModel, params_class: type[P], params: Params, dtype: str) -> P:
    """Return the parameters of a request; raise for a working type other than float32."""
    if dtype != "float32":
        raise ParameterError(f"model {model.name!r} works in float32 only, got dtype {dtype!r}")
    return built(params_class, model.name, checked_params(model.name, model.parameters, params))
