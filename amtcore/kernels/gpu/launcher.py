"""Launchers of compiled kernels: a GPU's driver, or an interpreter in its place.

A kernel is PTX with one entry. All its parameters are 64-bit integers: sizes and addresses. A block
is one warp. Warps take work from a queue in memory, so a launch states only the number of warps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Threads of a block: one warp.
THREADS = 32
#: Warps of a multiprocessor that a kernel's registers must leave room for: the driver's compiler
#: then neither spills registers for more warps nor uses them up for fewer. More warps hide more
#: latency. FEW_WARPS is for kernels that need more registers, such as float64 kernels.
MANY_WARPS, FEW_WARPS = 12, 8


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: the name of its entry, and its PTX for `sm_80` and newer."""

    name: str
    ptx: str


class Launcher(ABC):
    """Runs kernels on the tensors of one device.

    Attributes:
        name: Name in provenance: "cuda" or "interpreted".
        device: Device of the tensors that kernels read and write.
    """

    name: str
    device: torch.device

    @abstractmethod
    def resident_warps(self, kernel: Kernel) -> int:
        """Return how many warps of this kernel the device can run at once."""

    @abstractmethod
    def launch(self, kernel: Kernel, warps: int, arguments: Sequence[Tensor | int]) -> None:
        """Start a kernel with 1 or more warps on the current stream, without waiting for it.

        The arguments are integers and contiguous tensors on `device`, passed by address.
        """
