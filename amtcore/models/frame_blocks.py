"""A signal in overlapping segments of a fixed number of frames, and their threads.

    samples   ......|----------- segment of block b -----------|....
                    |- reach -|                      |- reach -|
    frames                    x    x    x  ..  x    x              frames b n .. b n + n - 1.

The grid of blocks is fixed, and all blocks have the same size; zeros fill the last block. So chunks
equal the whole signal bit by bit. `reach` is half a window and half a filter.

Without gradients `map_blocks` gives each block one thread. A block is many small matrix products,
for which torch's own threads mostly wait. A GPU takes the blocks one after another on the stream of
the caller, since a stream belongs to a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from amtcore.kernels.torch_state import is_transformed
from amtcore.kernels.vector.threads import parallel_for

#: Frames of a block: 1 MB of components a stereo block, inside a second-level cache.
BLOCK_FRAMES = 128


@dataclass(frozen=True)
class FrameState:
    """Progress of a stream: samples (.., time) kept for the next block, samples, and frames."""

    tail: Tensor
    samples: int
    frames: int


@dataclass(frozen=True)
class Segment:
    """The samples of one block.

    Args:
        x: (.., samples); zeros outside of the signal.
        first: Index of the first sample in the signal.
        frames: Frames of the signal in this block.
    """

    x: Tensor
    first: int
    frames: int


@dataclass(frozen=True)
class FrameBlocks:
    """The grid: samples between frames, and samples that a frame needs on either side."""

    hop: int
    reach: int

    def start(self, like: Tensor) -> FrameState:
        """Return the state before the first sample, with zeros before the signal."""
        return FrameState(like.new_zeros(*like.shape[:-1], self.reach), 0, 0)

    def split(self, x: Tensor, state: FrameState) -> tuple[list[Segment], FrameState]:
        """Return the blocks that a chunk (.., time) completes, and the new state."""
        signal = torch.cat((state.tail, x), -1)
        segments, at, frames = [], 0, state.frames
        while signal.shape[-1] - at >= self.segment_samples:
            part = signal[..., at : at + self.segment_samples]
            segments.append(Segment(part, frames * self.hop - self.reach, BLOCK_FRAMES))
            at += BLOCK_FRAMES * self.hop
            frames += BLOCK_FRAMES
        return segments, FrameState(signal[..., at:], state.samples + x.shape[-1], frames)

    def remaining(self, state: FrameState) -> list[Segment]:
        """Return the blocks that are completed by zeros after the last sample."""
        if state.samples == 0:
            return []
        left = state.samples // self.hop + 1 - state.frames
        blocks = -(-left // BLOCK_FRAMES)
        wanted = self.segment_samples + (blocks - 1) * BLOCK_FRAMES * self.hop
        fill = wanted - state.tail.shape[-1]
        segments, _ = self.split(state.tail.new_zeros(*state.tail.shape[:-1], fill), state)
        counts = (min(BLOCK_FRAMES, left - b * BLOCK_FRAMES) for b in range(blocks))
        return [
            replace(segment, frames=count) for segment, count in zip(segments, counts, strict=True)
        ]

    def complete(self, samples: int) -> int:
        """Return the number of frames in the blocks that `samples` samples complete."""
        left = samples + self.reach - self.segment_samples
        return max(left // (BLOCK_FRAMES * self.hop) + 1, 0) * BLOCK_FRAMES

    @property
    def segment_samples(self) -> int:
        """Samples of a block."""
        return (BLOCK_FRAMES - 1) * self.hop + 2 * self.reach


def inside(values: Tensor, first: int, samples: int) -> Tensor:
    """Zero the values (.., time) from index `first` on that lie outside of a signal."""
    head, tail = max(-first, 0), max(first + values.shape[-1] - samples, 0)
    if head == 0 and tail == 0:
        return values
    length = max(values.shape[-1] - head - tail, 0)
    kept = values[..., head : head + length]
    return torch.nn.functional.pad(kept, (head, values.shape[-1] - head - length))


In = TypeVar("In")
Out = TypeVar("Out")


def can_share(like: Tensor) -> bool:
    """Return True if blocks may go to threads: on the CPU, without gradients and transforms."""
    one_thread = torch.compiler.is_compiling() or torch.is_grad_enabled() or is_transformed(like)
    return like.device.type == "cpu" and not one_thread


def map_blocks(function: Callable[[In], Out], blocks: Sequence[In], like: Tensor) -> list[Out]:
    """Return `function` of every block, in order; `like` is a tensor of the signal."""
    if not can_share(like):
        return [function(block) for block in blocks]
    results: dict[int, Out] = {}
    # The modes of autograd are per thread. Blocks change tensors of the caller in place, which
    # torch allows for tensors of inference mode only in inference mode.
    mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad

    def run(i: int) -> None:
        with mode():
            results[i] = function(blocks[i])

    parallel_for(run, len(blocks))
    return [results[i] for i in range(len(blocks))]
