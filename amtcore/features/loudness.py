"""Feature streams of the loudness models: traces, specific loudness, one row of numbers a clip.

The models make a frame every hop; streams pool these frames further. A stream's frame f covers
model frames ceil(f S) up to ceil((f + 1) S), S of them a frame, and the model frame that is centred
on the end of a signal belongs to none: T samples give as many frames as in other models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from amtcore.errors import ParameterError, ShapeError
from amtcore.features.base import (
    DEFAULT_FRAME_RATE_HZ,
    DEFAULT_POOL,
    Extractor,
    ExtractStream,
    Frames,
    Made,
    Params,
    StreamInfo,
    StreamOptions,
    module_constants,
)
from amtcore.features.feature_model import check_options
from amtcore.features.module_model import ModuleModel
from amtcore.kernels.backends.chosen import get_backend
from amtcore.kernels.fused.cpu import POOLS
from amtcore.kernels.fused.program import frame_ratio
from amtcore.kernels.vector.threads import get_num_threads
from amtcore.models.loudness import Loudness, LoudnessModel, LoudnessState
from amtcore.scales.phon import PhonTable

SHORT, LONG = "short_term_loudness", "long_term_loudness"
SPECIFIC, SUMMARY = "specific_loudness", "loudness_summary"
UNITS = ("sone", "phon")
#: Numbers of a clip: maxima, and the short-term loudness exceeded in so many per cent of the time.
SUMMARY_COLUMNS = ("stl_max", "ltl_max", "n5", "n10", "n50")
EXCEEDED_PERCENT = (5.0, 10.0, 50.0)
#: `StreamInfo.pool` and `frame_rate_hz` of a stream of one row a clip.
PER_CLIP, PER_CLIP_RATE_HZ = "clip", 0.0
_OPTIONS = {
    SHORT: ("frame_rate_hz", "pool", "unit"),
    LONG: ("frame_rate_hz", "pool", "unit"),
    SPECIFIC: ("frame_rate_hz", "pool"),
    SUMMARY: ("unit",),
}
#: What a model is given at a time: bounds the memory of a long clip.
_PIECE_S = 16.0
_STATISTICS: dict[str, Callable[[Frames], Frames]] = {
    "mean": lambda part: part.mean(0),
    "rms": lambda part: np.sqrt(np.square(part).mean(0)),
    "max": lambda part: part.max(0),
    "subsample": lambda part: part[0],
}


@dataclass(frozen=True)
class _Plan:
    """How one stream is made.

    Args:
        info: What it is.
        ratio: Model frames per frame as an exact fraction; None is one row a clip.
        phon: Table that turns sone into phon; None leaves sone.
    """

    info: StreamInfo
    ratio: tuple[int, int] | None
    phon: PhonTable | None

    def n_frames(self, outputs: int) -> int:
        """Whole frames of so many model frames."""
        if self.ratio is None:
            return min(outputs, 1)
        return outputs * self.ratio[1] // self.ratio[0]

    def source(self, loudness: Loudness) -> Frames:
        """(frame, column) of one clip as the model has it; for numbers of a clip both traces."""
        if self.info.name == SPECIFIC:
            return loudness.specific[0].numpy()
        if self.info.name == SUMMARY:
            return torch.stack((loudness.short[0], loudness.long[0]), -1).numpy()
        trace = loudness.short if self.info.name == SHORT else loudness.long
        return trace[0].unsqueeze(-1).numpy()

    def finished(self, frames: Frames) -> Frames:
        """Frames in the stream's unit."""
        if self.phon is None:
            return frames
        return self.phon.phon(torch.from_numpy(np.ascontiguousarray(frames))).numpy()


class _Pooler:
    """Model frames of one clip, in order, to the frames of one stream."""

    def __init__(self, plan: _Plan, ratio: tuple[int, int]) -> None:
        self._plan, self._ratio = plan, ratio
        self._waiting: list[Frames] = []
        self._first = self._made = 0  # model frame at the head of the waiting, frames made

    def push(self, outputs: Frames, last: bool) -> Frames:
        """Frames that these model frames complete; the last ones complete no more than others."""
        samples, frames = self._ratio
        if samples == frames:
            return self._plan.finished(outputs)
        rows = np.concatenate([*self._waiting, outputs])
        statistic = _STATISTICS[self._plan.info.pool]
        end, pooled = self._first + len(rows), []
        while (edge := -(-(self._made + 1) * samples // frames)) <= end:
            begin = -(-self._made * samples // frames)
            pooled.append(statistic(rows[begin - self._first : edge - self._first]))
            self._made += 1
        keep = -(-self._made * samples // frames) - self._first
        self._waiting, self._first = [rows[keep:]], self._first + keep
        empty = np.empty((0, rows.shape[1]), rows.dtype)
        return self._plan.finished(np.stack(pooled).astype(rows.dtype) if pooled else empty)


class _ClipNumbers:
    """Both traces of one clip, in order, to its one row of numbers."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self._short = bytearray()  # one piece of memory that grows: many small ones scatter
        self._long_max = 0.0

    def push(self, outputs: Frames, last: bool) -> Frames:
        """Nothing until the last model frames have come."""
        self._short += outputs[:, 0].tobytes()
        self._long_max = float(np.maximum(self._long_max, outputs[:, 1].max(initial=0.0)))
        if not (last and self._short):
            return np.empty((0, self._plan.info.width), outputs.dtype)
        short = np.frombuffer(self._short, outputs.dtype)
        exceeded = np.quantile(short, [1.0 - percent / 100.0 for percent in EXCEEDED_PERCENT])
        row = np.array([[short.max(), self._long_max, *exceeded]], outputs.dtype)
        return self._plan.finished(row)


class LoudnessStream(ExtractStream):
    """Loudness of one long signal, chunk by chunk.

    Percentiles need every short-term value: 4 bytes a model frame, 14 MB an hour. All else takes
    memory that does not grow.

    Invariants:
        The frames of all pushes and of `finish`, put together, are those of the whole signal.
    """

    def __init__(self, model: LoudnessModel, plans: Sequence[_Plan]) -> None:
        self._model, self._plans = model, plans
        self._poolers = [
            _ClipNumbers(plan) if plan.ratio is None else _Pooler(plan, plan.ratio)
            for plan in plans
        ]
        self._state: LoudnessState | None = None

    def push(self, chunk: Frames) -> Made:
        """Feed the next samples in Pa, (time,) or (ear, time); returns the frames they complete."""
        pieces = as_ears(chunk, self._model).split(round(_PIECE_S * self._model.fs), -1)
        return joined([self._take(piece, last=False) for piece in pieces])

    def finish(self) -> Made:
        """The frames that were waiting for what follows the last sample."""
        ears = 1 if self._state is None else self._state.blocks.tail.shape[1]
        return self._take(torch.zeros(ears, 0, dtype=self._model.dtype), last=True)

    def _take(self, signal: torch.Tensor, last: bool) -> Made:
        batch = signal if self._model.input_channels == (1,) else signal.unsqueeze(0)
        with torch.no_grad():
            loudness, self._state = self._model.stream_loudness(batch, self._state, last)
        made: Made = {}
        for plan, pooler in zip(self._plans, self._poolers, strict=True):
            outputs = plan.source(loudness)
            made[plan.info.name] = pooler.push(outputs[:-1] if last else outputs, last)
        return made


class LoudnessExtractor(Extractor):
    """One warm loudness model and its streams; not for several callers at once.

    Build it with `build.build_extractor`.
    """

    def __init__(
        self, name: str, model: LoudnessModel, plans: Sequence[_Plan], params: Params
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
        )
        self._module, self._plans = model, plans

    def constants(self) -> list[tuple[str, torch.Tensor]]:
        """Those of the model."""
        return module_constants(self._module)

    def n_frames(self, n_samples: int) -> dict[str, int]:
        """Whole frames of each stream in so many samples."""
        outputs = n_samples // self._module.hop_length
        return {plan.info.name: plan.n_frames(outputs) for plan in self._plans}

    def extract(self, clips: Sequence[Frames]) -> list[Made]:
        """Features of several clips.

        Args:
            clips: Signals in Pa at `fs_hz`, (time,) or, with two ears, (2, time).
        Returns:
            Per clip, stream name -> (frames, width). Clips are processed one after another, so a
            clip's values do not depend on its neighbours.
        """
        return [self._extract_one(clip) for clip in clips]

    def _extract_one(self, clip: Frames) -> Made:
        stream = self.open_stream()
        return joined([stream.push(clip), stream.finish()])

    def open_stream(self) -> LoudnessStream:
        """Start on a long signal; end it with `finish`."""
        return LoudnessStream(self._module, self._plans)


def joined(parts: Sequence[Made]) -> Made:
    """Frames of stretches that follow one another, by stream."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def as_ears(clip: Frames, model: LoudnessModel) -> torch.Tensor:
    """(ear, time) in the model's type; raises for a shape the model does not take."""
    array = np.asarray(clip)
    ears = array[None] if array.ndim == 1 else array
    floating = np.issubdtype(array.dtype, np.floating)
    if ears.ndim != 2 or ears.shape[0] not in model.input_channels or not floating:
        allowed = " or ".join(str(number) for number in model.input_channels)
        raise ShapeError(
            f"expected a floating-point signal (time,) or (ear, time) with {allowed} ears, got "
            f"{array.dtype} of shape {array.shape}"
        )
    return get_backend("cpu").upload(ears).to(model.dtype)


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
        """As the base class says; stream options are `frame_rate_hz` (traces: default every model
        frame; specific loudness: 100), `pool` (default mean) and, but for specific loudness, `unit`
        (sone or phon)."""
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
) -> _Plan:
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
    return _Plan(info, ratio, table if unit == "phon" else None)


def _rate(
    model: LoudnessModel, name: str, asked_hz: float | None
) -> tuple[float, tuple[int, int] | None]:
    """Frames per second of a stream, and model frames per frame."""
    if name == SUMMARY:
        return PER_CLIP_RATE_HZ, None
    if asked_hz is None and name != SPECIFIC:
        return model.frame_rate_hz, (1, 1)
    rate = DEFAULT_FRAME_RATE_HZ if asked_hz is None else asked_hz
    return float(rate), frame_ratio(model.fs, rate, model.hop_length)
