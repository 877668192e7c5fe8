"""Queries about torch's state: compilation, export, derivatives, and transforms of torch.func.

Only public names of torch are used. A transform of torch.func shows in its tensors: they have no
memory of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from amtcore.errors import BackendError

#: Devices on which the operators run.
DEVICES = ("cpu", "cuda")
#: Values of a stage's `backend=`, beside None.
BACKENDS = ("reference", "cpu")
_PLAIN = (Tensor, torch.nn.Parameter)


def is_exporting() -> bool:
    """Return True while `torch.export` records, in its non-strict mode.

    Where Dynamo records, a model must run as it does without a compiler. Torch 2.6 has no
    `torch.compiler.is_exporting`.
    """
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def is_plain(tensor: Tensor) -> bool:
    """Return True for a tensor with memory of its own, whose memory a kernel can read.

    A tensor of `vmap`, `grad`, `jvp` and `functionalize` only looks like one: it has no address, or
    address 0. It neither outlives its transform nor works on other threads.
    """
    if type(tensor) not in _PLAIN:
        return False
    try:
        return tensor.data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:
        return False


def is_real(tensor: Tensor) -> bool:
    """Return True for a tensor of torch's own class on the CPU or a CUDA device.

    Tensors inside a transform of torch.func have that class too; tensors of tracers have not.
    """
    return type(tensor) in _PLAIN and tensor.device.type in DEVICES


def has_tangent(tensor: Tensor, unknown: bool = False) -> bool:
    """Return True if the tensor has a forward-mode tangent.

    A tensor of vmap cannot tell, nor can a tensor inside an operator; `unknown` is their answer.
    """
    try:
        return forward_ad.unpack_dual(tensor).tangent is not None
    except RuntimeError:
        return unknown


def is_transformed(*tensors: Tensor) -> bool:
    """Return True inside a transform of torch.func, or if one of the tensors belongs to one.

    Tensors of a transform must not be kept, nor passed to another thread.
    """
    if torch.compiler.is_compiling():
        return False
    # Inside `grad`, `vjp` and `jvp` every new tensor belongs to the transform; in `vmap` only some.
    return any(map(_is_wrapper, (*tensors, torch.zeros(1))))


def _is_wrapper(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.device.type != "meta" and not is_plain(tensor)


def wants_derivative(*tensors: Tensor) -> bool:
    """Return True if a derivative with respect to one of the tensors may be requested.

    Tensors of a transform count: an outer transform that differentiates them is not visible.
    """
    recorded = torch.is_grad_enabled()
    for tensor in tensors:
        if (recorded and tensor.requires_grad) or has_tangent(tensor):
            return True
    return not torch.compiler.is_compiling() and any(map(_is_wrapper, tensors))


def can_run(x: Tensor) -> bool:
    """Return True if a kernel of both working types may run: a CPU, no compiler, no derivative."""
    on_cpu = x.device.type == "cpu" and not torch.compiler.is_compiling()
    return on_cpu and not wants_derivative(x)


def can_compute(*tensors: Tensor) -> bool:
    """Return True if kernels without gradients may run: float32 on the CPU, no derivative.

    An exported program may run on another device, so it gets torch's operators.
    """
    if is_exporting() or wants_derivative(*tensors):
        return False
    return all(
        type(t) in _PLAIN and t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors
    )


def use_reference(x: Tensor, backend: str | None) -> bool:
    """Return True if `backend` asks for the plain loop.

    Raises:
        BackendError: The backend is unknown, or cannot run on `x`.
    """
    if backend not in (None, *BACKENDS):
        raise BackendError(f"backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}")
    if backend == "reference":
        return True
    if x.device.type not in (*DEVICES, "meta"):
        raise BackendError(
            f"there is no fast kernel for device {x.device.type!r}; move the input to the CPU or a "
            "CUDA device, or force backend='reference' (slow, any device)"
        )
    if backend == "cpu" and x.device.type == "cuda":
        raise BackendError(
            f"backend='cpu' computes on tensors of the CPU, got one on {x.device}: move it there, "
            "or leave backend=None, which takes the GPU's kernels"
        )
    return False


def rows_of(x: Tensor) -> Tensor:
    """Return (.., time) as (row, time).

    The reshape goes through one dimension to keep a dynamic time axis exportable. Merging several
    dimensions at once makes `torch.export` compare multiples of the unknown length.
    """
    if x.ndim == 2:
        return x
    return x.reshape(-1).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def by_item(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function to every item of a batch separately: (batch, ..) -> (batch, ..).

    The rounding of sums in torch depends on the shape and alignment of a tensor. Each item is
    copied, so that an item has the same bits in any batch. A compiler and a GPU take the whole
    batch: there the bits may differ.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or len(x) == 0:
        return function(x)
    return torch.cat([function(item.clone()) for item in x.split(1)])
