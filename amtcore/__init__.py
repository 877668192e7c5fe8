"""Auditory models: exact numerics, no file access, importable alone.

It imports no other package of this repository; pyproject.toml has the order of its rooms.
Names are loaded when they are first used, so that a room without models costs no import of torch.

>>> import torch
>>> from amtcore import Dau1997
>>> model = Dau1997(fs=16000)
>>> len(model(torch.zeros(1600)))
31
"""

# ruff: noqa: F403, F405
from importlib import import_module
from typing import TYPE_CHECKING, Any

from amtcore.missing_packages import needed_packages

if TYPE_CHECKING:
    from amtcore.kernels.vector.arrays import set_buffer_limit
    from amtcore.kernels.vector.threads import get_num_threads, set_num_threads
    from amtcore.models import *
    from amtcore.stages import *
    from amtcore.units import Calibration

# Names that are in neither of `models` and `stages`.
_HOMES = {
    "Calibration": "amtcore.units",
    "get_num_threads": "amtcore.kernels.vector.threads",
    "set_buffer_limit": "amtcore.kernels.vector.arrays",
    "set_num_threads": "amtcore.kernels.vector.threads",
}
_MODELS = (
    "AuditoryModulationSpectrum",
    "AuditoryNerve",
    "AuditorySpectrogram",
    "CARFAC",
    "Cochleagram",
    "Dau1997",
    "Glasberg2002",
    "King2019",
    "ModulationSpectrum",
    "Moore2016",
    "Osses2021",
    "Paulick2024",
    "ProgrammeLoudness",
    "RateScale",
    "RoughnessDanielWeber",
    "SAI",
    "SRMR",
    "STOI",
    "Sharpness",
    "ZwickerLoudness",
)
_ROOMS = ("errors", "features", "filter_design", "kernels", "models", "scales", "stages", "units")

__all__ = [
    "CARFAC",
    "SAI",
    "SRMR",
    "STOI",
    "AdaptLoop",
    "AuditoryModulationSpectrum",
    "AuditoryNerve",
    "AuditorySpectrogram",
    "BrokenStickCompression",
    "ButterworthFilter",
    "Calibration",
    "Cochleagram",
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
    "ModulationSpectrum",
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
    "ProgrammeLoudness",
    "RateScale",
    "Resampler",
    "RoughnessDanielWeber",
    "Sharpness",
    "SpecificLoudness",
    "SquaringExpansion",
    "ZwickerLoudness",
    "get_num_threads",
    "set_buffer_limit",
    "set_num_threads",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        with needed_packages(f"amtcore.{name}"):
            return import_module(f"amtcore.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "amtcore.models" if name in _MODELS else _HOMES.get(name, "amtcore.stages")
    with needed_packages(f"amtcore.{name}"):
        found = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
