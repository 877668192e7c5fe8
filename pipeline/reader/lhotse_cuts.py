"""Features as manifests of lhotse's cuts. A manifest names a feature set, a stream and a row.

This module registers the storage type `earmill` with lhotse. A process that loads a saved CutSet
imports it by asking for `earmill.to_lhotse`.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import lhotse
import numpy as np
from lhotse.features.io import FeaturesReader, register_reader

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.reader.open import open_features

STORAGE = "earmill"
_opened = lru_cache(maxsize=8)(open_features)


@register_reader
class EarmillReader(FeaturesReader):  # type: ignore[misc]
    """Reads the frames that a manifest of `to_lhotse` names."""

    name = STORAGE

    def __init__(self, storage_path: str, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._uri = storage_path

    def read(
        self, key: str, left_offset_frames: int = 0, right_offset_frames: int | None = None
    ) -> np.ndarray:
        """Return frames of a row; the key is the stream, a slash and the row id."""
        stream, _, row_id = key.partition("/")
        row = _opened(self._uri, streams=(stream,)).by_id(row_id)
        frames: np.ndarray = row.features[stream][left_offset_frames:right_offset_frames]
        return frames


def to_lhotse(uri: str | os.PathLike[str], cuts: Any, *, stream: str | None = None) -> Any:
    """Return a lhotse CutSet with a stream of a feature set as `features`; nothing is copied.

    Args:
        uri: Output of a job: a folder or any fsspec URI. The environment has its credentials.
        cuts: CutSet whose ids are the row ids, as the job has read it, also as Shar. A lazy CutSet
            stays lazy. A cut that has no good row is left out.
        stream: A stream of frames; None takes the only one.
    Raises:
        SourceError: There is no feature set.
        ValueError: There is no such stream of frames.
    Example:
        cuts = earmill.to_lhotse("features", lhotse.CutSet.from_file("cuts.jsonl.gz"))
        cuts[0].load_features()               # (n_frames, width), float32
    """
    features = open_features(uri)
    # A stream with one frame a clip has no rate, which lhotse needs.
    framed = [
        name
        for name, info in features.streams.items()
        if info.layout != "events" and info.frame_rate_hz
    ]
    name = framed[0] if stream is None and len(framed) == 1 else stream
    if name is None or name not in framed:
        raise ValueError(f"expected one of the streams of frames, {framed}, got {stream!r}")
    table, info = features.table, features.streams[name]
    ids, counts = (table[k].to_pylist() for k in ("row_id", layout_of(info).length_column))
    rows: dict[str, tuple[str, int]] = {}
    for row_id, n_frames in zip(ids, counts, strict=True):
        # A row of an archive of Shar has the name of its tar in front.
        cut_id = row_id.rpartition(".tar/")[2]
        if cut_id in rows:
            raise ValueError(
                f"expected one row for each cut, got {rows[cut_id][0]!r} and {row_id!r} for "
                f"{cut_id!r}; give cuts of different archives different ids"
            )
        rows[cut_id] = row_id, n_frames
    _opened.cache_clear()  # A set that was opened before may be of an earlier snapshot.
    place = os.path.abspath(uri) if features.is_local else os.fspath(uri)
    return cuts.filter(partial(_has_row, rows)).map(partial(_with_features, place, info, rows))


def _has_row(rows: Container[str], cut: Any) -> bool:
    return cut.id in rows


def _with_features(
    uri: str, info: StreamInfo, rows: Mapping[str, tuple[str, int]], cut: Any
) -> Any:
    row_id, n_frames = rows[cut.id]
    manifest = lhotse.Features(
        type=f"{info.model}.{info.name}",
        num_frames=n_frames,
        num_features=info.width,
        frame_shift=1 / info.frame_rate_hz,
        sampling_rate=cut.sampling_rate,
        start=cut.start,
        duration=cut.duration,
        storage_type=STORAGE,
        storage_path=uri,
        storage_key=f"{info.name}/{row_id}",
        recording_id=cut.recording_id if cut.has_recording else None,
        channels=cut.channel,
    )
    return replace(cut, features=manifest)
