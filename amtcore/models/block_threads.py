"""Blocks of a signal side by side on the kernels' threads, when no gradient is asked for.

A block is many small matrix products: on torch's own threads two of them mostly wait for each
other, so each block has one thread to itself, its kernels included, even when there is but one.
A GPU has its own threads, and takes the blocks one after another on the stream of the caller,
which other threads do not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from amtcore.kernels.torch_state import is_transformed
from amtcore.kernels.vector.threads import parallel_for

In = TypeVar("In")
Out = TypeVar("Out")


def can_share(like: Tensor) -> bool:
    """Return True if blocks of `like` may go to threads: gradients, compilation, vmap and the
    streams of a GPU know one thread only."""
    one_thread = torch.compiler.is_compiling() or torch.is_grad_enabled() or is_transformed(like)
    return like.device.type == "cpu" and not one_thread


def map_blocks(function: Callable[[In], Out], blocks: Sequence[In], like: Tensor) -> list[Out]:
    """`function` of every block, in order; they are made of `like`."""
    if not can_share(like):
        return [function(block) for block in blocks]
    results: dict[int, Out] = {}
    # Modes of autograd are those of a thread. Blocks change tensors of the caller in place, which
    # torch allows for tensors of inference mode in that mode only.
    mode = torch.inference_mode if torch.is_inference_mode_enabled() else torch.no_grad

    def run(i: int) -> None:
        with mode():
            results[i] = function(blocks[i])

    parallel_for(run, len(blocks))
    return [results[i] for i in range(len(blocks))]
