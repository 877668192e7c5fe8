"""The stages that models are built from, as nn.Modules with explicit state.

They may import `arguments`, `kernels`, `filter_design`, `scales` and `tables`, never a model.
"""

from amtcore.stages.adaptation import AdaptLoop
from amtcore.stages.basilar_membrane import DRNLFilterbank, GammatoneFilterbank
from amtcore.stages.binaural_loudness import Moore2016BinauralLoudness
from amtcore.stages.butterworth import ButterworthFilter
from amtcore.stages.compression import BrokenStickCompression, PowerCompression, SquaringExpansion
from amtcore.stages.ears import HeadphoneFilter, LoudnessEar, MiddleEarFilter, OuterMiddleEarFilter
from amtcore.stages.excitation import ERBIntegration, ExcitationPattern, Moore2016ExcitationPattern
from amtcore.stages.fir import Resampler
from amtcore.stages.hair_cells import IHCEnvelope, IHCPaulick2024
from amtcore.stages.lif import LIFExodus
from amtcore.stages.loudness_integration import (
    LoudnessIntegration,
    Moore2016AGC,
    Moore2016TemporalIntegration,
)
from amtcore.stages.modulation import (
    FastKing2019ModulationFilterbank,
    FastModulationFilterbank,
    King2019ModulationFilterbank,
    ModulationFilterbank,
)
from amtcore.stages.specific_loudness import Moore2016SpecificLoudness, SpecificLoudness
from amtcore.stages.spectrum import Moore2016Spectrum, MultiResolutionFFT

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
