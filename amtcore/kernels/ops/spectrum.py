"""Running spectra by the kernel for numbers alone, see `ops.excitation`."""

from __future__ import annotations

from torch import Tensor

from amtcore.kernels.families.spectrum import runner
from amtcore.kernels.families.spectrum.reference import SIDE as SIDE
from amtcore.kernels.families.spectrum.reference import Factors as Factors


def powers(x: Tensor, factors: Factors, components: int) -> Tensor:
    """(.., time) -> (.., frame, component), see `reference.powers`."""
    made = runner.powers(x.detach().flatten(0, -2), factors, components)
    return made.unflatten(0, x.shape[:-1])
