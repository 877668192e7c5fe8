"""A device that is not there: tensors with shapes and a place, and no values to look at.

What looks at a value (`item`, `bool`, `tolist`, `numpy`), picks a shape by values, or mixes devices
raises under torch's fake tensors. On a GPU all but the last would make the CPU wait. `Watch` also
raises at what waits as well and fake tensors allow: copies between the device and the CPU, and
decompositions of matrices.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Autograd has a thread for every CUDA device and finds none here. A lazy device it serves itself:
#: no CPU either, so whatever would wait or mix devices raises there just as well.
CUDA, DIFFERENTIABLE = "cuda", "lazy"


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a result."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


#: Libraries of linear algebra tell the CPU how it went.
_LINEAR_ALGEBRA = re.compile(r"aten\._?linalg_(p?inv|svd|eigh?|solve|lstsq|qr|cholesky|check)")


class Watch(TorchDispatchMode):
    """Raises at every operation that goes between the CPU and a device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = tensors((args, kwargs)), tensors(out)
        # A number in a tensor of its own may be read on the CPU without waiting for anything.
        on_cpu = {each.device.type == "cpu" for each in given if each.ndim}
        from_cpu = {each.device.type == "cpu" for each in given}
        to_cpu = {each.device.type == "cpu" for each in made}
        waits = not (kwargs or {}).get("non_blocking") or False not in to_cpu
        between = given and made and from_cpu.isdisjoint(to_cpu)
        if on_cpu != {True} and _LINEAR_ALGEBRA.match(str(func)):
            raise AssertionError(f"{func} waits for its library to say how it went")
        if len(on_cpu) == 2 or (between and waits):
            places = ", ".join(f"{each.device.type}{tuple(each.shape)}" for each in given)
            raise AssertionError(f"{func} goes between devices: {places}")
        return out


class AbsentDevice:
    """A device of the given kind: modules move to it, tensors are made on it, calls are watched."""

    def __init__(self, kind: str) -> None:
        self.kind, self._mode = kind, FakeTensorMode(allow_non_fake_inputs=False)

    def take(self, module: nn.Module) -> Any:
        """A copy of a module, without its values, that `to` has moved as it moves any module;
        one with parameters, which fake ones do not let `to` replace, is made there instead."""
        made_there = next(module.parameters(), None) is not None

        def emptied(kept: Tensor) -> Tensor:
            device = self.kind if made_there else "cpu"
            empty = torch.empty(kept.shape, dtype=kept.dtype, device=device)
            is_parameter = isinstance(kept, nn.Parameter)
            return nn.Parameter(empty, kept.requires_grad) if is_parameter else empty

        with self._mode:
            without = {id(x): emptied(x) for x in (*module.parameters(), *module.buffers())}
        copied = copy.deepcopy(module, without)
        with self._mode:
            return copied if made_there else copied.to(self.kind)

    def like(self, x: Tensor, dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
        """A signal of the same shape."""
        with self._mode:
            return torch.empty(x.shape, dtype=dtype, device=self.kind, requires_grad=requires_grad)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Raises at whatever would make the CPU wait for the device, or mixes devices."""
        with self._mode, Watch():
            yield
