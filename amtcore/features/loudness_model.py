"""Feature streams of the loudness models: traces, specific loudness, one row of numbers a clip.

The models compute a frame every hop; streams pool S model frames to a frame. A stream's frame f
covers model frames ceil(f S) up to ceil((f + 1) S). The model frame at the end of a signal is left
out, so that T samples give as many frames as in other models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.errors import ParameterError, ShapeError
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
    check_finite,
    check_options,
    module_constants,
)
from amtcore.features.loudness_batches import LoudnessBatches, Signal, SignalState
from amtcore.features.loudness_pooling import (
    LONG,
    PER_CLIP,
    PER_CLIP_RATE_HZ,
    SHORT,
    SPECIFIC,
    SUMMARY,
    SUMMARY_COLUMNS,
    ClipNumbers,
    Pooler,
    StreamPlan,
)
from amtcore.features.stream_info import StreamInfo
from amtcore.kernels.backend import Backend
from amtcore.kernels.chain import frame_ratio
from amtcore.kernels.devices import get_backend
from amtcore.kernels.pooling import POOLS
from amtcore.kernels.vector.threads import get_num_threads, one_torch_thread
from amtcore.models.loudness import LoudnessModel, LoudnessState
from amtcore.scales import PhonTable

UNITS = ("sone", "phon")
_OPTIONS = {
    SHORT: ("frame_rate_hz", "pool", "unit"),
    LONG: ("frame_rate_hz", "pool", "unit"),
    SPECIFIC: ("frame_rate_hz", "pool"),
    SUMMARY: ("unit",),
}
#: Seconds of a clip that a model processes at a time, to bound the memory.
_PIECE_S = 16.0


class LoudnessStream(ExtractStream):
    """Loudness of one long signal, chunk by chunk.

    Percentiles need every short-term value: 4 bytes a model frame, 14 MB an hour.
    """

    def __init__(self, model: LoudnessModel, plans: Sequence[StreamPlan]) -> None:
        self._model, self._plans = model, plans
        self._poolers = [
            ClipNumbers(plan) if plan.ratio is None else Pooler(plan, plan.ratio) for plan in plans
        ]
        self._state: LoudnessState | None = None

    def push(self, chunk: Frames) -> ClipFeatures:
        signal = get_backend("cpu").upload(as_ears(chunk, self._model)).to(self._model.dtype)
        pieces = signal.split(round(_PIECE_S * self._model.fs), -1)
        return joined([self._take(piece, last=False) for piece in pieces])

    def finish(self) -> ClipFeatures:
        ears = 1 if self._state is None else self._state.blocks.tail.shape[1]
        return self._take(torch.zeros(ears, 0, dtype=self._model.dtype), last=True)

    def _take(self, signal: Tensor, last: bool) -> ClipFeatures:
        batch = signal if self._model.input_channels == (1,) else signal.unsqueeze(0)
        with torch.no_grad(), one_torch_thread():
            loudness, self._state = self._model.stream_loudness(batch, self._state, last)
        made: ClipFeatures = {}
        for plan, pooler in zip(self._plans, self._poolers, strict=True):
            outputs = plan.source(loudness)[0].numpy()
            made[plan.info.name] = pooler.push(outputs[:-1] if last else outputs, last)
        return made


class LoudnessBatchStream(ExtractStream):
    """Loudness of one long signal on a GPU, chunk by chunk."""

    def __init__(self, waves: LoudnessBatches, model: LoudnessModel) -> None:
        self._waves, self._model, self._finishers = waves, model, waves.finishers()
        self._tail: Tensor | None = None
        self._samples = self._frames = 0  # so far
        self._carried = SignalState()

    def push(self, chunk: Frames) -> ClipFeatures:
        signal = self._waves.as_input(as_ears(chunk, self._model))
        size = round(_PIECE_S * self._model.fs)
        starts = range(0, max(signal.shape[-1], 1), size)
        return joined([self._take(signal[:, at : at + size], last=False) for at in starts])

    def finish(self) -> ClipFeatures:
        ears = 1 if self._tail is None else len(self._tail)
        return self._take(np.zeros((ears, 0), self._waves.dtype), last=True)

    def _take(self, piece: Any, last: bool) -> ClipFeatures:
        with self._waves.backend.stream():
            return self._take_next(self._waves.backend.upload(piece), last)

    def _take_next(self, piece: Tensor, last: bool) -> ClipFeatures:
        grid, known = self._model.grid(), piece
        if self._tail is not None:
            if len(self._tail) != len(piece):
                raise ShapeError(f"expected {len(self._tail)} ears as before, got {len(piece)}")
            known = torch.cat((self._tail, piece), -1)
        first = self._samples + piece.shape[-1] - known.shape[-1]
        self._samples += piece.shape[-1]
        end = self._samples // grid.hop if last else grid.complete(self._samples)
        part = Signal(known, first, self._samples, self._frames, end, not last, self._carried)
        keep = max(end * grid.hop - grid.reach, 0) - first
        self._tail, self._frames = known[:, keep:].clone(), end
        return self._waves.made([part], [self._finishers], last)[0]


class LoudnessExtractor(Extractor):
    """One warm loudness model and its streams; on the CPU not for several callers at once."""

    def __init__(
        self, name: str, model: LoudnessModel, plans: Sequence[StreamPlan], params: Params
    ) -> None:
        super().__init__(
            name,
            fs_hz=model.fs,
            input_unit=model.input_unit,
            streams=[plan.info for plan in plans],
            params=params,
            dtype=model.fc.numpy().dtype,
            can_stream=True,
            input_channels=model.input_channels,
            memory_s=_memory_s(model, plans),
            hops=[
                model.hop_length * ratio
                for plan in plans
                for ratio in (1, Fraction(*(plan.ratio or (1, 1))))
            ],
        )
        self._module, self._plans = model, plans
        self._waves: LoudnessBatches | None = None

    def place(self, backend: Backend) -> None:
        """Compute with this backend from now on; a GPU takes many clips at once."""
        # The module is still on its old device; `to` waits for the copy.
        taps = self._module.ear.taps().detach().to(backend.device)
        self.backend, self._waves = backend, None
        self._module.to(backend.device)
        if backend.name != "cpu":
            self._waves = LoudnessBatches(self._module, self._plans, backend, taps)

    def constants(self) -> list[tuple[str, Tensor]]:
        return module_constants(self._module)

    def n_frames(self, n_samples: int) -> dict[str, int]:
        outputs = n_samples // self._module.hop_length
        return {plan.info.name: plan.n_frames(outputs) for plan in self._plans}

    def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
        if self._waves is not None:
            return self._waves.extract([as_ears(clip, self._module) for clip in clips])
        made = []
        for clip in clips:
            stream = self.open_stream()
            made.append(joined([stream.push(clip), stream.finish()]))
        return made

    def open_stream(self) -> ExtractStream:
        if self._waves is None:
            return LoudnessStream(self._module, self._plans)
        return LoudnessBatchStream(self._waves, self._module)


def _memory_s(model: LoudnessModel, plans: Sequence[StreamPlan]) -> float | None:
    """Return the time constant of the slowest stream; None if a row depends on the whole clip."""
    if any(plan.ratio is None for plan in plans):
        return None
    short_s, long_s = model.memories_s
    return short_s + (long_s if LONG in [plan.info.name for plan in plans] else 0.0)


def joined(parts: Sequence[ClipFeatures]) -> ClipFeatures:
    """Concatenate successive frames by stream."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def as_ears(clip: Any, model: LoudnessModel) -> Any:
    """Return a finite array or tensor (ear, time); raise for a shape the model does not take."""
    given = clip.detach() if isinstance(clip, Tensor) else np.asarray(clip)
    ears = given[None] if given.ndim == 1 else given
    floating = (
        given.is_floating_point()
        if isinstance(given, Tensor)
        else np.issubdtype(given.dtype, np.floating)
    )
    if ears.ndim != 2 or ears.shape[0] not in model.input_channels or not floating:
        allowed = " or ".join(str(number) for number in model.input_channels)
        raise ShapeError(
            f"expected a floating-point signal (time,) or (ear, time) with {allowed} ears, got "
            f"{given.dtype} of shape {tuple(given.shape)}"
        )
    check_finite(ears, str(model.dtype).removeprefix("torch."))
    return ears


class LoudnessFeatureModel(ModuleModel[LoudnessModel]):
    """A loudness model as a job runs it."""

    default_streams = (SHORT, LONG)

    def build(
        self,
        fs_hz: float,
        params: Params,
        streams: Mapping[str, StreamOptions],
        dtype: str = "float32",
    ) -> LoudnessExtractor:
        """Build the extractor.

        Stream options are `frame_rate_hz` (default: model frames for traces, 100 for specific
        loudness), `pool` (default mean) and `unit` (sone or phon, not for specific loudness).
        """
        model = self.module(fs_hz, params, dtype)
        # Matrix products run on torch's own threads, the kernels on the pool: one number for both.
        torch.set_num_threads(get_num_threads())
        phon = any(options.get("unit") == "phon" for options in streams.values())
        table = model.phon_table() if phon else None
        plans = [_plan(self, model, name, options, table) for name, options in streams.items()]
        return LoudnessExtractor(self.name, model, plans, params)


def _plan(
    described: LoudnessFeatureModel,
    model: LoudnessModel,
    name: str,
    options: Mapping[str, Any],
    table: PhonTable | None,
) -> StreamPlan:
    kind = described.kind(name)
    check_options(name, options, _OPTIONS[name])
    unit = options.get("unit", kind.unit)
    if unit not in (*UNITS, kind.unit):
        raise ParameterError(f"unit must be one of {', '.join(UNITS)}, got {unit!r}")
    rate, ratio = _rate(model, name, options.get("frame_rate_hz"))
    pool = PER_CLIP if ratio is None else options.get("pool", DEFAULT_POOL)
    if ratio is not None and pool not in POOLS:
        raise ParameterError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
    width = {SPECIFIC: len(model.fc), SUMMARY: len(SUMMARY_COLUMNS)}.get(name, 1)
    info = StreamInfo(
        name=name,
        model=described.name,
        unit=unit,
        width=width,
        frame_rate_hz=rate,
        pool=pool,
        axes=kind.axes,
        channel_offsets=tuple(range(width + 1)),
        fc_hz=tuple(model.fc.double().tolist()) if name == SPECIFIC else (),
        mfc_hz=(),
        columns=SUMMARY_COLUMNS if name == SUMMARY else (),
    )
    return StreamPlan(info, ratio, table if unit == "phon" else None)


def _rate(
    model: LoudnessModel, name: str, asked_hz: float | None
) -> tuple[float, tuple[int, int] | None]:
    """Return frames per second of a stream, and model frames per frame."""
    if name == SUMMARY:
        return PER_CLIP_RATE_HZ, None
    if asked_hz is None and name != SPECIFIC:
        return model.frame_rate_hz, (1, 1)
    rate = DEFAULT_FRAME_RATE_HZ if asked_hz is None else asked_hz
    return float(rate), frame_ratio(model.fs, rate, model.hop_length)
