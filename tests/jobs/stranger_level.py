"""A model of another distribution, in one file: the level of every stretch of a signal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from amtcore.features import FrameDesign, FrameGrid, FrameModel, StreamKind


@dataclass(frozen=True)
class LevelParams:
    """What a job may set.

    Args:
        hop_s: Seconds between frames.
        floor_db: Levels below count as this.
    """

    hop_s: float = 0.01
    floor_db: float = -20.0


class Level(FrameModel[LevelParams]):
    """Level in dB SPL, and the largest sample."""

    name, summary, default_fs_hz = "level", "Level and peak of every stretch", 16000.0
    streams = {  # noqa: RUF012
        "level": StreamKind("dB SPL", ("time", "channel"), "level of a stretch"),
        "peak": StreamKind("input unit", ("time", "channel"), "largest magnitude in a stretch"),
    }
    params_class = LevelParams

    def design(self, fs_hz: float, params: LevelParams) -> FrameDesign:
        """Levels at a rate."""
        hop = round(params.hop_s * fs_hz)

        def compute(signal: np.ndarray) -> dict[str, np.ndarray]:
            stretches = signal[: len(signal) // hop * hop].reshape(-1, hop)
            rms = np.sqrt(np.square(stretches, dtype=np.float64).mean(1, keepdims=True))
            level = 100.0 + 20.0 * np.log10(np.maximum(rms, 1e-30))
            peak = np.abs(stretches).max(1, keepdims=True)
            return {"level": np.maximum(level, params.floor_db), "peak": peak}

        return FrameDesign({"level": FrameGrid(1, hop), "peak": FrameGrid(1, hop)}, compute)
