"""The stages that models are built from, as nn.Modules with explicit state.

They may import `arguments`, `kernels`, `filter_design`, `scales` and `tables`, never a model.
"""

from amtcore.stages.adaptation import AdaptLoop as AdaptLoop
from amtcore.stages.basilar_membrane import DRNLFilterbank as DRNLFilterbank
from amtcore.stages.basilar_membrane import GammatoneFilterbank as GammatoneFilterbank
from amtcore.stages.butterworth import ButterworthFilter as ButterworthFilter
from amtcore.stages.compression import BrokenStickCompression as BrokenStickCompression
from amtcore.stages.compression import PowerCompression as PowerCompression
from amtcore.stages.compression import SquaringExpansion as SquaringExpansion
from amtcore.stages.ears import HeadphoneFilter as HeadphoneFilter
from amtcore.stages.ears import LoudnessEar as LoudnessEar
from amtcore.stages.ears import MiddleEarFilter as MiddleEarFilter
from amtcore.stages.ears import OuterMiddleEarFilter as OuterMiddleEarFilter
from amtcore.stages.excitation import ERBIntegration as ERBIntegration
from amtcore.stages.excitation import ExcitationPattern as ExcitationPattern
from amtcore.stages.excitation import Moore2016ExcitationPattern as Moore2016ExcitationPattern
from amtcore.stages.fir import Resampler as Resampler
from amtcore.stages.hair_cells import IHCEnvelope as IHCEnvelope
from amtcore.stages.hair_cells import IHCPaulick2024 as IHCPaulick2024
from amtcore.stages.lif import LIFExodus as LIFExodus
from amtcore.stages.loudness import LoudnessIntegration as LoudnessIntegration
from amtcore.stages.loudness import Moore2016AGC as Moore2016AGC
from amtcore.stages.loudness import Moore2016BinauralLoudness as Moore2016BinauralLoudness
from amtcore.stages.loudness import Moore2016SpecificLoudness as Moore2016SpecificLoudness
from amtcore.stages.loudness import (
    Moore2016TemporalIntegration as Moore2016TemporalIntegration,
)
from amtcore.stages.loudness import SpecificLoudness as SpecificLoudness
from amtcore.stages.modulation import (
    FastKing2019ModulationFilterbank as FastKing2019ModulationFilterbank,
)
from amtcore.stages.modulation import FastModulationFilterbank as FastModulationFilterbank
from amtcore.stages.modulation import King2019ModulationFilterbank as King2019ModulationFilterbank
from amtcore.stages.modulation import ModulationFilterbank as ModulationFilterbank
from amtcore.stages.spectrum import Moore2016Spectrum as Moore2016Spectrum
from amtcore.stages.spectrum import MultiResolutionFFT as MultiResolutionFFT
