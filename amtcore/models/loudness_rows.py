"""Blocks of signals to rows of specific loudness by one kernel, for numbers alone.

    rows    | left ear's channels | right ear's channels | zeros |      one row a frame

Rows are as wide as whole vectors of channels, which is how gain controls read them; nothing between
samples and rows is in memory. The numbers are those of the stages, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from amtcore.kernels.ops.loudness_frames import Frames, Prepared
from amtcore.kernels.vector.simd import LANES
from amtcore.models.block_threads import map_blocks
from amtcore.models.frame_blocks import Segment
from amtcore.stages.component_nodes import ComponentStage
from amtcore.stages.excitation import RoexFilters
from amtcore.stages.specific_loudness import CompressiveLaw
from amtcore.stages.spectrum import WindowedSpectrum


@dataclass(frozen=True)
class Rows:
    """Specific loudness of some frames.

    Args:
        values: (batch, frame, width), float32.
        ears: Number of ears.
        channels: Of an ear.
    """

    values: Tensor
    ears: int
    channels: int

    @property
    def specific(self) -> Tensor:
        """The same as (batch, ear, frame, channel), in this memory."""
        used = self.values[..., : self.ears * self.channels]
        return used.unflatten(-1, (self.ears, self.channels)).transpose(1, 2)


def frames_of(
    spectrum: WindowedSpectrum,
    limits: tuple[float, float, float],
    levels: ComponentStage,
    level_weights: tuple[str, ...],
    filters: RoexFilters,
    law: CompressiveLaw,
) -> Frames | None:
    """What the kernel needs of the stages; None where they have none for it.

    Args:
        limits: What components must be above, `FAINTEST` or `INAUDIBLE`.
        levels: Has the nodes, and the weights of the levels per ERB.
        level_weights: Name of these, and what they follow from.
    """
    if not spectrum.has_factors() or filters.backend is not None or len(filters.fc) < LANES:
        return None
    name, *of = level_weights
    blocks, places = levels.derived(f"{name}_blocks", *of), levels.derived(name, *of).shape[1]
    return Frames(
        spectrum.factors(), torch.tensor(limits), *levels.groups(), blocks, places,
        filters.filters(), law.constants_by_channel(), (law.high_divisor, law.high_exponent),
    )  # fmt: skip


def rows_of_blocks(
    together: Sequence[Sequence[Segment | None]],
    heard: Callable[[Sequence[Segment | None]], Sequence[Tensor]],
    specific: Callable[[Tensor], Tensor],
    frames: Frames,
) -> Rows:
    """All blocks of some signals, side by side on the kernels' threads.

    Args:
        together: The blocks that go through the ear at once, all of them in order; None is
            silence. One block or more.
        heard: From these to what the ear lets through of each, (batch, ear, sample).
        specific: From one signal of that to what the stages make of it, (ear, frame, channel):
            for samples that are no finite numbers, which the kernel leaves alone.
        frames: What the kernel needs.
    """
    prepared, segments = Prepared(frames), [s for some in together for s in some if s is not None]
    batch, ears = segments[0].x.shape[:2]
    used = ears * prepared.channels
    *begins, count = accumulate((segment.frames for segment in segments), initial=0)
    places = {s.first: slice(at, at + s.frames) for s, at in zip(segments, begins, strict=True)}
    values = segments[0].x.new_empty(batch, count, used + -used % LANES)
    rows = Rows(values, ears, prepared.channels)

    def make(some: Sequence[Segment | None]) -> None:
        for segment, signals in zip(some, heard(some), strict=True):
            if segment is None:
                continue
            part = places[segment.first]
            values[:, part, used:] = 0.0
            for b, signal in enumerate(signals):
                if not prepared.specific(signal, values[b, part]):
                    rows.specific[b, :, part] = specific(signal)[:, : segment.frames]

    map_blocks(make, together, values.device)
    return rows
