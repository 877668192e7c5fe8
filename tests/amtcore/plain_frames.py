"""Pooling of full-rate features into frames, plainly: the second route for the fused kernel.

Frame f covers samples ceil(f S/F) .. ceil((f+1) S/F) - 1, where S/F is the exact number of samples
per frame; an incomplete last frame is left out.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def pool_frames(y: Tensor, samples_per_frame: tuple[int, int], pool: str) -> Tensor:
    """(.., time) -> (.., frames).

    Args:
        y: Full-rate features.
        samples_per_frame: Exact fraction (samples, frames).
        pool: "mean", "rms", "max" or "subsample" (the first sample of the frame).
    """
    samples, frames = samples_per_frame
    count = y.shape[-1] * frames // samples
    edges = [-(-f * samples // frames) for f in range(count + 1)]
    pooled = []
    for begin, end in pairwise(edges):
        part = y[..., begin:end]
        if pool == "mean":
            pooled.append(part.mean(-1))
        elif pool == "rms":
            pooled.append(part.square().mean(-1).sqrt())
        elif pool == "max":
            pooled.append(part.amax(-1))
        else:
            pooled.append(part[..., 0])
    return torch.stack(pooled, -1) if pooled else y[..., :0]
