"""From tensors to a launch of a program's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from amtcore.kernels.vector.lanes import groups_of
from amtcore.kernels.warp import forward
from amtcore.kernels.warp.compiler import compiled
from amtcore.kernels.warp.forward import Program, Row
from amtcore.kernels.warp.launching import FEW_WARPS, MANY_WARPS, Kernel, Launcher


def rows_of(table: NDArray[Any]) -> tuple[Row, ...]:
    """A kernel table as constants."""
    return tuple((int(a), int(b), int(c), int(d)) for a, b, c, d in table)


@dataclass(frozen=True)
class Clips:
    """Where the clips of a launch are, one column each.

    Args:
        table: (5, clip): the order in which they are taken, first sample in the input, length in
            samples, first number in the output, samples of the signal before these.
    """

    table: Tensor

    @classmethod
    def equal(
        cls, batch: int, input_size: int, samples: int, output_size: int, device: torch.device
    ) -> Clips:
        """Signals of one length, one after another; made on the device."""
        number = torch.arange(batch, device=device)
        length, before = torch.full_like(number, samples), torch.zeros_like(number)
        return cls(torch.stack((number, number * input_size, length, number * output_size, before)))

    @classmethod
    def ragged(
        cls, begins: Sequence[int], lengths: Sequence[int], places: Sequence[int],
        starts: Sequence[int], device: torch.device,
    ) -> Clips:  # fmt: skip
        """Signals of any lengths, the longest of which are begun first."""
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        table = torch.tensor([order, begins, lengths, places, starts])
        if device.type == "cuda":
            table = table.pin_memory()
        return cls(table.to(device, non_blocking=True))


def warps_of(double: bool) -> int:
    """What kernels with few numbers in registers leave room for."""
    return FEW_WARPS if double else MANY_WARPS


def start(launcher: Launcher, kernel: Kernel, warps: int, *arguments: Tensor | int) -> None:
    """Launch a kernel whose first parameter is its queue."""
    queue = torch.zeros(1, dtype=torch.int64, device=launcher.device)
    launcher.launch(kernel, warps, (queue, *arguments))


def run_forward(
    launcher: Launcher, program: Program, channels: int, clips: Clips, x: Tensor, coef: Tensor,
    state: Tensor, columns: Tensor, out: Tensor, width: int = 0,
    frame: tuple[int, int, int, int] = (1, 1, 1, 0),
) -> None:  # fmt: skip
    """Run a program over clips.

    Args:
        channels: Of every clip.
        x: All samples.
        coef: (group, rows * LANES).
        state: (clip, group, rows * LANES), changed in place.
        columns: (group, filter, LANES) output column of each lane.
        out: All outputs.
        width: Columns of a pooled frame.
        frame: Samples and frames of their ratio, samples an output, lookahead.
    """
    count, groups = clips.table.shape[1], groups_of(channels)
    if count == 0 or x.numel() == 0:
        return
    kernel = compiled("forward", program, lambda: forward.kernel_of(program), program.warps)
    order, begins, lengths, places, starts = clips.table.unbind()
    warps = min(launcher.resident_warps(kernel), count * groups)
    start(
        launcher, kernel, warps, order, count, groups, channels, x, begins, lengths, coef, state,
        columns, out, places, starts, width, *frame,
    )  # fmt: skip
