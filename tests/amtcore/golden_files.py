"""The stored reference arrays, and how closely each precision must meet them."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch

from ..compare import FLOAT32, FLOAT32_MODULATION, FLOAT64, Tolerance

GOLDEN = Path(__file__).parent.parent / "golden"
DTYPES = {"float64": torch.float64, "float32": torch.float32}


def names(model: str) -> list[str]:
    """The files of one model."""
    return sorted(path.stem for path in GOLDEN.glob(f"{model}__*.npz"))


@functools.cache
def load(name: str) -> dict[str, np.ndarray]:
    """Arrays of one file."""
    with np.load(GOLDEN / f"{name}.npz") as stored:
        return {key: stored[key] for key in stored.files}


def stage_tolerance(key: str, dtype: str) -> Tolerance:
    """For the array `key` of a model with a modulation filterbank."""
    if dtype == "float64":
        return FLOAT64
    return FLOAT32_MODULATION if key.startswith("mod") else FLOAT32
