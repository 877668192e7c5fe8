"""Features of a clip on their way into a row: checked, cast, joined.

A stream is an array of frames, or the events of a clip (`SpikeEvents`). Frames are
cast by `formats.values`; events become a table of whole numbers. Features of a long clip come
stretch by stretch and are held in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.pipeline.common.errors import DtypeRangeError, NonFiniteFeatureError, RowError
from earmill.pipeline.formats.values import BLOCK_FRAMES, Caster, CastError, Frames, Spilled, Values

if TYPE_CHECKING:
    from amtcore.features.base import Extractor

# Stream name -> frames, or the events of a stretch.
ModelOutput = Mapping[str, Any]


@contextmanager
def as_row_errors() -> Iterator[None]:
    """Turn a model's NonFiniteError into a RowError: neurons have no NaN to return, and no model
    takes samples that calibration or resampling made infinite."""
    from amtcore.errors import NonFiniteError  # loads torch, which only workers need

    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteFeatureError(f"the model refused: {error}") from error


def extracted(extractor: Extractor, signals: Sequence[Frames]) -> list[dict[str, Any]]:
    """Return the features of a batch, with a RowError in place of each refused stream."""
    try:
        with as_row_errors():
            return extractor.extract(signals)
    except NonFiniteFeatureError as error:
        if len(signals) == 1:
            return [{info.name: error for info in extractor.streams}]
        return [made for signal in signals for made in extracted(extractor, [signal])]


@dataclass(frozen=True)
class CastFeatures:
    """The features of a row, cast.

    Args:
        streams: As `FeatureRow.streams` has them.
        steps: Steps of the streams of events, and frames of the streams in int8.
        errors: Cast errors of the streams of frames.
        begun: Frames in int8 streams that do not fill a block yet.
    """

    streams: dict[str, Values] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    errors: dict[str, CastError] = field(default_factory=dict)
    begun: dict[str, Frames] = field(default_factory=dict)

    def take(self, name: str, made: Any, cast: Caster, *, last: bool) -> Frames:
        """Return a stretch of a stream, cast, and note its steps and cast errors.

        A RowError in place of the stretch is raised.

        Args:
            last: No stretch follows.
        """
        if isinstance(made, RowError):
            raise made
        if isinstance(made, np.ndarray):
            if name in cast.in_blocks:
                self.steps[name] = self.steps.get(name, 0) + len(made)
                made = self._full_blocks(name, made, last)
            frames, error = cast(name, made)
            self.errors[name] = self.errors.get(name, CastError()) + error
            return frames
        self.steps[name] = made.first_frame + made.n_frames
        try:
            columns: Frames = made.to_columns()
        except ValueError as error:
            raise DtypeRangeError(f"stream {name}: {error}") from error
        return columns

    def _full_blocks(self, name: str, made: Frames, last: bool) -> Frames:
        """Return the frames of full int8 blocks; later frames wait for the next stretch."""
        held = np.concatenate([self.begun[name], made]) if name in self.begun else made
        due = len(held) if last else len(held) // BLOCK_FRAMES * BLOCK_FRAMES
        self.begun[name] = held[due:].copy()
        return held[:due]


def stored(made: ModelOutput, cast: Caster) -> CastFeatures:
    """Cast the features of a clip."""
    whole = CastFeatures()
    for name, values in made.items():
        whole.streams[name] = whole.take(name, values, cast, last=True)
    return whole


def spill(
    whole: CastFeatures, made: ModelOutput, cast: Caster, folder: str | None, *, last: bool = False
) -> None:
    """Cast the next stretch of a long clip and append it to files in `folder`.

    Args:
        last: No stretch follows.
    """
    for name, stretch in made.items():
        rows = whole.take(name, stretch, cast, last=last)
        if name not in whole.streams:
            whole.streams[name] = Spilled(rows.dtype, rows.shape[1], folder)
        whole.streams[name].append(rows)  # type: ignore[union-attr]
