"""Running spectra by the kernel for numbers alone, see `ops.excitation`."""

from __future__ import annotations

import torch
from torch import Tensor

from amtcore.kernels.families.spectrum import runner
from amtcore.kernels.families.spectrum.reference import SIDE as SIDE
from amtcore.kernels.families.spectrum.reference import Factors as Factors


@torch.library.custom_op("amtcore::running_powers", mutates_args=(), device_types="cpu")
def _powers(x: Tensor, tables: list[Tensor], components: int, frames: int) -> Tensor:
    return runner.powers(x, Factors(*tables), components).contiguous()


@_powers.register_fake
def _(x: Tensor, tables: list[Tensor], components: int, frames: int) -> Tensor:
    return x.new_empty(x.shape[0], frames, components)


def powers(x: Tensor, factors: Factors, components: int, frames: int) -> Tensor:
    """(.., time) -> (.., frame, component), see `reference.powers`.

    Args:
        frames: That lie wholly in the signal; a compiler has to be told.
    """
    rows = x.detach().flatten(0, -2)
    if torch.compiler.is_compiling():
        made = _powers(rows, list(factors), components, frames)
    else:
        made = runner.powers(rows, factors, components)
    return made.unflatten(0, x.shape[:-1])
