"""A signal in overlapping segments of a fixed number of frames, and their threads.

    samples   ......|----------- segment of block b -----------|....
                    |- reach -|                      |- reach -|
    frames                    x    x    x  ..  x    x              frames b n .. b n + n - 1.

Blocks lie on a fixed grid whatever the chunks, and every block has the same size (zeros fill the
last): so chunks equal the whole bit by bit. `reach` is half a window and half a filter.

`map_blocks` gives each block one thread when no gradient is asked for. A block is many small matrix
products, and on torch's own threads two blocks mostly wait for each other. A GPU has its own
threads: it takes the blocks one after another on the stream of the caller, which other threads do
not know.
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
    """Where a stream is.

    Args:
        tail: (.., samples): what the next block needs of the samples so far.
        samples: Samples so far.
        frames: Frames of the blocks so far.
    """

    tail: Tensor
    samples: int
    frames: int


@dataclass(frozen=True)
class Segment:
    """The samples of one block.

    Args:
        x: (.., samples); zeros where there is no signal.
        first: Index of its first sample in the signal.
        frames: Frames that count: all of a block but the last.
    """

    x: Tensor
    first: int
    frames: int


@dataclass(frozen=True)
class FrameBlocks:
    """The grid.

    Args:
        hop: Samples between frames.
        reach: Samples that a frame needs on either side of its centre.
    """

    hop: int
    reach: int

    def start(self, like: Tensor) -> FrameState:
        """State before the first sample; there are zeros before it."""
        return FrameState(like.new_zeros(*like.shape[:-1], self.reach), 0, 0)

    def split(self, x: Tensor, state: FrameState) -> tuple[list[Segment], FrameState]:
        """Take a chunk in; returns the blocks it completes.

        Args:
            x: (.., time).
            state: What the previous chunk returned.
        """
        signal = torch.cat((state.tail, x), -1)
        segments, at, frames = [], 0, state.frames
        while signal.shape[-1] - at >= self.segment_samples:
            part = signal[..., at : at + self.segment_samples]
            segments.append(Segment(part, frames * self.hop - self.reach, BLOCK_FRAMES))
            at += BLOCK_FRAMES * self.hop
            frames += BLOCK_FRAMES
        return segments, FrameState(signal[..., at:], state.samples + x.shape[-1], frames)

    def remaining(self, state: FrameState) -> list[Segment]:
        """The blocks that zeros after the last sample complete."""
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
        """Return the frames of the blocks that `samples` samples complete, whatever follows."""
        left = samples + self.reach - self.segment_samples
        return max(left // (BLOCK_FRAMES * self.hop) + 1, 0) * BLOCK_FRAMES

    @property
    def segment_samples(self) -> int:
        """Samples of a block."""
        return (BLOCK_FRAMES - 1) * self.hop + 2 * self.reach


def inside(values: Tensor, first: int, samples: int) -> Tensor:
    """Zero what lies outside of a signal.

    Args:
        values: (.., time), the first of them at index `first` of the signal.
        samples: Length of the signal.
    """
    head, tail = max(-first, 0), max(first + values.shape[-1] - samples, 0)
    if head == 0 and tail == 0:
        return values
    length = max(values.shape[-1] - head - tail, 0)
    kept = values[..., head : head + length]
    return torch.nn.functional.pad(kept, (head, values.shape[-1] - head - length))


In = TypeVar("In")
Out = TypeVar("Out")


def can_share(like: Tensor) -> bool:
    """Return True if blocks may go to threads.

    Gradients, compilation, vmap and the streams of a GPU know one thread only.
    """
    one_thread = torch.compiler.is_compiling() or torch.is_grad_enabled() or is_transformed(like)
    return like.device.type == "cpu" and not one_thread


def map_blocks(function: Callable[[In], Out], blocks: Sequence[In], like: Tensor) -> list[Out]:
    """`function` of every block, in order; they are made of `like`."""
    if not can_share(like):
        return [function(block) for block in blocks]
    results: dict[int, Out] = {}
    # A mode of autograd belongs to a thread. Blocks change tensors of the caller in place, which
    # torch allows for tensors of inference mode in that mode only.
    mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad

    def run(i: int) -> None:
        with mode():
            results[i] = function(blocks[i])

    parallel_for(run, len(blocks))
    return [results[i] for i in range(len(blocks))]
