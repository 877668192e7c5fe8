"""Operator of the envelope family: `amtcore::hilbert_envelope`.

It has no gradient: where one is asked for, the torch form runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.backends.chosen import DEVICES, backend_of
from amtcore.kernels.families.envelope import reference
from amtcore.kernels.ops.autograd import wants_derivative, without_gradient
from amtcore.kernels.ops.dispatch import use_reference


@torch.library.custom_op("amtcore::hilbert_envelope", mutates_args=(), device_types=DEVICES)
def _envelope(rows: Tensor) -> Tensor:
    return backend_of(rows).hilbert_envelope(rows)


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
