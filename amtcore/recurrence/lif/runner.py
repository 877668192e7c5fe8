"""From tensors to the kernels: which neurons of which batch item go to which thread.

Large outputs come from numpy, which asks the system for huge pages: a fresh output of hundreds of
megabytes otherwise costs more page faults than arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import ParameterError
from ..chain.runner import groups_of, pack, unpack
from ..simd import LANES
from ..threads import get_num_threads, parallel_for
from .adjoint import RUN_LIF_ADJOINT
from .cpu import BETA, BLOCK, RUN_LIF, STREAM_ALIGN

#: From this size on, output goes past the caches into huge pages.
LARGE_BYTES = 16 * 2**20


def large_or_small(shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, bool]:
    """An empty tensor, and whether it is large; a large one is aligned for streaming stores."""
    count = math.prod(shape)
    if count * like.element_size() < LARGE_BYTES:
        return like.new_empty(shape), False
    extra = STREAM_ALIGN // like.element_size()
    raw = np.empty(count + extra, like.new_empty(0).numpy().dtype)
    skip = -raw.ctypes.data % STREAM_ALIGN // like.element_size()
    return torch.from_numpy(raw[skip : skip + count]).view(shape), True


def flat(values: Tensor) -> NDArray[np.floating]:
    """(batch, ..) -> (batch, the rest)."""
    return values.detach().contiguous().flatten(1).numpy()


def over_neurons(one: Callable[[int, slice, slice], None], batch: int, neurons: int) -> None:
    """Call `one(batch item, neurons, lane groups)` on the pool, in pieces for all threads."""
    groups = groups_of(neurons)
    parts = min(groups, -(-get_num_threads() // max(batch, 1)))
    edges = [groups * i // parts for i in range(parts + 1)]

    def piece(item: int) -> None:
        begin, end = edges[item % parts], edges[item % parts + 1]
        chosen = slice(begin * LANES, min(end * LANES, neurons))
        one(item // parts, chosen, slice(begin, end))

    parallel_for(piece, batch * parts)


def starts_shape(batch: int, steps: int, neurons: int, synapses: int) -> tuple[int, ...]:
    """Shape of the states before every block: (batch, lane group, block, row * LANES)."""
    return batch, groups_of(neurons), -(-steps // BLOCK), (1 + synapses) * LANES


def forward(
    x: Tensor, coef: Tensor, state: Tensor, max_spikes: float, record: bool, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Values of `reference.lif`, and the states before every block if asked to keep them."""
    (batch, steps, _), neurons, synapses = x.shape, coef.shape[0], coef.shape[1] - BETA
    recorded = steps if record else 0
    spikes, large = large_or_small((batch, steps, neurons), x)
    vmem, _ = large_or_small((batch, recorded, neurons), x)
    isyn, isyn_large = large_or_small((batch, recorded, neurons, synapses), x)
    streamed = large and (isyn_large or not record) and _rows_aligned(neurons, x)
    kernel = RUN_LIF[synapses == 1, record]
    starts = x.new_empty(starts_shape(batch, steps if keep else 0, neurons, synapses))
    inputs, outputs, starts_np = flat(x), (flat(spikes), flat(vmem), flat(isyn)), starts.numpy()
    packed_coef, packed_state = pack(coef), pack(state)

    def one(b: int, part: slice, groups: slice) -> None:
        kernel(
            inputs[b], steps, part.start, part.stop, neurons, synapses, max_spikes,
            packed_coef[groups].reshape(-1), packed_state[b, groups].reshape(-1),
            *(out[b] for out in outputs), starts_np[b, groups], streamed,
        )  # fmt: skip

    over_neurons(one, batch, neurons)
    last = unpack(packed_state, neurons)
    check_finite(x, coef, state, last)
    return spikes, vmem, isyn, last, starts


def _rows_aligned(neurons: int, like: Tensor) -> bool:
    """Whether every step of every batch item starts at a multiple of STREAM_ALIGN bytes."""
    return neurons * like.element_size() % STREAM_ALIGN == 0


def adjoint(
    x: Tensor, coef: Tensor, starts: Tensor, max_spikes: float, record: bool,
    gspikes: Tensor, gvmem: Tensor, gisyn: Tensor, gstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `forward` with respect to x, coef and state."""
    (batch, steps, _), neurons, synapses = x.shape, coef.shape[0], coef.shape[1] - BETA
    gx, large = large_or_small(tuple(x.shape), x)
    streamed, kernel = large and _rows_aligned(neurons, x), RUN_LIF_ADJOINT[synapses == 1, record]
    inputs, g_inputs, upstream = flat(x), flat(gx), tuple(map(flat, (gspikes, gvmem, gisyn)))
    packed_coef, packed_gstate, starts_np = pack(coef), pack(gstate), starts.detach().numpy()
    gcoef = np.zeros((batch, *packed_coef.shape), packed_coef.dtype)

    def one(b: int, part: slice, groups: slice) -> None:
        kernel(
            inputs[b], steps, part.start, part.stop, neurons, synapses, max_spikes,
            packed_coef[groups].reshape(-1), gcoef[b, groups].reshape(-1), starts_np[b, groups],
            packed_gstate[b, groups].reshape(-1), *(values[b] for values in upstream),
            g_inputs[b], streamed,
        )  # fmt: skip

    over_neurons(one, batch, neurons)
    return gx, unpack(gcoef, neurons).sum(0), unpack(packed_gstate, neurons)


def check_finite(x: Tensor, coef: Tensor, before: Tensor, after: Tensor) -> None:
    """Raise when a state went wrong, and say what did it.

    A synaptic current that meets a NaN or an infinity never comes back, so the state after the
    last step tells of the whole input, at no cost.
    """
    if bool(torch.isfinite(after).all()):
        return
    for name, values in (("data", x), ("state", before), ("coefficient", coef)):
        wrong = (~torch.isfinite(values)).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise ParameterError(
                f"{name} must be finite, got {float(values[at])} at index {at} and "
                f"{len(wrong) - 1} more non-finite values; remove or replace them"
            )
    raise ParameterError(
        f"the neurons overflowed {after.dtype}; scale the input (largest magnitude "
        f"{float(x.abs().max()):g}) or lower the decay factors"
    )
