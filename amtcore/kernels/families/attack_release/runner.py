"""From tensors to the kernel: clips and lane groups go to threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.families.attack_release.cpu import (
    run_all_lanes,
    run_attack_release,
    run_attack_release_adjoint,
)
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import parallel_for


def _padded(values: Tensor) -> NDArray[Any]:
    """Flat rows of whole lane groups, (.., channel) -> (.., group LANES); the filling is zero."""
    missing = -values.shape[-1] % LANES
    rows = torch.nn.functional.pad(values.detach(), (0, missing))
    # A copy in every case: states are changed in place.
    return np.array(rows.numpy(), order="C")


def _cut(rows: NDArray[Any], channels: int) -> Tensor:
    return torch.from_numpy(rows)[..., :channels].contiguous()


def forward(x: Tensor, coef: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Values of `reference.attack_release`."""
    batch, frames, channels = x.shape
    rows, rates, last = _padded(x), _padded(coef.T).ravel(), _padded(state)
    width = last.shape[1]
    out, groups = np.empty_like(rows), width // LANES

    def one(item: int) -> None:
        b, g = divmod(item, groups)
        run_attack_release(rows[b].ravel(), out[b].reshape(-1), frames, width, g, rates, last[b])

    parallel_for(one, batch * groups)
    return _cut(out, channels), _cut(last, channels)


def forward_rows(rows: Tensor, coef: Tensor, state: Tensor) -> Tensor:
    """As `forward` in place; returns the state.

    Args:
        rows: (batch, frame, channel), filled up to whole vectors of channels: what is beyond those
            of `coef` stays as it is where it is 0.
        coef: (channel, 2).
        state: (batch, channel).
    """
    batch, frames, width = rows.shape
    rates, last = _padded(coef.T).ravel(), _padded(state)
    signals = rows.numpy().reshape(batch, -1)

    def one(b: int) -> None:
        run_all_lanes(signals[b], frames, width, rates, last[b])

    parallel_for(one, batch)
    return _cut(last, coef.shape[0])


def adjoint(
    x: Tensor, coef: Tensor, state: Tensor, y: Tensor, gy: Tensor, gstate: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward` with respect to x, coef and state."""
    batch, frames, channels = x.shape
    rows, outs, upstream = _padded(x), _padded(y), _padded(gy)
    rates, first, g_state = _padded(coef.T).ravel(), _padded(state), _padded(gstate)
    width = first.shape[1]
    g_rows, groups = np.empty_like(rows), width // LANES
    g_rates = np.zeros((batch, 2 * width), rows.dtype)

    def one(item: int) -> None:
        b, g = divmod(item, groups)
        run_attack_release_adjoint(
            rows[b].ravel(), outs[b].ravel(), upstream[b].ravel(), g_rows[b].reshape(-1), frames,
            width, g, rates, g_rates[b], first[b], g_state[b],
        )  # fmt: skip

    parallel_for(one, batch * groups)
    g_coef = _cut(g_rates.reshape(batch, 2, width), channels).sum(0).T.contiguous()
    return _cut(g_rows, channels), g_coef, _cut(g_state, channels)
