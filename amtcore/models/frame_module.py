"""Base class of models that compute frames from a signal: loudness meters, cochleas, scores.

A model names its outputs and their grids, and computes them in torch or in a kernel of its own. A
job runs any of them through `features.frame_module_model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from amtcore.errors import NonFiniteError, ParameterError, check_known
from amtcore.stages.constants import FixedType
from amtcore.stages.stage import check_floating

#: Outputs by name: (..., frame, column).
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class FrameGrid:
    """The grid of an output's frames, and the meaning of its columns.

    Args:
        width: Columns of a frame.
        hop_length: Samples from one frame to the next; may be a fraction. None is one row a clip.
        window_length: Samples that the first frame needs, which may be a fraction; None is the hop,
            so that n samples give floor(n / hop) frames.
        min_samples: Least samples of a clip with frames.
        padded_to: Zeros fill a clip up to a multiple of this number of samples.
        fc_hz: Centre frequency of each channel, if there are any.
        columns: Name of each column, if columns are different quantities.
        unit: Unit of the values, if parameters decide it; "" takes the unit of the stream's kind.
        mfc_hz: Modulation centre frequency of each column, if there are any.
        channel_offsets: (channel + 1), cuts the columns into channels; empty is a column a channel.
        least: Least value that a job stores: it replaces lower values, minus infinity and NaN,
            which outputs of silence may be. None replaces nothing, and a job quarantines such rows.

    >>> FrameGrid(40, 160, window_length=400).n_frames(720)
    3
    >>> FrameGrid(1, None).n_frames(720)
    1
    """

    width: int
    hop_length: int | Fraction | None
    window_length: int | Fraction | None = None
    min_samples: int = 0
    fc_hz: tuple[float, ...] = ()
    columns: tuple[str, ...] = ()
    unit: str = ""
    mfc_hz: tuple[float, ...] = ()
    channel_offsets: tuple[int, ...] = ()
    least: float | None = None
    padded_to: int = 1

    def __post_init__(self) -> None:
        if self.width < 1 or (self.hop_length is not None and self.hop_length <= 0):
            raise ParameterError(
                f"expected frames of 1 column or more, a hop above 0 samples apart, got width "
                f"{self.width} and hop {self.hop_length}"
            )

    def n_frames(self, n_samples: int) -> int:
        """Return the number of frames in `n_samples` samples."""
        if self.hop_length is None:
            return int(n_samples >= max(self.min_samples, 1))
        n_samples += -n_samples % self.padded_to
        window = self.hop_length if self.window_length is None else self.window_length
        if n_samples < max(window, self.min_samples):
            return 0
        return int((n_samples - window) // self.hop_length) + 1


def finite_signal(signal: Any, dtype: torch.dtype) -> Tensor:
    """Return a signal (.., time) in the working type.

    Raises:
        ShapeError: The signal is no tensor of float32 or float64, or has no axis.
        NonFiniteError: A sample is NaN or infinity, or too large for `dtype`.
    """
    check_floating(signal, "(.., time)", 1)
    x = signal.to(dtype)
    if x.numel() and not bool(torch.stack(x.detach().aminmax()).isfinite().all()):
        raise NonFiniteError(f"expected samples that are finite in {dtype}, got NaN or infinity")
    return x


class FrameModule(FixedType):
    """A model that turns a signal (..., time) into frames of several outputs.

    Attributes:
        fs: Sampling rate in Hz.
        dtype: Working type, torch.float32 or torch.float64.
        input_unit: Unit of the samples, see `units.Calibration`.
        input_channels: Numbers of signals, such as ears, that a clip may have; 1 is (time,), more
            are an axis before time.
        grids: Grid of each output by name. An output of one row a clip has one frame.
        can_stream: True if `stream` works.
        whole_clips_reason: The reason if `stream` does not work.
        memory_s: See `features.Extractor`; None if a long recording must go in order.
    """

    input_unit = "pa"
    input_channels: tuple[int, ...] = (1,)
    can_stream = True
    whole_clips_reason = ""
    memory_s: float | None = None
    fs: float
    grids: Mapping[str, FrameGrid]

    def wanted(self, names: tuple[str, ...] | None) -> tuple[str, ...]:
        """Return the outputs that a call names, or all for None; raise for an unknown name."""
        if names is None:
            return tuple(self.grids)
        check_known(f"{type(self).__name__} has no output", names, self.grids)
        return names

    def outputs(self, signal: Tensor, names: tuple[str, ...] | None = None) -> Outputs:
        """Return outputs of whole signals; a module that can stream takes them as one chunk.

        Args:
            signal: (..., time) in `input_unit`, or (..., ear, time) with several ears.
            names: Outputs that are wanted; None is all.
        Returns:
            By name, (..., frame, column), with `grids[name].n_frames(time)` frames.
        """
        return self.stream(signal, None, True, names)[0]

    def stream(
        self,
        chunk: Tensor,
        state: Any = None,
        last: bool = False,
        names: tuple[str, ...] | None = None,
    ) -> tuple[Outputs, Any]:
        """Return the frames that the next samples complete, and the state for the next call.

        Frames of all chunks, concatenated, equal the frames of the whole signal bit by bit.

        Args:
            chunk: Next samples (..., time), or (..., ear, time).
            state: State that the call before returned; None starts a signal.
            last: Whether the signal ends with this chunk.
            names: Outputs that are wanted, equal in all calls; None is all.
        Raises:
            ParameterError: The model needs whole signals.
        """
        raise ParameterError(
            f"{type(self).__name__} needs whole signals and cannot run chunk by chunk: "
            f"{self.whole_clips_reason}"
        )

    def forward(self, signal: Tensor) -> Outputs:
        """Return every output of whole signals, see `outputs`."""
        return self.outputs(signal)
