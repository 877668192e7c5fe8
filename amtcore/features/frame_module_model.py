"""A `FrameModule` as a job runs it: every output of the module is a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from amtcore.errors import ParameterError, ShapeError, check_known
from amtcore.features.feature_model import (
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
from amtcore.features.frame_model import stream_info
from amtcore.features.stream_info import StreamInfo
from amtcore.kernels.vector.threads import parallel_map
from amtcore.models.frame_module import FrameModule, Outputs


class FrameModuleModel(ModuleModel[FrameModule]):
    """A model of frames; its streams are outputs of its module and have no options."""

    def build(
        self, fs_hz: float, params: Params, streams: OptionsByStream, dtype: str = "float32"
    ) -> FrameModuleExtractor:
        """Build the extractor; streams have no options."""
        kinds = {name: self.kind(name) for name in streams}
        for stream, options in streams.items():
            check_options(stream, options, ())
        module = self.module(fs_hz, params, dtype)
        check_known(f"model {self.name!r} has with these parameters no stream", kinds, module.grids)
        infos = [
            stream_info(module.grids[name], name, self.name, kind, fs_hz)
            for name, kind in kinds.items()
        ]
        defaults = {name: each.default for name, each in self.parameters.items()}
        settings = json.dumps({**defaults, **params, "dtype": dtype}, sort_keys=True, default=str)
        return FrameModuleExtractor(self.name, module, infos, params, settings)


class FrameModuleExtractor(Extractor):
    """One warm module of frames; nothing in it changes when it is used.

    It stays on the CPU: `docs/gpu.md` has the reason.
    """

    takes_several_callers = True

    def __init__(
        self,
        name: str,
        module: FrameModule,
        infos: Sequence[StreamInfo],
        params: Params,
        settings: str,
    ) -> None:
        self._grids = {info.name: module.grids[info.name] for info in infos}
        hops = [grid.hop_length for grid in self._grids.values()]
        super().__init__(
            name,
            fs_hz=module.fs,
            input_unit=module.input_unit,
            streams=infos,
            params=params,
            dtype=np.dtype(str(module.dtype).removeprefix("torch.")),
            can_stream=module.can_stream,
            input_channels=module.input_channels,
            memory_s=None if None in hops else module.memory_s,
            hops=[Fraction(hop) for hop in hops if hop is not None],
        )
        self._module, self._settings = module.eval(), settings

    def constants(self) -> list[tuple[str, Tensor]]:
        return module_constants(self._module)

    def settings(self) -> str:
        """Return all parameters, which decide the values beside the constants."""
        return self._settings

    def n_frames(self, n_samples: int) -> dict[str, int]:
        return {name: grid.n_frames(n_samples) for name, grid in self._grids.items()}

    def extract(self, clips: Sequence[Frames]) -> list[ClipFeatures]:
        signals = [self.samples(clip) for clip in clips]
        # A thread of the pool has one thread of torch, which fixes the order of sums.
        return parallel_map(lambda i: self._extract(signals[i]), len(signals))

    def _extract(self, signal: Tensor) -> ClipFeatures:
        wanted = self.n_frames(signal.shape[-1])
        names = tuple(name for name, frames in wanted.items() if frames)
        found: dict[str, Frames] = {}
        if names:
            with torch.no_grad():
                found = self._arrays(self._module.outputs(signal, names))
        made = ClipFeatures()
        for info in self.streams:
            shape = (wanted[info.name], info.width)
            frames = found.get(info.name, np.empty((0, info.width), self.dtype))
            if frames.shape != shape:
                raise ShapeError(
                    f"model {self.model!r}, stream {info.name!r}: expected (frame, column) "
                    f"{shape} for {signal.shape[-1]} samples, got {frames.shape}"
                )
            made[info.name] = frames
        return made

    def open_stream(self) -> ExtractStream:
        if not self.can_stream:
            raise ParameterError(
                f"model {self.model!r} needs whole clips and cannot run chunk by chunk: "
                f"{self._module.whole_clips_reason}"
            )
        return _FrameModuleStream(self)

    def stream_frames(self, samples: Tensor, state: Any, last: bool) -> tuple[ClipFeatures, Any]:
        """Return the frames that the next samples complete, and the state after them."""
        names = tuple(self._grids)

        def run(_: int = 0) -> tuple[ClipFeatures, Any]:
            with torch.no_grad():
                found, after = self._module.stream(samples, state, last, names)
                return ClipFeatures(self._arrays(found)), after

        # On a thread of the pool, as in `extract`.
        return parallel_map(run, 1)[0]

    def samples(self, clip: Frames) -> Tensor:
        """Return a finite signal (time,) or (ear, time) in host memory."""
        given: Any = clip if isinstance(clip, Tensor) else np.asarray(clip)
        floating = (
            given.is_floating_point() if isinstance(clip, Tensor) else given.dtype.kind == "f"
        )
        ears = 1 if given.ndim == 1 else given.shape[0]
        if not floating or given.ndim not in (1, 2) or ears not in self.input_channels:
            allowed = " or ".join(str(number) for number in self.input_channels)
            raise ShapeError(
                f"expected a floating-point signal (time,) or (channel, time) with {allowed} "
                f"channels, got {given.dtype} of shape {tuple(given.shape)}"
            )
        check_finite(given, self.dtype.name)
        if not isinstance(given, Tensor):
            given = torch.from_numpy(np.array(given, self.dtype))
        signal: Tensor = given.to("cpu", getattr(torch, self.dtype.name))
        return signal

    def _arrays(self, found: Outputs) -> dict[str, Frames]:
        made: dict[str, Frames] = {}
        for name, grid in self._grids.items():
            if name in found:
                array = found[name].detach().contiguous().numpy()
                made[name] = array.astype(self.dtype, copy=False)
                if grid.least is not None:
                    least = self.dtype.type(grid.least)
                    made[name] = np.where(array > least, made[name], least)
        return made


class _FrameModuleStream(ExtractStream):
    """Frames of one long signal, chunk by chunk."""

    def __init__(self, extractor: FrameModuleExtractor) -> None:
        self._extractor, self._state = extractor, None
        self._channels: tuple[int, ...] = ()

    def push(self, chunk: Frames) -> ClipFeatures:
        samples = self._extractor.samples(chunk)
        self._channels = tuple(samples.shape[:-1])
        made, self._state = self._extractor.stream_frames(samples, self._state, last=False)
        return made

    def finish(self) -> ClipFeatures:
        nothing = self._extractor.samples(np.zeros((*self._channels, 0), self._extractor.dtype))
        return self._extractor.stream_frames(nothing, self._state, last=True)[0]
