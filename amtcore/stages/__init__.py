"""The stages that models are built from, as nn.Modules with explicit state."""

from .adaptation import AdaptLoop
from .gammatone import GammatoneFilterbank
from .hair_cell import IHCEnvelope
from .modulation import ModulationFilterbank
from .spiking import LIFExodus

__all__ = [
    "AdaptLoop",
    "GammatoneFilterbank",
    "IHCEnvelope",
    "LIFExodus",
    "ModulationFilterbank",
]
