"""A Hugging Face dataset: a hub id, a `save_to_disk` folder or Parquet, map-style or streaming.

`datasets` never decodes the audio column; `audio.decode` does, so a broken clip costs one row.
Streamed Parquet is planned from its footers and fetched by row groups (`hf_parquet`). Other streams
are read once for planning, unless `duration_column` is given.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, repeat
from typing import Any, BinaryIO
from urllib.parse import urlencode

import datasets
import pyarrow as pa
from datasets import Dataset, IterableDataset
from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common.arrow_types import Columns, has_text, kept_type
from earmill.pipeline.common.errors import OutsideError, RowError, SourceError, UnreadableError
from earmill.pipeline.common.redact import redact_uris
from earmill.pipeline.common.text import nearest
from earmill.pipeline.sources import audio_cells, base, hf_location
from earmill.pipeline.sources.audio_cells import NOTHING, AudioCell
from earmill.pipeline.sources.base import Fetched, Item, Reference, Source
from earmill.pipeline.sources.confinement import allow_hint
from earmill.pipeline.sources.durations import guess_seconds, header_seconds
from earmill.pipeline.sources.fetch import load_blob
from earmill.pipeline.sources.files import file_info
from earmill.pipeline.sources.hf_location import ParquetSet, RowPlace
from earmill.pipeline.sources.hf_parquet import ListedRow, ParquetRows, Row
from earmill.pipeline.sources.tables import public_value
from earmill.pipeline.spec.source import HfSpec
from earmill.pipeline.storage.backend import is_local

ID_DIGITS = 9
FEATURE_ROWS = 5  # Rows from which the features of a stream are inferred.
PLAN_BATCH_ROWS = 256
HEAD_BYTES = 4


def features_of(spec: HfSpec, dataset: Any) -> Any:
    """Return the features of a dataset; SourceError if a column that the job names is missing."""
    features = dataset.features
    if features is None:  # some streams know them only from their rows
        features = Dataset.from_list(list(dataset.take(FEATURE_ROWS))).features
    audio = (spec.audio_column, spec.reference_column)
    named = [*audio, spec.id_column, spec.duration_column]
    for name in (name for name in named if name is not None):
        if name not in features:
            raise SourceError(
                f"source {spec.uri}: no column {name!r}{nearest(name, list(features))} "
                f"(columns: {', '.join(features)})"
            )
        is_value = isinstance(features[name], datasets.Value | datasets.ClassLabel)
        if not is_value and name not in audio:
            raise SourceError(
                f"source {spec.uri}: expected a column of single values, got {name!r} of "
                f"{_name(features[name])}"
            )
    return features


def carried(spec: HfSpec, features: Any) -> Columns:
    """Return type and class names of every column but audio and ids, or why it is left out."""
    schema = features.arrow_schema
    types, dropped = {}, {}
    labels: dict[str, tuple[str, ...]] = {}
    for name, feature in features.items():
        if name in (spec.audio_column, spec.reference_column, spec.id_column):
            continue
        kind = kept_type(schema.field(name).type)
        if kind is None:
            dropped[name] = _name(feature)
        else:
            types[name] = kind
            labels.update(_labels(name, feature))
    return Columns(types, labels, dropped)


def _labels(path: str, feature: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    if isinstance(feature, datasets.ClassLabel):
        if feature.names:
            yield path, tuple(feature.names)
    elif isinstance(feature, Mapping):
        for name, part in feature.items():
            yield from _labels(f"{path}.{name}", part)
    elif isinstance(feature, datasets.List | datasets.LargeList):
        yield from _labels(f"{path}[]", feature.feature)


def _name(feature: Any) -> str:
    """Return the name of a feature for users: Image, Array2D, binary."""
    return feature.dtype if isinstance(feature, datasets.Value) else type(feature).__name__


class HfSource(Source):
    """The rows of one split.

    Attributes:
        missing: Number of local files that do not exist; `first_missing` names the first file.
        references: Source of the reference recordings, or None. Its uris name its column.
    """

    _dataset: Dataset | IterableDataset

    def __init__(
        self, spec: HfSpec, array_rate_hz: int | None = None, *, is_reference: bool = False
    ) -> None:
        self._spec, self._array_rate_hz = spec, array_rate_hz
        self.missing, self.first_missing = 0, ""
        with base.source_errors(spec.uri), hf_location.quiet():
            hf_location.check_names(spec)
            self._parquet = None
            dataset, self._tag = hf_location.open_dataset(spec)
            if isinstance(dataset, ParquetSet):
                self._parquet = ParquetRows(dataset, spec.audio_column, array_rate_hz)
                dataset = None
        features = features_of(spec, self._parquet if dataset is None else dataset)
        self._carried = Columns() if is_reference else carried(spec, features)
        self._texts = {name for name, kind in self._carried.types.items() if has_text(kind)}
        self._ids = [spec.id_column] if spec.id_column is not None else []
        self._kept = [name for name in features if name in {*self._carried.types, *self._ids}]
        kind = features.arrow_schema.field(spec.audio_column).type
        try:
            audio_cells.check_audio_type(spec.audio_column, kind, array_rate_hz)
        except SourceError as error:
            raise SourceError(f"source {spec.uri}: {error}") from error
        # The type of the audio cells as they are stored.
        self._audio_type = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        if dataset is not None:
            self._dataset = selected(dataset, [spec.audio_column, *self._kept])
            self._cursor = _Cursor(self._dataset)
        self._uri, self._folder, self._inside = hf_location.dataset_place(spec)
        named = {"config": spec.config, "revision": spec.revision, "split": spec.split}
        named |= {"column": spec.audio_column} if is_reference else {}
        query = urlencode({key: value for key, value in named.items() if value is not None})
        self._query = f"?{query}" if query else ""
        self.references: HfSource | None = None
        if spec.reference_column is not None:
            only = {"audio_column": spec.reference_column, "reference_column": None}
            of_references = spec.model_copy(update=only)
            self.references = HfSource(of_references, array_rate_hz, is_reference=True)

    def items(self) -> Iterator[Item]:
        position = -1
        self.missing, self.first_missing = 0, ""
        others = repeat(None) if self.references is None else self.references.items()
        with base.source_errors(self._spec.uri):
            for (position, row), other in zip(enumerate(self._rows()), others, strict=False):
                item = self._item(position, row)
                if other is not None:
                    reference = Reference(other.uri, other.etag, other.size, other.mtime)
                    item = replace(item, reference=reference)
                yield item
        if position < 0:
            raise SourceError(f"source {self._spec.uri}: the split has no rows")
        if self.references is not None:
            self.missing += self.references.missing
            self.first_missing = self.first_missing or self.references.first_missing

    def _rows(self) -> Iterator[ListedRow]:
        if self._parquet is not None:
            return self._parquet.rows(self._kept, paths=self._spec.duration_column is None)
        # Durations that are given make the audio needless for planning.
        audio = [] if self._spec.duration_column else [self._spec.audio_column]
        columns = [*self._kept, *audio]
        if isinstance(self._dataset, Dataset):
            return self._mapped(columns)
        return self._streamed(columns)

    def _mapped(self, columns: Sequence[str]) -> Iterator[ListedRow]:
        """Yield the rows of a map-style dataset, with audio as views into its memory map."""
        if not columns:
            # `datasets` gives no rows of no columns.
            rows = range(len(self._dataset))
            yield from (ListedRow(RowPlace(None, row), {}) for row in rows)
            return
        row = 0
        for batch in selected(self._dataset, columns).iter(batch_size=PLAN_BATCH_ROWS):
            audio: Any = [None] * batch.num_rows
            if self._spec.audio_column in columns:
                audio = batch.column(self._spec.audio_column)
            cells = batch.select(self._kept).to_pylist() or [{}] * batch.num_rows
            for values, cell in zip(cells, audio, strict=True):
                clip = NOTHING if cell is None else self._cell(cell)
                yield ListedRow(RowPlace(None, row), values, clip)
                row += 1

    def _streamed(self, columns: Sequence[str]) -> Iterator[ListedRow]:
        dataset = selected(self._dataset, columns)
        for shard in range(dataset.num_shards) if self._spec.streaming else [None]:
            for row, values in enumerate(part_of(dataset, shard)):
                try:
                    clip = self._cell(values.get(self._spec.audio_column))
                except (TypeError, ValueError, pa.ArrowException):
                    clip = NOTHING  # `fetch` raises the error
                yield ListedRow(RowPlace(shard, row), values, clip)

    def _cell(self, value: Any) -> AudioCell:
        """Return an audio cell, which is an Arrow scalar or a Python value."""
        if not isinstance(value, pa.Scalar):
            value = pa.array([value], self._audio_type)[0]
        return audio_cells.audio_cell(value, self._array_rate_hz)

    def _item(self, position: int, row: ListedRow) -> Item:
        spec = self._spec
        row = self._confined(position, row)
        given = row.cells.get(spec.duration_column) if spec.duration_column else None
        stated = float(given) if isinstance(given, int | float) else None
        extra = {name: row.cells.get(name) for name in self._carried.types}
        extra |= {name: public_value(extra[name]) for name in self._texts}
        return Item(
            row_id=self._row_id(position, row.cells),
            uri=f"hf:{self._uri}{self._query}{row.place.mark()}",
            seconds=_seconds(row) if stated is None else stated,
            extra=extra,
            position=position,
            estimated=stated is None and row.estimated_s is not None,
            block=row.block,
            **{"size": row.audio.nbytes, "etag": self._tag, **row.stat},
        )

    def _confined(self, position: int, row: ListedRow) -> ListedRow:
        """Return the row with its path resolved; SourceError if the path is not allowed."""
        if not row.audio.path or not row.is_outside:
            return row
        path = self._resolved(row.audio.path)
        if path is not None:
            try:
                self._inside.check(path, relative=base.is_relative(row.audio.path))
            except OutsideError as error:
                raise SourceError(
                    f"source {self._spec.uri}: row {position}: {error}{allow_hint([path])}"
                ) from error
            if is_local(path):
                known = {k: fact for k, fact in row.stat.items() if fact is not None}
                row = replace(row, stat=self._facts_of_file(path) | known)
        return replace(row, audio=replace(row.audio, path=path))

    def _facts_of_file(self, path: str) -> dict[str, Any]:
        """Return the size of a local file, and a tag of its path, size and time."""
        if not os.path.lexists(path):
            self.missing += 1
            self.first_missing = self.first_missing or path
            return {}
        if not (facts := file_info(path)):
            return {}
        return {"size": facts["size"], "etag": hf_location.tag_of([(path, *facts.values())])}

    def _resolved(self, path: str) -> str | None:
        """Return the path of a cell; a relative path lies in the folder of the dataset."""
        if not base.is_relative(path):
            return base.resolved(path, LocalFileSystem(), "")
        if self._folder is None:
            return None
        return base.resolved(
            path, *base.filesystem(self._folder, self._inside.options(self._folder))
        )

    def _row_id(self, position: int, row: Row) -> str:
        if self._spec.id_column is None:
            return f"{position:0{ID_DIGITS}d}"
        value = row[self._spec.id_column]
        if value is None or str(value) == "":
            raise SourceError(
                f"source {self._spec.uri}: row {position} has no value in id_column "
                f"{self._spec.id_column!r}"
            )
        return redact_uris(str(value))

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        for item, row in self._fetched(items):
            try:
                if isinstance(row, RowError):
                    raise row
                yield item, self._opened(item, row)
            except Exception as error:
                row_error = base.row_error_of(item.uri, error)
                if row_error is None:
                    raise
                yield item, row_error

    def _fetched(self, items: Sequence[Item]) -> Iterator[tuple[Item, Row | RowError]]:
        if self._parquet is not None:
            yield from self._parquet.fetch(items, self._ids)
            return
        for item in items:
            row: Row | RowError
            try:
                row = base.retry_read(partial(self._row_at, RowPlace.of(item)), base.is_away)
            except Exception as error:
                row = base.damaged_row(item.uri, error)
            yield item, row

    def _row_at(self, place: RowPlace) -> Row:
        if place.shard is None and isinstance(self._dataset, Dataset):
            table: pa.Table = self._dataset[place.row]
            ids = {name: table.column(name)[0].as_py() for name in self._ids}
            return {self._spec.audio_column: table.column(self._spec.audio_column)[0], **ids}
        return self._cursor.row(place)

    def _opened(self, item: Item, row: Row) -> BinaryIO:
        found = self._spec.id_column and redact_uris(str(row[self._spec.id_column]))
        if found and found != item.row_id:
            raise UnreadableError(f"{item.uri}: changed since it was planned: row id is {found!r}")
        try:
            cell = self._cell(row[self._spec.audio_column])
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise base.unreadable(item.uri, error) from error
        if (held := audio_cells.held_blob(cell, item.uri)) is not None:
            return held.opened(item)
        uri = self._resolved(cell.path) if cell.path else None
        if uri is None:
            raise UnreadableError(
                f"{item.uri}: the row has neither audio bytes nor a path nor an array"
            )
        with base.waits.waiting():
            blob = load_blob(Item(row_id=item.row_id, uri=uri), self._inside.options)
        if isinstance(blob, RowError):
            raise type(blob)(f"{item.uri}: {blob}")
        return blob.open()

    def columns(self) -> Columns:
        return self._carried

    def describe(self) -> dict[str, Any]:
        named = ("config", "split", "revision", "audio_column", "id_column", "streaming")
        of_spec = {name: getattr(self._spec, name) for name in named}
        return {"kind": "hf", "uri": self._uri, **of_spec}


def selected(dataset: Any, columns: Sequence[str]) -> Any:
    """Return a dataset with some of its columns; a map-style dataset then gives Arrow tables. A
    folder of audio files stays as it is: `datasets` fails to select a label that some rows lack."""
    builder = dataset.info.builder_name
    if isinstance(dataset, IterableDataset) and builder == hf_location.AUDIO_FOLDER:
        return dataset
    some = dataset.select_columns(list(columns))
    return some.with_format("arrow") if isinstance(some, Dataset) else some


def part_of(dataset: IterableDataset, shard: int | None) -> IterableDataset:
    """Return a file shard of a stream; None returns the whole stream."""
    if shard is None:
        return dataset
    return dataset.shard(dataset.num_shards, shard, contiguous=True)


class _Cursor(threading.local):
    """The position of each thread in a streamed dataset, so that shards in order need one pass."""

    def __init__(self, dataset: IterableDataset) -> None:
        self._dataset = dataset
        self._rows: Iterator[Row] | None = None
        self._next = RowPlace(None, 0)
        self._last: tuple[RowPlace, Row] | None = None  # Variants ask for their row again.

    def row(self, place: RowPlace) -> Row:
        """Return the row at `place`. After an exception, the next call opens the stream again."""
        if self._last is not None and self._last[0] == place:
            return self._last[1]
        is_ahead = self._next.shard == place.shard and self._next.row <= place.row
        if self._rows is not None and is_ahead:
            rows, skipped = self._rows, place.row - self._next.row
        else:
            rows, skipped = iter(part_of(self._dataset, place.shard).skip(place.row)), 0
        self._rows = None  # an iterator that raised cannot continue
        row: Row | None = next(islice(rows, skipped, None), None)
        if row is None:
            raise IndexError(f"the stream ends before row {place.row}")
        self._rows, self._next = rows, RowPlace(place.shard, place.row + 1)
        self._last = place, row
        return row


def _seconds(row: ListedRow) -> float | None:
    """Return the duration of a row by its header, its array or an estimate; None if unknown."""
    data, path = row.audio.data, row.audio.path
    if row.is_outside:
        if path is None or not is_local(path) or not os.path.isfile(path):
            return None
        return header_seconds(path, os.path.getsize(path))
    if data is None:
        return row.estimated_s if row.audio.samples is None else row.audio.seconds()
    exact = header_seconds(pa.BufferReader(data), data.size)
    head = bytes(memoryview(data)[:HEAD_BYTES])
    return guess_seconds(path, data.size, head) if exact is None else exact
