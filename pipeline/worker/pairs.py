"""Rows with a reference recording (`source.reference_column`), for models that compare the two.

A model of pairs gets an array of two signals, the reference first. All other models get the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from earmill.pipeline.audio.decode import AudioFacts
from earmill.pipeline.common import errors
from earmill.pipeline.formats.row_table import REFERENCE_FACTS
from earmill.pipeline.formats.rows import Scalar
from earmill.pipeline.sources.base import Fetched, Item

Signal = npt.NDArray[np.float32]
# Recordings of a pair may differ by this much in length: encoders and edits add or cut some ms.
PAIR_TOLERANCE_S = 0.05


@dataclass(frozen=True, slots=True)
class PairStream:
    """The bytes of a row and of its reference recording."""

    own: BinaryIO
    reference: BinaryIO
    item: Item  # The reference recording, see `reference_item`.

    @property
    def failure(self) -> OSError | None:
        """The failed read of the row's own bytes, see `check_arrived`."""
        return getattr(self.own, "failure", None)

    def close(self) -> None:
        self.own.close()
        self.reference.close()


FetchedRow = tuple[Item, BinaryIO | PairStream | errors.RowError]


def joined(
    rows: Iterator[Fetched], references: Iterator[Fetched], column: str
) -> Iterator[FetchedRow]:
    """Yield each row with the streams of both recordings, or with the error of one recording. Rows
    with a value in `column` have a reference recording in `references`."""
    for item, own in rows:
        reference: BinaryIO | errors.RowError
        one = item
        if item.reference is None:
            reference = errors.MissingReferenceError(
                f"{item.uri}: expected a reference recording, got nothing in column {column!r}; "
                "name its file in the source"
            )
        else:
            one, reference = next(references)
            if isinstance(reference, errors.RowError):
                reference = _reference_error(one, reference)
        if isinstance(own, errors.RowError):
            if not isinstance(reference, errors.RowError):
                reference.close()
            yield item, own
        elif isinstance(reference, errors.RowError):
            own.close()
            yield item, reference
        else:
            yield item, PairStream(own, reference, one)
    next(references, None)  # its end confirms which files are missing


@dataclass(frozen=True, slots=True, eq=False)
class ReferenceAudio:
    """A decoded reference recording: its waveform is (channel, time)."""

    item: Item
    waveform: Signal
    audio: AudioFacts

    def ears(self, rows: slice) -> Signal:
        """Return the reference of some channels of a row. A mono recording is the reference of all
        channels."""
        if len(self.waveform) == 1:
            return self.waveform
        if rows.stop > len(self.waveform):
            channels = len(self.waveform)
            raise errors.ChannelIndexError(f"expected a channel {rows.start}, got {channels}")
        return self.waveform[rows]

    def facts(self) -> dict[str, Scalar]:
        return dict(zip(REFERENCE_FACTS, (self.item.uri, self.audio.pcm_sha256), strict=True))


@contextmanager
def reference_errors(reference: Item) -> Iterator[None]:
    """Turn the errors of a reference recording into errors of its row."""
    try:
        yield
    except errors.RowError as error:
        raise _reference_error(reference, error) from error


def _reference_error(reference: Item, error: errors.RowError) -> errors.RowError:
    kind = errors.MissingReferenceError if error.stage == "fetch" else errors.BadReferenceError
    text = str(error).removeprefix(f"{reference.uri}: ")
    return kind(f"reference recording {reference.uri}: {error.error_class}: {text}")


def aligned(item: Item, own: Signal, reference: Item, other: Signal, fs_hz: float) -> Signal:
    """Return (2, time), the reference first, cut to the shorter signal; PairLengthError if the
    lengths differ by more than `PAIR_TOLERANCE_S`."""
    length = min(len(own), len(other))
    if max(len(own), len(other)) - length > PAIR_TOLERANCE_S * fs_hz:
        raise errors.PairLengthError(
            f"{item.uri}: expected a length within {PAIR_TOLERANCE_S * 1000:g} ms of its reference "
            f"recording {reference.uri}, which has {len(other) / fs_hz:.3f} s, got "
            f"{len(own) / fs_hz:.3f} s; align and cut the files"
        )
    return np.stack([other[:length], own[:length]])
