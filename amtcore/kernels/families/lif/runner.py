"""From tensors to the kernels: which neurons of which batch item go to which thread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.errors import NonFiniteError
from amtcore.kernels.families.lif.adjoint import RUN_LIF_ADJOINT
from amtcore.kernels.families.lif.cpu import BETA, BLOCK, RUN_LIF
from amtcore.kernels.vector.lanes import groups_of, pack, unpack
from amtcore.kernels.vector.memory import CACHE_LINE
from amtcore.kernels.vector.result_pool import empty, training
from amtcore.kernels.vector.simd import LANES
from amtcore.kernels.vector.threads import get_num_threads, parallel_for

#: From this size on, output goes past the caches.
STREAM_BYTES = 16 * 2**20


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
    spikes = empty((batch, steps, neurons), x)
    vmem = empty((batch, recorded, neurons), x)
    isyn = empty((batch, recorded, neurons, synapses), x)
    streamed = _is_streamed(spikes)
    kernel = RUN_LIF[synapses == 1, record]
    starts = empty(starts_shape(batch, steps if keep else 0, neurons, synapses), x)
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


def _is_streamed(out: Tensor) -> bool:
    """Whether output (batch, time, row) goes past the caches: it is large, and every row starts at
    a multiple of CACHE_LINE bytes."""
    return out.nbytes >= STREAM_BYTES and out.shape[2] * out.element_size() % CACHE_LINE == 0


def adjoint(
    x: Tensor, coef: Tensor, starts: Tensor, max_spikes: float, record: bool,
    gspikes: Tensor, gvmem: Tensor, gisyn: Tensor, gstate: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of `forward` with respect to x, coef and state."""
    (batch, steps, _), neurons, synapses = x.shape, coef.shape[0], coef.shape[1] - BETA
    with training():
        gx = empty(tuple(x.shape), x)
    streamed = _is_streamed(gx)
    kernel = RUN_LIF_ADJOINT[synapses == 1, record]
    inputs, g_inputs, upstream = flat(x), flat(gx), tuple(map(flat, (gspikes, gvmem, gisyn)))
    packed_coef, packed_gstate, starts_np = pack(coef), pack(gstate), starts.detach().numpy()
    gcoef = torch.zeros(batch, *packed_coef.shape, dtype=x.dtype).numpy()

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
            raise NonFiniteError(
                f"{name} must be finite, got {float(values[at])} at index {at} and "
                f"{len(wrong) - 1} more non-finite values; remove or replace them"
            )
    raise NonFiniteError(
        f"the neurons overflowed {after.dtype}; scale the input (largest magnitude "
        f"{float(x.abs().max()):g}) or lower the decay factors"
    )
