"""A decoder that does what a test says."""

from __future__ import annotations

import numpy as np

from earmill.pipeline.audio.channels import AudioBlock
from earmill.pipeline.audio.decoders import DecoderError

RATE_HZ = 8000


class Scripted:
    """A decoder that delivers what a test says, and may fail at any call.

    Args:
        frames: What it promises. there: What it delivers, silence but for `bad`.
        fails_at: The frame at which decoding breaks; bad: the frame that is no number.
        more: What follows the frames that it promises.
    """

    format, subtype, name, version = "WAV", "PCM_16", "scripted", "1"
    channels = 1

    def __init__(
        self,
        *,
        frames: int = 100,
        there: int = 100,
        samplerate: int = RATE_HZ,
        fails_at: int | None = None,
        bad: int | None = None,
        least_frames: int = 0,
        exact_seek: bool = False,
        more: str | None = None,
    ) -> None:
        self.frames, self.samplerate, self.least_frames = frames, samplerate, least_frames
        self.exact_seek, self.more = exact_seek, more
        self._samples = np.zeros((there, 1), np.float32)
        if bad is not None:
            self._samples[bad] = np.nan
        self._fails_at, self._position = fails_at, 0
        self.asked: list[int] = []
        self.sought: list[int] = []
        self.closed = False

    def seek(self, frame: int) -> int:
        self.sought.append(frame)
        if self._fails_at is not None and frame >= self._fails_at:
            raise DecoderError("lost sync")
        self._position = min(frame, len(self._samples))
        return self._position

    def read(self, frames: int) -> AudioBlock:
        self.asked.append(frames)
        if self._fails_at is not None and self._position + frames > self._fails_at:
            raise DecoderError("lost sync")
        block = self._samples[self._position : self._position + frames]
        self._position += len(block)
        return block

    def goes_on(self) -> str | None:
        return self.more

    def close(self) -> None:
        self.closed = True
