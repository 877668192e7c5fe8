"""Operator of the envelope family: `amtcore::hilbert_envelope`.

It has no gradient: where one is asked for, the torch form runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.families.envelope import reference
from amtcore.kernels.families.envelope.cpu import run_envelope
from amtcore.kernels.fused.runner import empty_rows
from amtcore.kernels.ops.autograd import wants_derivative, without_gradient
from amtcore.kernels.ops.dispatch import use_reference
from amtcore.kernels.vector.threads import parallel_for


@torch.library.custom_op("amtcore::hilbert_envelope", mutates_args=(), device_types="cpu")
def _envelope(rows: Tensor) -> Tensor:
    count, samples = rows.shape
    fine = reference.are_finite(rows)
    inputs = rows.detach() if bool(fine.all()) else torch.where(fine, rows.detach(), 0.0)
    out, out_np = empty_rows(1, count + count % 2, samples, rows)
    quadrature, tiny = reference.Quadrature(samples, inputs), torch.finfo(rows.dtype).tiny

    def pair(i: int) -> None:
        first = inputs[2 * i]
        second = inputs[2 * i + 1] if 2 * i + 1 < count else torch.zeros_like(first)
        z = torch.complex(first, second)
        own, turned = (torch.view_as_real(part).flatten().numpy() for part in (z, quadrature(z)))
        run_envelope(own, turned, tiny, out_np[0, 2 * i], out_np[0, 2 * i + 1])

    parallel_for(pair, -(-count // 2))
    return out[0, :count].masked_fill_(~fine, torch.nan)


@_envelope.register_fake
def _(rows: Tensor) -> Tensor:
    return torch.empty_like(rows)


_operator = without_gradient(_envelope, (0,))


def hilbert_envelope(x: Tensor, backend: str | None = None) -> Tensor:
    """Magnitude of the analytic signal over the whole last axis, scaled to the RMS of `x`.

    Silence stays silence, with gradient 0.
    """
    if x.numel() == 0:
        return x
    rows = x.reshape(-1, x.shape[-1])
    plain = use_reference(x, backend) or wants_derivative(x)
    function = reference.hilbert_envelope if plain else _operator
    return function(rows).reshape(x.shape)
