"""What every set of rows can do, whether it is one feature set or several end to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, SupportsIndex

import numpy as np
import pyarrow as pa

from earmill.pipeline.loader.epoch_order import Rows
from earmill.pipeline.loader.read_row import Row

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo


class FeatureRows(Protocol):
    """Rows by number, and what a shuffled order of them is made of."""

    @property
    def streams(self) -> dict[str, StreamInfo]:
        """Descriptions of the streams that are read, by name."""

    @property
    def dtypes(self) -> dict[str, np.dtype]:
        """The type of the frames of each stream."""

    @property
    def nbytes(self) -> int:
        """Size of all features as stored, uncompressed."""

    @property
    def fingerprint(self) -> str:
        """Changes when the set does."""

    @property
    def table(self) -> pa.Table:
        """One line a row, in the order of the rows."""

    @property
    def is_local(self) -> bool:
        """Whether all of it lies in files of this machine, or in what it has mounted."""

    @property
    def mixture(self) -> tuple[int, ...] | None:
        """Rows of each set in an epoch, where sets are mixed by weight; else None."""

    def block_rows(self) -> np.ndarray:
        """Rows per row group, in order: what is cheap to read together."""

    def block_order(self, *, shuffle: bool, seed: int, epoch: int) -> tuple[Rows, Rows]:
        """Rows of an epoch in the order of shuffled blocks, and the pass of its set for each."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: SupportsIndex, /) -> Row:
        """Row by number."""

    def prefetch(
        self, rows: Sequence[int], spans_s: Sequence[tuple[float, float] | None] | None = None
    ) -> None:
        """Say which rows, or stretches of them, are read next, the first of them now; it changes no
        result."""

    def slice(self, index: SupportsIndex, start_s: float, stop_s: float | None = None) -> Row:
        """The frames of a row in a stretch of time."""
