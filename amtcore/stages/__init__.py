"""The stages that models are built from, as nn.Modules with explicit state."""

from .adaptation import AdaptLoop
from .binaural_loudness import Moore2016BinauralLoudness
from .butterworth import ButterworthFilter
from .compression import BrokenStickCompression, PowerCompression, SquaringExpansion
from .drnl import DRNLFilterbank
from .ears import HeadphoneFilter, MiddleEarFilter
from .excitation import ERBIntegration, ExcitationPattern, Moore2016ExcitationPattern
from .gammatone import GammatoneFilterbank
from .hair_cell import IHCEnvelope
from .hair_cell_membrane import IHCPaulick2024
from .king_modulation import FastKing2019ModulationFilterbank, King2019ModulationFilterbank
from .loudness_ear import LoudnessEar
from .loudness_integration import (
    LoudnessIntegration,
    Moore2016AGC,
    Moore2016TemporalIntegration,
)
from .modulation import FastModulationFilterbank, ModulationFilterbank
from .outer_middle_ear import OuterMiddleEarFilter
from .resample import Resampler
from .specific_loudness import Moore2016SpecificLoudness, SpecificLoudness
from .spectrum import Moore2016Spectrum, MultiResolutionFFT
from .spiking import LIFExodus

__all__ = [
    "AdaptLoop",
    "BrokenStickCompression",
    "ButterworthFilter",
    "DRNLFilterbank",
    "ERBIntegration",
    "ExcitationPattern",
    "FastKing2019ModulationFilterbank",
    "FastModulationFilterbank",
    "GammatoneFilterbank",
    "HeadphoneFilter",
    "IHCEnvelope",
    "IHCPaulick2024",
    "King2019ModulationFilterbank",
    "LIFExodus",
    "LoudnessEar",
    "LoudnessIntegration",
    "MiddleEarFilter",
    "ModulationFilterbank",
    "Moore2016AGC",
    "Moore2016BinauralLoudness",
    "Moore2016ExcitationPattern",
    "Moore2016SpecificLoudness",
    "Moore2016Spectrum",
    "Moore2016TemporalIntegration",
    "MultiResolutionFFT",
    "OuterMiddleEarFilter",
    "PowerCompression",
    "Resampler",
    "SpecificLoudness",
    "SquaringExpansion",
]
