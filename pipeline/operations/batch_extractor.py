"""A job's models for batches of clips of other tools: Ray Data, datasets, Daft, Dask, Spark.

A batch goes through the row pipeline of a worker, so it has a job's values, checks and messages.
Nothing is committed: the tool that calls stores, retries and counts.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from earmill.pipeline.audio.channels import MIXED
from earmill.pipeline.common.errors import (
    NotAudioError,
    RowError,
    SourceError,
    SpecError,
    UnreadableError,
)
from earmill.pipeline.common.machine import cores
from earmill.pipeline.common.redact import redact
from earmill.pipeline.common.text import one_line
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.sources.audio_cells import audio_cell, check_audio_type, held_blob
from earmill.pipeline.sources.base import Fetched, Item
from earmill.pipeline.sources.fetch import Blob, load_blob
from earmill.pipeline.spec.job import JobSpec, read_mapping
from earmill.pipeline.spec.models import describe_models
from earmill.pipeline.worker.models import warm_models
from earmill.pipeline.worker.row_pipeline import RowProcessor

CLIP, DTYPE = "clip", "float32"
# Sections that a job needs; a batch has neither.
UNUSED = {"source": {"kind": "files", "uri": "-"}, "output": {"uri": "-", "dtype": DTYPE}}


class BatchExtractor:
    """Computes features of batches of clips; a callable for `map_batches`, `map` and UDFs.

    A batch is a mapping of columns. The column `audio` holds the bytes of files, paths or URIs,
    arrays of samples, or mappings like an audio cell of `datasets`. The result has the other
    columns, and for each clip `seconds`, `error`, and the frames of each stream, (n_frames, width)
    in float32; events are (n_events, 3) in int32. A clip that a job would quarantine has no frames
    and a text in `error`, which is empty for other clips. If channels are clips of their own,
    `channel` is their number. Models are built at the first call and stay. Threads may share an
    extractor.

    Args:
        job: A job file (path or URI) or a mapping; `extract`, `audio` and `run` are used, `source`
            and `output` may be missing.
        audio: Name of the column of clips. Arrays have the rate `audio.array_rate_hz` of the job.
    Raises:
        SpecError: The job is not valid, or there is no such model.
    Example:
        extractor = earmill.BatchExtractor({"extract": [{"model": "dau1997"}]}, audio="bytes")
        batch = extractor({"bytes": [open("a.wav", "rb").read()]})
        batch["modulation"][0]                # (n_frames, width)
    """

    def __init__(
        self, job: str | os.PathLike[str] | Mapping[str, Any], *, audio: str = "audio"
    ) -> None:
        sections = job if isinstance(job, Mapping) else read_mapping(os.fspath(job))[1]
        self._job, self._audio = {**sections, **UNUSED}, audio
        self._spec = JobSpec.load(self._job)
        if self._spec.audio.variants is not None:
            raise SpecError(
                "audio.variants: expected a job without variants, because a batch has one result "
                "for each clip; leave them out"
            )
        infos = [info for model in describe_models(self._spec) for info in model.streams]
        self._no_frames = {
            layout.name: np.zeros((0, layout.stored_width), layout.stored_dtype(DTYPE))
            for layout in map(layout_of, infos)
        }
        self._lock = threading.Lock()
        self._built: RowProcessor | None = None

    def __reduce__(self) -> tuple[Callable[..., BatchExtractor], tuple[str, str]]:
        # Text, so that equal jobs have equal pickles: `datasets` hashes them for its cache.
        return _from_json, (json.dumps(self._job, sort_keys=True), self._audio)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the columns of a batch without its audio, and the columns of its features."""
        columns = {name: [*values] for name, values in batch.items()}
        taken = sorted({"seconds", "error", "channel", *self._no_frames} & {*columns})
        if self._audio not in columns or taken:
            wanted = f"without {taken}; rename them" if taken else f"with a column {self._audio!r}"
            raise ValueError(f"expected a batch {wanted}, got the columns {[*columns]}")
        clips = columns.pop(self._audio)
        names = [redact(c) if isinstance(c, str) else f"clip {n}" for n, c in enumerate(clips)]
        audiograms = {k: columns[k] for k in self._spec.listener_columns if k in columns}
        items = [
            Item(str(n), names[n], extra={CLIP: clip, **{k: of[n] for k, of in audiograms.items()}})
            for n, clip in enumerate(clips)
        ]
        done = self._processor().process(items)
        rows: list[FeatureRow | QuarantineRow] = [*done.good, *done.bad]
        rows.sort(key=_place)
        made = {name: [cells[_place(row)] for row in rows] for name, cells in columns.items()}
        made |= {name: [] for name in ("seconds", "error", *self._no_frames)}
        for row in rows:
            seconds, error, streams = 0.0, "", self._no_frames
            if isinstance(row, QuarantineRow):
                error = f"{row.error_class}: {row.message}"
            else:
                seconds, streams = row.seconds, {k: np.asarray(v) for k, v in row.streams.items()}
            for name, cell in {"seconds": seconds, "error": error, **streams}.items():
                made[name].append(cell)
        if self._spec.audio.channels == "each":
            made["channel"] = [getattr(row, "channel", MIXED) for row in rows]
        return made

    def _processor(self) -> RowProcessor:
        with self._lock:
            if self._built is None:
                threads = self._spec.run.threads_per_worker or cores()
                models = warm_models(self._spec, threads, self._spec.run.device)
                clips: Any = _Clips(self._spec.audio.array_rate_hz)
                self._built = RowProcessor(
                    self._spec, clips, models.extractors, decode_threads=threads, gpu=models.gpu
                )
            return self._built


@lru_cache(maxsize=8)  # Tools unpickle an extractor for each task; a process builds it once.
def _from_json(job: str, audio: str) -> BatchExtractor:
    return BatchExtractor(json.loads(job), audio=audio)


def _place(row: FeatureRow | QuarantineRow) -> int:
    """Return the number of a row's clip in its batch."""
    return int(row.row_id.partition("#")[0])


class _Clips:
    """The part of a source that workers use, over clips that the items hold."""

    def __init__(self, array_rate_hz: int | None) -> None:
        self._array_rate_hz = array_rate_hz

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        for item in items:
            try:
                yield item, self._blob(item).opened(item)
            except RowError as error:
                yield item, error

    def _blob(self, item: Item) -> Blob:
        try:
            scalar = pa.array([_as_lists(item.extra[CLIP])])[0]
            check_audio_type("audio", scalar.type, self._array_rate_hz)
        except (pa.ArrowException, SourceError) as error:
            raise NotAudioError(f"{item.uri}: {one_line(error)}") from error
        cell = audio_cell(scalar, self._array_rate_hz)
        if (held := held_blob(cell, item.uri)) is not None:
            return held
        if not cell.path:
            raise UnreadableError(f"{item.uri}: expected bytes, a path or an array, got none")
        blob = load_blob(replace(item, uri=cell.path), lambda uri: {})
        if isinstance(blob, RowError):
            raise UnreadableError(str(blob))  # A batch has no second look at an absent file.
        return blob


def _as_lists(clip: Any) -> Any:
    """Return a clip that Arrow converts: an array of (channels, samples) as a list of channels."""
    if isinstance(clip, Mapping):
        return {name: _as_lists(value) for name, value in clip.items()}
    return list(clip) if isinstance(clip, np.ndarray) and clip.ndim > 1 else clip
