"""Pooled chains on a GPU: clips of any lengths in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.backends.warp_launch import Clips, rows_of, run_forward
from amtcore.kernels.fused.program import PooledChain
from amtcore.kernels.fused.runner import PooledTables
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.warp.forward import Program
from amtcore.kernels.warp.launching import Launcher

Samples = NDArray[np.floating[Any]] | Tensor


class WarpChain:
    """A chain with its constants on the device; frames are tensors there.

    Args:
        launcher: Runs it.
        chain: As compiled for a processor.
    """

    def __init__(self, launcher: Launcher, chain: PooledChain) -> None:
        self.tables, self.tail, self._chain = chain.tables, chain.tail, chain
        self._launcher = launcher
        device = launcher.device
        self._coef = torch.from_numpy(chain.coef).to(device)
        self._rest = torch.from_numpy(chain.rest).to(device)
        self._columns = torch.from_numpy(chain.tables.columns).to(device)

    def n_frames(self, n_samples: int) -> int:
        """Whole frames in so many samples."""
        return self._chain.n_frames(n_samples)

    def fresh(self, clips: int) -> Tensor:
        """States before the first sample, (clip, group, rows * LANES)."""
        return self._rest.expand(clips, *self._rest.shape).clone()

    def push(self, clips: Sequence[Samples], states: Tensor, start: int) -> list[Tensor]:
        """Frames that these samples complete; see `fused.runner.run_pooled`."""
        return self._run(self.tables, clips, states, [start] * len(clips))

    def finish(self, states: Tensor, samples: Sequence[int]) -> list[Tensor]:
        """Frames that were waiting for what follows the last of so many samples."""
        silences = [self._coef.new_zeros(self._chain.zeros_after(count)) for count in samples]
        return self._run(self.tail or self.tables, silences, states, samples)

    def _run(
        self, tables: PooledTables, clips: Sequence[Samples], states: Tensor, starts: Sequence[int]
    ) -> list[Tensor]:
        lengths = [clip.shape[-1] for clip in clips]
        counts = [
            tables.frames_before(start + length) - tables.frames_before(start)
            for start, length in zip(starts, lengths, strict=True)
        ]
        sizes = [clip.numel() if isinstance(clip, Tensor) else clip.size for clip in clips]
        frame_sizes = [count * tables.width for count in counts]
        out = self._coef.new_empty(sum(frame_sizes))
        if clips:
            begins = [0, *accumulate(sizes)][:-1]
            places = [0, *accumulate(frame_sizes)][:-1]
            ratio = *tables.samples_per_frame, tables.samples_per_output, tables.lookahead
            run_forward(
                self._launcher, self._program(tables, clips[0].ndim == 1), tables.channels,
                Clips.ragged(begins, lengths, places, starts, out.device),
                gathered(clips, out.device), self._coef, states, self._columns, out, tables.width,
                ratio,
            )  # fmt: skip
        parts = out.split(frame_sizes)
        return [part.view(-1, tables.width) for part in parts]

    def _program(self, tables: PooledTables, shared: bool) -> Program:
        coefs, states = self._coef.shape[1] // LANES, self._rest.shape[1] // LANES
        double, filters = self._coef.dtype == torch.float64, rows_of(tables.filters)
        ops = rows_of(tables.ops)
        return Program(ops, filters, tables.pool, shared, double, coefs, states)


def gathered(clips: Sequence[Samples], device: torch.device) -> Tensor:
    """All samples, one clip after another, on the device; those of the host by way of one piece of
    memory that it can read by itself."""
    if any(isinstance(clip, Tensor) for clip in clips):
        parts = [
            clip.detach().to(device) if isinstance(clip, Tensor) else gathered([clip], device)
            for clip in clips
        ]
        return torch.cat([part.reshape(-1) for part in parts])
    rows = [np.ravel(clip) for clip in clips]  # by numpy: torch warns of memory that is read-only
    dtype, pinned = torch.from_numpy(np.empty(0, rows[0].dtype)).dtype, device.type == "cuda"
    room = torch.empty(sum(map(len, rows)), dtype=dtype, pin_memory=pinned)
    np.concatenate(rows, out=room.numpy())
    return room.to(device, non_blocking=True)
