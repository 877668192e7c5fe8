"""Signals of the drawings, in Pa."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from amtcore.units import db_to_pa


def tone(level_db: float, *, hz: float, seconds: float, fs: float, ramp_s: float = 0.005) -> Tensor:
    """Return a tone with raised-cosine ramps; its steady part has a level in dB SPL."""
    time_s = torch.arange(round(seconds * fs), dtype=torch.float64) / fs
    edge = torch.minimum(time_s, seconds - time_s).clamp(0, ramp_s) / ramp_s
    wave = 2**0.5 * db_to_pa(level_db) * torch.sin(2 * np.pi * hz * time_s)
    return (wave * 0.5 * (1 - torch.cos(np.pi * edge))).float()


def click(samples: int) -> Tensor:
    """Return an impulse: 1 at the first sample."""
    return torch.nn.functional.pad(torch.ones(1), (0, samples - 1))


def decibels(values: Tensor, floor: float = 1e-12) -> np.ndarray:
    """Return 20 log10 of the magnitude."""
    return (20 * values.abs().clamp(min=floor).log10()).numpy()


def spectrum_db(responses: Tensor) -> np.ndarray:
    """Return the magnitude of the spectrum of impulse responses along their last axis, in dB."""
    return decibels(torch.fft.rfft(responses.double(), dim=-1))
