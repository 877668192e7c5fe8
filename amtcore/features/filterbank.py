"""From samples to frames of one feature stream: through the fused kernel, or of a whole clip.

    clip -> front end -> fused chain: operations, filters, pooling                (any length)
    clip -> front end -> operations at full rate -> one band at a time -> pooling (a clip in memory)

The second way is for what needs the whole signal, such as a Hilbert envelope. The front end, where
a model has one, is computed once for all streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import ParameterError
from amtcore.kernels.fused.program import BlockOp, PooledChain, lay_out
from amtcore.kernels.fused.runner import run_program
from amtcore.kernels.vector.threads import get_num_threads, parallel_for
from amtcore.stages.base import Stage

Samples = NDArray[np.floating[Any]]
Bands = Callable[[Tensor], Iterator[Tensor]]


def as_tensor(samples: Samples) -> Tensor:
    """A tensor on the same memory where it can be written to."""
    return torch.from_numpy(np.require(samples, requirements=["C", "W"]))


class FrontEnd:
    """The stages of a model that act on the waveform before its channels split."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        self._states: list[Any] = [None] * len(stages)

    def push(self, chunk: Samples, last: bool = False) -> Samples:
        """What comes out for the next samples; with `last`, all that was held back too."""
        if not self._stages:
            return chunk
        x = as_tensor(chunk)
        with torch.no_grad():
            for i, stage in enumerate(self._stages):
                ending = {"last": last} if stage.looks_ahead else {}
                x, self._states[i] = stage.stream(x, self._states[i], **ending)  # type: ignore[operator]
        return x.numpy()

    def whole(self, clip: Samples) -> Samples:
        """What comes out for a whole signal."""
        return FrontEnd(self._stages).push(clip, last=True)


class PooledStream(Protocol):
    """Frames of one stream, chunk by chunk."""

    def push(self, chunk: Samples) -> Samples:
        """Frames that the next samples complete."""

    def finish(self) -> Samples:
        """Frames that were waiting for what follows the last sample."""


class FusedFeatures:
    """A stream that the fused kernel makes, chunk by chunk or whole."""

    def __init__(self, chain: PooledChain) -> None:
        self.chain = chain
        self.width = chain.tables.width

    def n_frames(self, n_samples: int) -> int:
        """Whole frames in so many samples."""
        return self.chain.n_frames(n_samples)

    def extract(self, clips: Sequence[Samples]) -> list[Samples]:
        """Per clip (frames, width)."""
        states = [self.chain.rest.copy() for _ in clips]
        frames = self.chain.push(clips, states, 0)
        if self.chain.tail is None:
            return frames
        last = [self.chain.finish(s, len(clip)) for s, clip in zip(states, clips, strict=True)]
        return [np.concatenate(parts) for parts in zip(frames, last, strict=True)]

    def open(self) -> PooledStream:
        """Start on a long signal."""
        return _FusedStream(self.chain)


class _FusedStream:
    def __init__(self, chain: PooledChain) -> None:
        self._chain, self._state, self._samples = chain, chain.rest.copy(), 0

    def push(self, chunk: Samples) -> Samples:
        frames = self._chain.push([chunk], [self._state], self._samples)[0]
        self._samples += len(chunk)
        return frames

    def finish(self) -> Samples:
        return self._chain.finish(self._state, self._samples)


class WholeFeatures:
    """A stream that needs the whole clip: channels at full rate, then one modulation band at a
    time, so that memory is that of a few bands of as many clips as there are threads.

    Args:
        ops: Operations up to the bands' input.
        bands: (1, channel, time) -> every band in turn, (1, channel, time').
        n_bands: How many there are.
        pooling: Pools one band of all channels.
        rates: (up, down): time' = floor(time * up / down).
    """

    def __init__(
        self,
        ops: Sequence[BlockOp],
        bands: Bands,
        n_bands: int,
        pooling: PooledChain,
        rates: tuple[int, int],
    ) -> None:
        self._table, coefs, states = lay_out(ops)
        self._coef, self._rest = torch.cat(coefs, 1), torch.cat(states, 1)
        self._bands, self._n_bands, self._pooling, self._rates = bands, n_bands, pooling, rates
        self.width = n_bands * pooling.tables.width

    def n_frames(self, n_samples: int) -> int:
        """Whole frames in so many samples."""
        return self._pooling.n_frames(n_samples * self._rates[0] // self._rates[1])

    def extract(self, clips: Sequence[Samples]) -> list[Samples]:
        """Per clip (frames, width), columns channel by channel."""
        if len(clips) < get_num_threads():
            return [self._one(clip) for clip in clips]
        frames: dict[int, Samples] = {}
        parallel_for(lambda i: frames.update({i: self._one(clips[i])}), len(clips))
        return [frames[i] for i in range(len(clips))]

    def _one(self, clip: Samples) -> Samples:
        out = np.empty((self.n_frames(len(clip)), self.width), self._pooling.coef.dtype)
        if len(out) == 0:
            return out
        with torch.no_grad():
            x = as_tensor(clip).reshape(1, 1, -1)
            channels, _ = run_program(self._table, x, self._coef, self._rest.unsqueeze(0))
            for m, band in enumerate(self._bands(channels)):
                state = self._pooling.rest.copy()
                out[:, m :: self._n_bands] = self._pooling.push([band[0].numpy()], [state], 0)[0]
        return out

    def open(self) -> PooledStream:
        """Not possible: raises what to ask for instead."""
        raise ParameterError(
            "this stream needs whole clips and cannot run chunk by chunk; for King2019 that is "
            "phase_insens='hilbert' or subfs: use phase_insens='none' without subfs"
        )
