"""The stages that models are built from, as nn.Modules with explicit state.

They may import `arguments`, `kernels`, `filter_design`, `scales` and `tables`, never a model.
"""

from amtcore.stages.adaptation import AdaptLoop
from amtcore.stages.binaural_loudness import Moore2016BinauralLoudness
from amtcore.stages.butterworth import ButterworthFilter
from amtcore.stages.compression import BrokenStickCompression, PowerCompression, SquaringExpansion
from amtcore.stages.drnl import DRNLFilterbank
from amtcore.stages.ears import HeadphoneFilter, MiddleEarFilter
from amtcore.stages.excitation import ERBIntegration, ExcitationPattern, Moore2016ExcitationPattern
from amtcore.stages.gammatone import GammatoneFilterbank
from amtcore.stages.hair_cell import IHCEnvelope
from amtcore.stages.hair_cell_membrane import IHCPaulick2024
from amtcore.stages.king_modulation import (
    FastKing2019ModulationFilterbank,
    King2019ModulationFilterbank,
)
from amtcore.stages.loudness_ear import LoudnessEar
from amtcore.stages.loudness_integration import (
    LoudnessIntegration,
    Moore2016AGC,
    Moore2016TemporalIntegration,
)
from amtcore.stages.modulation import FastModulationFilterbank, ModulationFilterbank
from amtcore.stages.outer_middle_ear import OuterMiddleEarFilter
from amtcore.stages.resample import Resampler
from amtcore.stages.specific_loudness import Moore2016SpecificLoudness, SpecificLoudness
from amtcore.stages.spectrum import Moore2016Spectrum, MultiResolutionFFT
from amtcore.stages.spiking.layer import LIFExodus

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
