"""Spikes of a clip as sparse events, the one form they are stored and read in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from amtcore.errors import ParameterError
from amtcore.missing_packages import needed_packages

if TYPE_CHECKING:
    from torch import Tensor

#: Columns of an event: step since the start of the signal, neuron, spikes.
EVENT_COLUMNS = ("frame", "channel", "count")
#: Steps that a 32-bit frame column can count; 13 hours at 44.1 kHz, 24 days at 1 kHz.
MAX_STEPS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class SpikeEvents:
    """Spikes of a stretch of time, sparse: one event where a neuron fired in a step.

    Args:
        frame: Step of each event, counted from the start of the signal, ascending.
        channel: Neuron of each event, ascending within a step.
        count: Spikes of each event, 1 or more.
        first_frame: First step of the stretch.
        n_frames: Steps of the stretch.
        n_channels: Neurons.

    Invariants:
        `SpikeEvents.from_dense(events.dense(), events.first_frame)` holds the same values.

    >>> events = SpikeEvents.from_dense(np.array([[0, 2], [0, 0], [1, 0]]))
    >>> events.frame.tolist(), events.channel.tolist(), events.count.tolist()
    ([0, 2], [1, 0], [2, 1])
    """

    frame: NDArray[np.int64]
    channel: NDArray[np.int32]
    count: NDArray[np.int32]
    first_frame: int
    n_frames: int
    n_channels: int

    @classmethod
    def from_dense(cls, counts: NDArray[Any], first_frame: int = 0) -> SpikeEvents:
        """From counts (step, neuron)."""
        step, channel = np.nonzero(counts)
        frame, count = step.astype(np.int64) + first_frame, counts[step, channel].astype(np.int32)
        return cls(frame, channel.astype(np.int32), count, first_frame, *counts.shape)

    @classmethod
    def concatenate(cls, parts: Sequence[SpikeEvents]) -> SpikeEvents:
        """One stretch from stretches that follow each other without a gap."""
        if not parts:
            raise ParameterError("expected at least one stretch of events, got none")
        at = parts[0].first_frame
        for part in parts:
            if part.first_frame != at or part.n_channels != parts[0].n_channels:
                raise ParameterError(
                    f"expected a stretch that starts at step {at} with {parts[0].n_channels} "
                    f"channels, got step {part.first_frame} and {part.n_channels}"
                )
            at += part.n_frames
        first, channels = parts[0].first_frame, parts[0].n_channels
        columns = zip(*((part.frame, part.channel, part.count) for part in parts), strict=True)
        frame, channel, count = map(np.concatenate, columns)
        return cls(frame, channel, count, first, at - first, channels)

    def to_columns(self) -> NDArray[np.int32]:
        """The events as a table (event, `EVENT_COLUMNS`), as they are stored.

        >>> SpikeEvents.from_dense(np.array([[0, 2], [1, 0]])).to_columns().tolist()
        [[0, 1, 2], [1, 0, 1]]
        """
        steps = self.first_frame + self.n_frames
        if steps > MAX_STEPS:
            raise ParameterError(
                f"events are stored for up to {MAX_STEPS} steps, got {steps}: lower step_rate_hz "
                "or cut the signal"
            )
        return np.stack((self.frame.astype(np.int32), self.channel, self.count), axis=1)

    @classmethod
    def from_columns(
        cls, columns: NDArray[np.integer[Any]], first_frame: int, n_frames: int, n_channels: int
    ) -> SpikeEvents:
        """The inverse of `to_columns`."""
        frame, channel, count = (columns[:, k].astype(np.int32) for k in range(3))
        return cls(frame.astype(np.int64), channel, count, first_frame, n_frames, n_channels)

    def __len__(self) -> int:
        """Number of events."""
        return len(self.frame)

    @property
    def n_spikes(self) -> int:
        """Sum of all counts."""
        return int(self.count.sum(dtype=np.int64))

    def dense(self) -> NDArray[np.int32]:
        """Counts (step, neuron); row 0 is `first_frame`."""
        counts = np.zeros((self.n_frames, self.n_channels), np.int32)
        counts[self.frame - self.first_frame, self.channel] = self.count
        return counts

    def sparse_tensor(self) -> Tensor:
        """Counts as a coalesced sparse COO tensor (step, neuron) of int32."""
        with needed_packages("SpikeEvents.sparse_tensor"):
            import torch  # takes seconds to load, and readers of rows may do without

        indices = np.stack((self.frame - self.first_frame, self.channel.astype(np.int64)))
        values, size = torch.from_numpy(self.count.copy()), (self.n_frames, self.n_channels)
        with torch.sparse.check_sparse_tensor_invariants():
            return torch.sparse_coo_tensor(
                torch.from_numpy(indices), values, size, is_coalesced=True
            )
