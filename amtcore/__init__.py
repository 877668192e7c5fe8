"""Auditory models: exact numerics, no file access, importable alone.

>>> import torch
>>> model = Dau1997(fs=16000)
>>> len(model(torch.zeros(1600)))
31
"""

from .models import Dau1997
from .recurrence.threads import get_num_threads, set_num_threads
from .stages import (
    AdaptLoop,
    GammatoneFilterbank,
    IHCEnvelope,
    LIFExodus,
    ModulationFilterbank,
)
from .units import Calibration

__all__ = [
    "AdaptLoop",
    "Calibration",
    "Dau1997",
    "GammatoneFilterbank",
    "IHCEnvelope",
    "LIFExodus",
    "ModulationFilterbank",
    "get_num_threads",
    "set_num_threads",
]
