"""Operator of the envelope family: `amtcore::hilbert_envelope`.

It has no gradient: where one is asked for, the torch form runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from amtcore.kernels.backends.chosen import DEVICES, backend_of
from amtcore.kernels.families.envelope import reference
from amtcore.kernels.ops.autograd import wants_derivative, without_gradient
from amtcore.kernels.ops.dispatch import by_item, rows_of, use_reference


@torch.library.custom_op("amtcore::hilbert_envelope", mutates_args=(), device_types=DEVICES)
def _envelope(rows: Tensor) -> Tensor:
    return backend_of(rows).hilbert_envelope(rows)


@_envelope.register_fake
def _(rows: Tensor) -> Tensor:
    return torch.empty_like(rows)


_operator = without_gradient(_envelope, (0,))


def hilbert_envelope(x: Tensor, backend: str | None = None) -> Tensor:
    """Magnitude of the analytic signal over the whole last axis, scaled to the RMS of `x`.

    Silence stays silence, with gradient 0. Two channels share a transform, never two items of a
    batch, so an item has the same bits alone and in a batch.

    Args:
        x: (batch, channel, time), (channel, time) or (time,).
        backend: Kernel choice; None picks.
    """
    if x.numel() == 0:
        return x
    items = x if x.ndim == 3 else x.reshape(1, -1, x.shape[-1])
    channels = items.shape[1]
    pairs = torch.nn.functional.pad(items, (0, 0, 0, channels % 2))
    if use_reference(x, backend) or wants_derivative(x):
        made = by_item(lambda item: _by_rows(reference.hilbert_envelope, item), pairs)
    else:
        made = _by_rows(_operator, pairs)
    return made[:, :channels].reshape(x.shape)


def _by_rows(function: Callable[[Tensor], Tensor], items: Tensor) -> Tensor:
    return function(rows_of(items)).reshape(items.shape)
