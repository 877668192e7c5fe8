"""What torch itself does in a model on a GPU: bytes moved, products, and launches.

Counted by running the model on tensors that have shapes but no values (see `device_watch` of the
tests), at a batch as a job would have it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.chips import Chip
from tests.amtcore.device_watch import CUDA, AbsentDevice, tensors

#: What the CPU takes to start one operation of torch.
LAUNCH_S = 8e-6
#: How often a long transform goes through memory.
_TRANSFORM_WAYS = 3
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_NOT_OURS = ("amtcore", "prim", "prims")


@dataclass(frozen=True)
class TorchWork:
    """For one second of audio of every clip of a batch.

    Args:
        batch: Clips.
        bytes: Read and written by operations, of one clip.
        flops: Of matrix products, of one clip.
        launches: Operations, of the whole batch.
    """

    batch: int
    bytes: float
    flops: float
    launches: float

    def seconds(self, chip: Chip) -> float:
        """Of the chip for a second of audio of one clip, or of the CPU that starts operations."""
        busy = self.bytes / chip.bytes_s + self.flops / chip.flops_s
        return max(busy, self.launches * LAUNCH_S / self.batch)


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.flops = self.launches = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace in _NOT_OURS:
            return out
        given, made = tensors((args, kwargs)), tensors(out)
        self.launches += 1
        moved = sum(x.numel() * x.element_size() for x in (*given, *made))
        self.bytes += moved * (_TRANSFORM_WAYS if "fft" in func.overloadpacket.__name__ else 1)
        if func.overloadpacket.__name__ in _PRODUCTS:
            self.flops += 2 * given[-2].numel() * given[-1].shape[-1]
        return out


def torch_work(call: Callable[[Tensor], Any], shape: tuple[int, ...], seconds: float) -> TorchWork:
    """Count a call.

    Args:
        call: A module, which is moved to the device for it, or a function.
        shape: Of its input, the batch first.
        seconds: Of audio in a clip.
    """
    device, counting = AbsentDevice(CUDA), _Counting()
    taken = device.take(call) if isinstance(call, nn.Module) else call
    batch = shape[0]
    x = device.like(torch.empty(shape, device="meta"), torch.float32)
    with device.watching(), torch.no_grad(), counting:
        taken(x)
    scale = 1.0 / (batch * seconds)
    return TorchWork(
        batch, counting.bytes * scale, counting.flops * scale, counting.launches / seconds
    )
