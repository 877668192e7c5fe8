"""Rows that a worker hands to the writers, good or quarantined, and the files written of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from earmill.pipeline.formats.values import CastError, Values
from earmill.pipeline.storage.documents import Strict

Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class FeatureRow:
    """One clip (or one channel of it) with its features and everything known about its origin.

    Args:
        row_id: Unique in the dataset; channel policy `each` makes it `<plan row id>#ch<k>`.
        plan_row_id: The row of the plan this came from.
        channel: Source channel index, -1 for mixed or only.
        seconds: Duration of the audio the features stand for, s.
        facts: Provenance by name (uri, etag, pcm_sha256, decoder, rate_hz, gain_db, ...).
        extra: The source's own columns, carried through.
        streams: Stream name to (n_frames, width), already in the output dtype; of a stream of
            events to (n_events, 3) in int32, see `formats.stream_layout`. Values of a long clip
            lie in files, see `earmill.pipeline.formats.values`.
        steps: Name of each stream of events, or of frames in int8, to the steps or frames of the
            clip.
        cast_errors: Name of each stream of frames to what the cast into the output dtype cost.
    """

    row_id: str
    plan_row_id: str
    channel: int
    seconds: float
    facts: Mapping[str, Scalar]
    extra: Mapping[str, Any]
    streams: Mapping[str, Values] = field(repr=False)
    steps: Mapping[str, int] = field(default_factory=dict)
    cast_errors: Mapping[str, CastError] = field(default_factory=dict)


@dataclass(frozen=True)
class QuarantineRow:
    """One row that could not be processed: a plan row, or `<plan row id>#ch<k>` if only one channel
    failed. `stage` is fetch, decode, channels, resample, extract or worker."""

    row_id: str
    uri: str
    stage: str
    error_class: str
    message: str
    attempts: int


@dataclass(frozen=True)
class OutFile(Strict):
    """One published file: path relative to the root, bytes, and sha256 of the content."""

    path: str
    bytes: int
    sha256: str
