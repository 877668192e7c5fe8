"""From tensors to the kernel: pairs of rows go to threads."""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.families.envelope import reference
from amtcore.kernels.families.envelope.cpu import run_envelope
from amtcore.kernels.vector.result_pool import empty
from amtcore.kernels.vector.threads import parallel_for


def forward(rows: Tensor) -> Tensor:
    """Values of `reference.hilbert_envelope`."""
    count, samples = rows.shape
    fine = reference.are_finite(rows)
    inputs = rows.detach() if bool(fine.all()) else torch.where(fine, rows.detach(), 0.0)
    out = empty((count + count % 2, samples), rows)
    out_np = out.numpy()
    quadrature, tiny = reference.Quadrature(samples, inputs), torch.finfo(rows.dtype).tiny

    def pair(i: int) -> None:
        first = inputs[2 * i]
        second = inputs[2 * i + 1] if 2 * i + 1 < count else torch.zeros_like(first)
        z = torch.complex(first, second)
        own, turned = (torch.view_as_real(part).flatten().numpy() for part in (z, quadrature(z)))
        run_envelope(own, turned, tiny, out_np[2 * i], out_np[2 * i + 1])

    parallel_for(pair, -(-count // 2))
    return out[:count].masked_fill_(~fine, torch.nan)
