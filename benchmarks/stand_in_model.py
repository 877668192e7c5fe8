"""A model that computes nothing: a device of a given rate is asleep while it would compute.

`benchmarks.stand_in_device` registers the model in a folder of its own. The module imports only
names that release ca8dd45 has as well. The environment says the device's rate in seconds of audio
per second (`STAND_IN_RATE`); without a rate the model answers at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from amtcore.features.feature_model import Extractor, FeatureModel
from amtcore.features.stream_info import StreamInfo, StreamKind

NAME, STREAM = "stand_in", "noise"
FS_HZ, HOP, WIDTH = 44100, 441, 248  # The frames of Dau1997.
LONGEST_FRAMES = 2000
RATE_VARIABLE = "STAND_IN_RATE"


class StandInExtractor(Extractor):
    """Returns noise once the device has had time for the clips; launches queue at the device."""

    takes_several_callers = True

    def __init__(self) -> None:
        info = StreamInfo(
            name=STREAM,
            model=NAME,
            unit="1",
            width=WIDTH,
            frame_rate_hz=FS_HZ / HOP,
            pool="mean",
            axes=("time", "channel"),
            channel_offsets=tuple(range(WIDTH + 1)),
            fc_hz=(),
            mfc_hz=(),
        )
        super().__init__(
            NAME,
            fs_hz=FS_HZ,
            input_unit="rms1=100dB",
            streams=[info],
            params={},
            dtype=np.dtype(np.float32),
            can_stream=False,
        )
        draw = np.random.default_rng(0)
        self._noise = draw.standard_normal((LONGEST_FRAMES, WIDTH)).astype(np.float32)
        self._rate = float(os.environ.get(RATE_VARIABLE) or "inf")
        self._device, self._free_s = threading.Lock(), 0.0

    def place(self, backend: Any) -> None:
        """Take the backend of a GPU, so that a job makes launches."""
        self.backend = backend

    def n_frames(self, n_samples: int) -> dict[str, int]:
        """Return the number of frames."""
        return {STREAM: n_samples // HOP}

    def extract(self, clips: Sequence[Any]) -> list[Any]:
        """Return noise once the device is done."""
        took_s = sum(len(clip) for clip in clips) / FS_HZ / self._rate
        with self._device:
            self._free_s = max(self._free_s, time.monotonic()) + took_s
            done_s = self._free_s
        time.sleep(max(0.0, done_s - time.monotonic()))
        return [{STREAM: self._noise[: len(clip) // HOP]} for clip in clips]

    def open_stream(self) -> Any:
        """Raise, because clips are whole."""
        raise NotImplementedError

    def constants(self) -> Iterable[tuple[str, Any]]:
        """Return no constants."""
        return ()


class StandIn(FeatureModel):
    """The model as a job finds it."""

    name, summary, default_fs_hz = NAME, "noise, after a sleep", float(FS_HZ)
    streams = MappingProxyType({STREAM: StreamKind("1", ("time", "channel"), "noise")})
    parameters: Mapping[str, Any] = MappingProxyType({})

    def build(self, fs_hz: float, params: Any, streams: Any, dtype: str = "float32") -> Extractor:
        """Return the extractor."""
        return StandInExtractor()
