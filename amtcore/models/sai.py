"""Stabilised auditory image (Lyon 2017, chapter 21).

Each channel of a neural activity pattern is cut at triggers, so periodic sounds stand still. The
image has lags from the trigger in place of time. The trigger of a window is its largest value under
half a sine. Differences from the program google/carfac are in docs/science/sai.md.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amtcore.arguments import checked_arguments, whole
from amtcore.errors import ParameterError, ShapeError, StateError
from amtcore.models.carfac import CARFAC, CarfacState
from amtcore.models.frame_module import FrameGrid, FrameModule, Outputs
from amtcore.models.time_domain import Kwargs
from amtcore.stages.stage import check_floating

#: Default widths in s: image, lags after the trigger, trigger window, hop of frames.
WIDTHS_S = (0.02, 0.01, 0.04, 0.02)
#: Weight of a trigger with the peak p is (LEAST + p) / (HALF + p).
LEAST, HALF = 0.025, 0.5
#: Frames that are computed at once, which bounds memory.
BLOCK_FRAMES = 16


class SAIState(NamedTuple):
    """State between two chunks.

    Args:
        samples: (..., channel, time) of the pattern, and of the triggers if they are another: the
            window of the last frame, and samples after it.
        image: (..., channel, lag), the last frame.
    """

    samples: tuple[Tensor, ...]
    image: Tensor


class SAI(FrameModule):
    """Stabilised auditory image of a neural activity pattern, or of a sound through CARFAC.

    Args:
        fs: Sampling rate in Hz.
        sai_width: Lags of the image, in samples; None is 20 ms.
        future_lags: Lags after the trigger, in samples; None is 10 ms.
        trigger_window_width: Samples of a trigger window, more than the lags; None is 40 ms.
        input_segment_width: Samples from one frame to the next; None is 20 ms.
        num_triggers_per_frame: Trigger windows of a frame, half a window apart.
        carfac_kwargs: Passed to `CARFAC`, which makes the pattern of a sound; one ear.
        dtype: torch.float32 or torch.float64.

    Shape:
        `forward`: a pattern (..., channel, time) -> `sai` (..., frame, channel, lag). Column
        lag - 1 - future_lags is the trigger. Frame k is complete at sample
        (k + 1) * input_segment_width. `outputs` and `stream` take a sound (..., time) in the unit
        of `CARFAC`, and return `sai` (..., frame, channel * lag).

    Raises:
        ParameterError: Widths that do not fit each other.
        ShapeError: The pattern has no axis of channels.

    Invariants:
        Chunks of any length give the bits of the whole.

    The image depends on the pattern's scale through the weights of triggers. Gradients flow from
    `forward` to the pattern, with triggers where they are; CARFAC has none. Triggers from another
    pattern are not verified by reference data.

    >>> SAI(22050)(torch.zeros(3, 4410))["sai"].shape
    torch.Size([10, 3, 441])
    """

    input_unit = CARFAC.input_unit
    window: Tensor

    @checked_arguments(
        sai_width=whole(1, optional=True),
        future_lags=whole(0, optional=True),
        trigger_window_width=whole(2, optional=True),
        input_segment_width=whole(1, optional=True),
        num_triggers_per_frame=whole(1),
    )
    def __init__(
        self,
        fs: float = 22050.0,
        sai_width: int | None = None,
        future_lags: int | None = None,
        trigger_window_width: int | None = None,
        input_segment_width: int | None = None,
        num_triggers_per_frame: int = 4,
        carfac_kwargs: Kwargs = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        given = (sai_width, future_lags, trigger_window_width, input_segment_width)
        lags, future, width, hop = (
            math.floor(seconds * fs) if value is None else value
            for value, seconds in zip(given, WIDTHS_S, strict=True)
        )
        buffer = lags + int((1 + (num_triggers_per_frame - 1) / 2) * width)
        first = buffer - width - (num_triggers_per_frame - 1) * (width // 2) - future
        if not (0 < lags < width and 0 < hop < buffer and first >= 0):
            raise ParameterError(
                f"expected sai_width below trigger_window_width, input_segment_width below "
                f"{buffer}, future_lags at most {first + future}; got {lags}, {width}, {hop} and "
                f"{future}"
            )
        self.fs, self.dtype, self.sai_width, self.future_lags = fs, dtype, lags, future
        self.trigger_window_width, self.input_segment_width = width, hop
        self.num_triggers_per_frame, self._buffer, self._first = (
            num_triggers_per_frame,
            buffer,
            first,
        )
        self.carfac = CARFAC(fs, **{**(carfac_kwargs or {}), "dtype": dtype})
        if self.carfac.n_ears != 1:
            raise ParameterError("carfac_kwargs: expected one ear; run a model for each ear")
        phases = torch.arange(1, width + 1, dtype=torch.float64) / width
        self.register_buffer("window", torch.sin(math.pi * phases).to(dtype))
        fc_hz, channels = tuple(self.carfac.fc.tolist()), self.carfac.n_channels
        offsets = tuple(range(0, (channels + 1) * lags, lags))
        self.grids = {"sai": FrameGrid(channels * lags, hop, fc_hz=fc_hz, channel_offsets=offsets)}

    def images(
        self, nap: Tensor, state: SAIState | None = None, triggers: Tensor | None = None
    ) -> tuple[Tensor, SAIState]:
        """Return the frames that the next samples complete, and the state for the next call.

        Args:
            nap: Pattern (..., channel, time).
            state: State of the call before; None starts a signal.
            triggers: Pattern in which triggers are found, such as of the other ear; None is `nap`.
        Returns:
            Frames (..., frame, channel, lag), and the state.
        """
        given = [nap] if triggers is None else [nap, triggers]
        for each in given:
            check_floating(each, "(..., channel, time)")
        chunks = [each.to(self.dtype) for each in given]
        if nap.ndim < 2 or chunks[-1].shape != nap.shape:
            raise ShapeError(
                "expected a pattern (..., channel, time), and triggers of its shape, got "
                f"{tuple(nap.shape)} and {tuple(chunks[-1].shape)}"
            )
        if state is None:
            before = chunks[0].new_zeros(*nap.shape[:-1], self._buffer)
            image = before[..., : self.sai_width]
            state = SAIState((before,) * len(chunks), image)
        shapes = (state.image.shape[:-1], len(state.samples)), (nap.shape[:-1], len(chunks))
        if shapes[0] != shapes[1] or state.image.dtype != self.dtype:
            raise StateError(
                f"expected the state of the chunk before, of shape and patterns {shapes[1]}, got "
                f"{shapes[0]} in {state.image.dtype}"
            )
        known = [torch.cat(pair, -1) for pair in zip(state.samples, chunks, strict=True)]
        image, hop, made = state.image, self.input_segment_width, list[Tensor]()
        frames = (known[0].shape[-1] - self._buffer) // hop
        for begin in range(0, frames, BLOCK_FRAMES):
            count = min(BLOCK_FRAMES, frames - begin)
            ends = (begin + 1) * hop, (begin + count) * hop + self._buffer
            segments, weights, which = self._segments([x[..., slice(*ends)] for x in known], count)
            for windows in which:
                for i in windows:
                    image = image + weights[..., i, None] * (segments[..., i, :] - image)
                made.append(image)
        found = torch.stack(made, -3) if made else image.unsqueeze(-3)[..., :0, :, :]
        return found, SAIState(tuple(x[..., frames * hop :] for x in known), image)

    def _segments(self, block: list[Tensor], count: int) -> tuple[Tensor, Tensor, list[list[int]]]:
        """Return the segment (..., channel, window, lag) and the weight of each window's trigger.

        The third result has the windows of each frame, since neighbouring frames may share windows.
        `block` begins at the window of the first of `count` frames.
        """
        nap, triggers = block[0], block[-1]
        each = torch.arange(self.num_triggers_per_frame, device=nap.device)
        frames = torch.arange(count, device=nap.device) * self.input_segment_width
        starts = self._first + frames[:, None] + each * (self.trigger_window_width // 2)
        distinct, which = starts.unique(return_inverse=True)
        windows = triggers.unfold(-1, self.trigger_window_width, 1)[..., distinct, :]
        peak, place = (windows * self.window).max(-1)
        quiet_peak, quiet_place = self.window.max(0)
        quiet = peak <= 0
        peak, place = peak.where(~quiet, quiet_peak), place.where(~quiet, quiet_place)
        begins = distinct + place + self.future_lags - self.sai_width + 1
        rows = begins[..., None].expand(*begins.shape, self.sai_width)
        segments = nap.unfold(-1, self.sai_width, 1).gather(-2, rows)
        return segments, (LEAST + peak) / (HALF + peak), which.tolist()

    def forward(self, signal: Tensor) -> Outputs:
        """Return `sai` (..., frame, channel, lag) of a pattern (..., channel, time)."""
        return {"sai": self.images(signal)[0]}

    def stream(
        self,
        chunk: Tensor,
        state: tuple[CarfacState | None, SAIState | None] | None = None,
        last: bool = False,
        names: tuple[str, ...] | None = None,
    ) -> tuple[Outputs, Any]:
        """Return `sai` (..., frame, channel * lag) that the next samples of a sound complete."""
        names = self.wanted(names)
        ear, image = (None, None) if state is None else state
        made = list[Tensor]()
        for part in chunk.split(BLOCK_FRAMES * self.input_segment_width, -1):
            stages, ear = self.carfac.stages(part, ear, ("nap",))
            frames, image = self.images(stages["nap"], image)
            made.append(frames.flatten(-2))
        return {name: torch.cat(made, -2) for name in names}, (ear, image)

    def extra_repr(self) -> str:
        """Return the widths in samples."""
        return (
            f"fs={self.fs:g}, sai_width={self.sai_width}, future_lags={self.future_lags}, "
            f"trigger_window_width={self.trigger_window_width}, "
            f"input_segment_width={self.input_segment_width}, "
            f"num_triggers_per_frame={self.num_triggers_per_frame}"
        )
