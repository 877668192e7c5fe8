"""Feature streams of the loudness models: traces, specific loudness, one row of numbers a clip.

The models compute a frame every hop; streams pool S model frames to a frame. A stream's frame f
covers model frames ceil(f S) up to ceil((f + 1) S). The model frame at the end of a signal is left
out, so that T samples give as many frames as in other models.
"""

from __future__ import annotations

from abc import abstractmethod
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
    OptionsByStream,
    Params,
    check_finite,
    check_options,
    module_constants,
)
from amtcore.features.loudness_batches import LoudnessBatches, Signal
from amtcore.features.loudness_pooling import (
    LONG,
    SHORT,
    SPECIFIC,
    SUMMARY,
    SUMMARY_COLUMNS,
    StreamPlan,
)
from amtcore.features.stream_info import PER_CLIP, PER_CLIP_RATE_HZ
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

    def __init__(self, model: LoudnessModel) -> None:
        self._model = model
        self._ears: int | None = None

    def push(self, chunk: Frames) -> ClipFeatures:
        ears = as_ears(chunk, self._model)
        if self._ears not in (None, len(ears)):
            raise ShapeError(f"expected {self._ears} ears as before, got {len(ears)}")
        self._ears, size = len(ears), round(_PIECE_S * self._model.fs)
        starts = range(0, max(ears.shape[-1], 1), size)
        return joined([self._take(ears[:, at : at + size], last=False) for at in starts])

    def finish(self) -> ClipFeatures:
        return self._take(np.zeros((self._ears or 1, 0), np.float32), last=True)

    @abstractmethod
    def _take(self, piece: Any, last: bool) -> ClipFeatures:
        """Return the frames that (ear, time) completes; with `last` the signal ends here."""


class LoudnessCpuStream(LoudnessStream):
    """Blocks of the signal go through the model one by one, on the threads of the kernels."""

    def __init__(self, model: LoudnessModel, plans: Sequence[StreamPlan]) -> None:
        super().__init__(model)
        self._poolers = [(plan, plan.pooler()) for plan in plans]
        self._state: LoudnessState | None = None

    def _take(self, piece: Any, last: bool) -> ClipFeatures:
        signal = get_backend("cpu").upload(piece).to(self._model.dtype)
        batch = signal if self._model.input_channels == (1,) else signal.unsqueeze(0)
        with torch.no_grad(), one_torch_thread():
            loudness, self._state = self._model.stream_loudness(batch, self._state, last)
        made: ClipFeatures = {}
        for plan, pooler in self._poolers:
            outputs = plan.source(loudness)[0].numpy()
            made[plan.info.name] = pooler.push(outputs[:-1] if last else outputs, last)
        return made


class LoudnessBatchStream(LoudnessStream):
    """Blocks of the signal go through the model in batches, on a GPU."""

    def __init__(self, model: LoudnessModel, batches: LoudnessBatches) -> None:
        super().__init__(model)
        self._batches, self._finishers = batches, batches.finishers()
        self._tail: Tensor | None = None
        self._samples = self._frames = 0  # so far
        self._carried: dict[str, Any] = {}

    def _take(self, piece: Any, last: bool) -> ClipFeatures:
        grid, backend = self._model.grid(), self._batches.backend
        with backend.stream():
            known = backend.upload(self._batches.as_input(piece))
            self._samples += known.shape[-1]
            if self._tail is not None:
                known = torch.cat((self._tail, known), -1)
            first = self._samples - known.shape[-1]
            end = self._samples // grid.hop if last else grid.complete(self._samples)
            part = Signal(known, first, self._samples, self._frames, end, not last, self._carried)
            keep = max(end * grid.hop - grid.reach, 0) - first
            self._tail, self._frames = known[:, keep:].clone(), end
            return self._batches.made([part], [self._finishers], last)[0]


class LoudnessExtractor(Extractor):
    """One warm loudness model and its streams; on the CPU not for several callers at once."""

    def __init__(
        self, name: str, model: LoudnessModel, plans: Sequence[StreamPlan], params: Params
    ) -> None:
        short_s, long_s = model.memories_s
        slowest_s = short_s + (long_s if LONG in [plan.info.name for plan in plans] else 0.0)
        of_whole_clips = any(plan.ratio is None for plan in plans)
        ratios = [ratio for plan in plans for ratio in (1, Fraction(*(plan.ratio or (1, 1))))]
        super().__init__(
            name,
            fs_hz=model.fs,
            input_unit=model.input_unit,
            streams=[plan.info for plan in plans],
            params=params,
            dtype=model.fc.numpy().dtype,
            can_stream=True,
            input_channels=model.input_channels,
            memory_s=None if of_whole_clips else slowest_s,
            hops=[model.hop_length * ratio for ratio in ratios],
        )
        self._module, self._plans = model, plans
        self._batches: LoudnessBatches | None = None

    def place(self, backend: Backend) -> None:
        """Compute with this backend from now on; a GPU takes many clips at once."""
        # The module is still on its old device; `to` waits for the copy.
        taps = self._module.ear.taps().detach().to(backend.device)
        self.backend, self._batches = backend, None
        self._module.to(backend.device)
        if backend.name != "cpu":
            self._batches = LoudnessBatches(self._module, self._plans, backend, taps)

    def constants(self) -> list[tuple[str, Tensor]]:
        return module_constants(self._module)

    def n_frames(self, n_samples: int) -> dict[str, int]:
        outputs = n_samples // self._module.hop_length
        return {plan.info.name: plan.n_frames(outputs) for plan in self._plans}

    def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
        if self._batches is not None:
            return self._batches.extract([as_ears(clip, self._module) for clip in clips])
        streams = ((clip, self.open_stream()) for clip in clips)
        return [joined([stream.push(clip), stream.finish()]) for clip, stream in streams]

    def open_stream(self) -> LoudnessStream:
        if self._batches is None:
            return LoudnessCpuStream(self._module, self._plans)
        return LoudnessBatchStream(self._module, self._batches)


def joined(parts: Sequence[ClipFeatures]) -> ClipFeatures:
    """Concatenate successive frames by stream."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def as_ears(clip: Any, model: LoudnessModel) -> Any:
    """Return a finite array or tensor (ear, time); raise for a shape the model does not take."""
    given: Any = clip.detach() if isinstance(clip, Tensor) else np.asarray(clip)
    kind = given.dtype
    floating = kind.is_floating_point if isinstance(given, Tensor) else kind.kind == "f"
    ears = given[None] if given.ndim == 1 else given
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
        self, fs_hz: float, params: Params, streams: OptionsByStream, dtype: str = "float32"
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
        plans = [self._plan(model, name, options, table) for name, options in streams.items()]
        return LoudnessExtractor(self.name, model, plans, params)

    def _plan(
        self, model: LoudnessModel, name: str, options: Mapping[str, Any], table: PhonTable | None
    ) -> StreamPlan:
        kind = self.kind(name)
        check_options(name, options, _OPTIONS[name])
        unit = options.get("unit", kind.unit)
        if unit not in (*UNITS, kind.unit):
            raise ParameterError(f"unit must be one of {', '.join(UNITS)}, got {unit!r}")
        asked_hz, pool = options.get("frame_rate_hz"), options.get("pool", DEFAULT_POOL)
        ratio: tuple[int, int] | None
        if name == SUMMARY:
            rate_hz, ratio, pool = PER_CLIP_RATE_HZ, None, PER_CLIP
        elif asked_hz is None and name != SPECIFIC:
            rate_hz, ratio = model.frame_rate_hz, (1, 1)
        else:
            rate_hz = DEFAULT_FRAME_RATE_HZ if asked_hz is None else asked_hz
            ratio = frame_ratio(model.fs, rate_hz, model.hop_length)
        if ratio is not None and pool not in POOLS:
            raise ParameterError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
        fc_hz = tuple(model.fc.double().tolist()) if name == SPECIFIC else ()
        columns = SUMMARY_COLUMNS if name == SUMMARY else ()
        width = max(len(fc_hz), len(columns), 1)
        more = {"unit": unit, "fc_hz": fc_hz, "columns": columns}
        info = kind.info(name, self.name, width, float(rate_hz), pool, **more)
        return StreamPlan(info, ratio, table if unit == "phon" else None)
