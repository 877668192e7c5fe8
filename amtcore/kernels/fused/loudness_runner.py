"""From tensors to the kernel of the loudness models: one signal at a time, on the caller's thread.

Blocks of signals go to threads already, see `models.frame_blocks`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from torch import Tensor

from amtcore.kernels.families.excitation.reference import Tables
from amtcore.kernels.families.spectrum.reference import EVEN, ODD, REACH, SIDE, Factors
from amtcore.kernels.fused.loudness import run_ears


class Frames(NamedTuple):
    """How samples become specific loudness.

    Args:
        factors: Of the spectra.
        limits: (3,), what components must be above: (strongest a, at least b) c.
        starts: Of every group of components its first, and the end of the last; int64.
        weights: (component, NODES).
        level_blocks: Of the weights of levels, as `excitation.runner.blocks_of` has them.
        places: Levels.
        tables: Of the excitation patterns.
        law: Rows of `loudness.reference.law_rows`.
        high: Of the law at very high levels: divisor and exponent.
    """

    factors: Factors
    limits: Tensor
    starts: Tensor
    weights: Tensor
    level_blocks: Tensor
    places: int
    tables: Tables
    law: Tensor
    high: tuple[float, float]


class Prepared:
    """The same as the kernel takes them.

    Args:
        frames: Of the models, float32; LANES channels or more.
    """

    def __init__(self, frames: Frames) -> None:
        basis, values, plan = (table.numpy() for table in frames.factors)
        self._reach, self._hop = int(plan[:, REACH].max()), basis.shape[1]
        columns = int((plan[:, REACH] * (plan[:, EVEN] + plan[:, ODD])).max()) + SIDE
        tables = frames.tables
        self.channels, sources = tables.away.shape
        log_divisor, exponent = math.log(frames.high[0]), frames.high[1]
        components = int(frames.starts[-1])
        self._of_spectra = (self._reach, basis, values, plan, columns, components)
        self._of_levels = (
            frames.limits.numpy(), frames.starts.numpy(), frames.weights.numpy().ravel(), sources,
            frames.level_blocks.numpy(), frames.places,
        )  # fmt: skip
        self._of_patterns = tuple(
            table.contiguous().numpy()
            for table in (
                tables.away, tables.line, tables.before, tables.share, tables.blocks, frames.law
            )
        )  # fmt: skip
        self._law = self._of_patterns[-1].ravel(), np.array([log_divisor, exponent])

    def n_frames(self, samples: int) -> int:
        """Frames whose windows lie wholly in so many samples."""
        return samples // self._hop - 2 * self._reach + 1

    def specific(self, x: Tensor, rows: Tensor) -> bool:
        """Specific loudness of one signal.

        Args:
            x: (ear, sample).
            rows: (frame, ear channel or more), where it goes, as many frames as are wanted.
        Returns:
            Whether that worked; false where samples are not finite, or their powers.
        """
        out = rows.numpy()
        return not run_ears(
            x.contiguous().numpy(), *self._of_spectra, *self._of_levels, *self._of_patterns[:-1],
            *self._law, len(out), out.reshape(-1), out.shape[1],
        )  # fmt: skip
