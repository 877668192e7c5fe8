"""A model of pairs of another distribution: the peaks of both recordings, hop by hop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amtcore.features import FrameGrid, StreamKind
from amtcore.features.frame_module_model import FrameModuleModel
from amtcore.models.frame_module import FrameModule, Outputs

HOP = 160


class Peaks(FrameModule):
    """Largest magnitude of each hop, of the reference and of the row.

    Args:
        fs: Sampling rate in Hz.
        dtype: Working type.
    """

    input_unit = "rms1=100dB"
    input_channels = (2,)

    def __init__(self, fs: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fs, self.dtype = fs, dtype
        self.grids = {"peaks": FrameGrid(2, HOP, columns=("reference", "own"))}

    def stream(
        self,
        chunk: Tensor,
        state: Any = None,
        last: bool = False,
        names: tuple[str, ...] | None = None,
    ) -> tuple[Outputs, Any]:
        """Return the peaks of whole hops; the other samples are the state."""
        known = chunk if state is None else torch.cat((state, chunk), -1)
        frames = known.shape[-1] // HOP
        hops = known[:, : frames * HOP].reshape(2, frames, HOP)
        return {"peaks": hops.abs().amax(-1).T}, known[:, frames * HOP :]


KIND = StreamKind("input unit", ("time", "statistic"), "largest magnitude of a hop")
PEAKS = FrameModuleModel("pair", Peaks, "Peaks of pairs", 16000.0, {"peaks": KIND})
