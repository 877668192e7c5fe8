"""Auditory models: exact numerics, no file access, importable alone.

It may import nothing of `earmill`; see the contracts in pyproject.toml for the order of its rooms.

>>> import torch
>>> model = Dau1997(fs=16000)
>>> len(model(torch.zeros(1600)))
31
"""

from amtcore.kernels.vector.result_pool import set_buffer_limit
from amtcore.kernels.vector.threads import get_num_threads, set_num_threads
from amtcore.models import Dau1997, Glasberg2002, King2019, Moore2016, Osses2021, Paulick2024
from amtcore.stages import (
    AdaptLoop,
    BrokenStickCompression,
    ButterworthFilter,
    DRNLFilterbank,
    ERBIntegration,
    ExcitationPattern,
    FastKing2019ModulationFilterbank,
    FastModulationFilterbank,
    GammatoneFilterbank,
    HeadphoneFilter,
    IHCEnvelope,
    IHCPaulick2024,
    King2019ModulationFilterbank,
    LIFExodus,
    LoudnessEar,
    LoudnessIntegration,
    MiddleEarFilter,
    ModulationFilterbank,
    Moore2016AGC,
    Moore2016BinauralLoudness,
    Moore2016ExcitationPattern,
    Moore2016SpecificLoudness,
    Moore2016Spectrum,
    Moore2016TemporalIntegration,
    MultiResolutionFFT,
    OuterMiddleEarFilter,
    PowerCompression,
    Resampler,
    SpecificLoudness,
    SquaringExpansion,
)
from amtcore.units import Calibration

__all__ = [
    "AdaptLoop",
    "BrokenStickCompression",
    "ButterworthFilter",
    "Calibration",
    "DRNLFilterbank",
    "Dau1997",
    "ERBIntegration",
    "ExcitationPattern",
    "FastKing2019ModulationFilterbank",
    "FastModulationFilterbank",
    "GammatoneFilterbank",
    "Glasberg2002",
    "HeadphoneFilter",
    "IHCEnvelope",
    "IHCPaulick2024",
    "King2019",
    "King2019ModulationFilterbank",
    "LIFExodus",
    "LoudnessEar",
    "LoudnessIntegration",
    "MiddleEarFilter",
    "ModulationFilterbank",
    "Moore2016",
    "Moore2016AGC",
    "Moore2016BinauralLoudness",
    "Moore2016ExcitationPattern",
    "Moore2016SpecificLoudness",
    "Moore2016Spectrum",
    "Moore2016TemporalIntegration",
    "MultiResolutionFFT",
    "Osses2021",
    "OuterMiddleEarFilter",
    "Paulick2024",
    "PowerCompression",
    "Resampler",
    "SpecificLoudness",
    "SquaringExpansion",
    "get_num_threads",
    "set_buffer_limit",
    "set_num_threads",
]
