"""What runs compiled kernels: a GPU's driver, or the interpreter in its place.

A kernel is PTX with one entry. Its parameters are 64-bit integers, all of them: sizes and
addresses. A block is one warp, and warps take their work from a queue in memory, so a launch says
only how many warps there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Threads of a block: one warp.
THREADS = 32
#: Warps of a multiprocessor that a kernel's registers leave room for. Told so, a GPU's compiler
#: spills none for yet more warps, nor takes them all for fewer: with many there is something to do
#: while one waits. Few for a kernel that holds more in registers, as those of float64 do.
MANY_WARPS, FEW_WARPS = 12, 8


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel.

    Args:
        name: Its entry.
        ptx: The text, for `sm_80` and newer.
    """

    name: str
    ptx: str


class Launcher(ABC):
    """Runs kernels on the tensors of one device.

    Attributes:
        name: What provenance calls it: "cuda" or "interpreted".
        device: Where the tensors lie that kernels read and write.
    """

    name: str
    device: torch.device

    @abstractmethod
    def resident_warps(self, kernel: Kernel) -> int:
        """How many warps of this kernel the device holds at once: more have nothing to run on."""

    @abstractmethod
    def launch(self, kernel: Kernel, warps: int, arguments: Sequence[Tensor | int]) -> None:
        """Start a kernel on the current stream; a driver returns at once.

        Args:
            kernel: What to run.
            warps: Blocks of one warp, 1 or more.
            arguments: In the order of the kernel's parameters: contiguous tensors on `device`,
                whose address is passed, and integers.
        """
