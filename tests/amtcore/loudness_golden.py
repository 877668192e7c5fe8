"""The stored references of the loudness models, the signals of their anchors, one thread."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from amtcore.units import db_to_pa

from . import golden_files

FILES = [name.removeprefix("loudness__") for name in golden_files.names("loudness")]
FS = 32000


def load(name: str) -> dict[str, np.ndarray]:
    """Arrays of one file."""
    return golden_files.load(f"loudness__{name}")


def tone(f_hz: float, level_db: float, seconds: float = 0.5, fs: int = FS) -> Tensor:
    """A steady tone in Pa, float64."""
    t = torch.arange(round(seconds * fs), dtype=torch.float64) / fs
    return 2**0.5 * db_to_pa(level_db) * torch.sin(2 * torch.pi * f_hz * t)


def noise(*shape: int, rms_pa: float = 0.02, seed: int = 0) -> Tensor:
    """White noise in Pa, float32."""
    generator = torch.Generator().manual_seed(seed)
    return rms_pa * torch.randn(*shape, generator=generator)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrix products of a few frames on one thread: two mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
