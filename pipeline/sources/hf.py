"""A Hugging Face dataset: a hub id, a `save_to_disk` folder or Parquet, map-style or streaming.

`datasets` never decodes the audio column. The encoded bytes, the path or the array (`audio_cells`)
are decoded by `audio.decode`, so a broken clip costs one row. Streamed Parquet is planned from its
footers and fetched by row groups (`hf_parquet`). Other streams are read once for planning, unless
`duration_column` is given. While fetching, each worker keeps its position in the stream, so shards
in order need one pass over their files.

Columns are carried through in the types that the dataset names.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

import datasets
import pyarrow as pa
from datasets import Dataset, IterableDataset
from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common.arrow_types import Columns, has_text, kept_type
from earmill.pipeline.common.errors import (
    OutsideError,
    RowError,
    SourceError,
    SourceOutage,
    UnreadableError,
)
from earmill.pipeline.common.redact import redact_uris
from earmill.pipeline.common.text import named_line, nearest
from earmill.pipeline.sources.audio_cells import (
    NOTHING,
    AudioCell,
    audio_cell,
    check_audio_type,
    wav_of,
)
from earmill.pipeline.sources.base import (
    Fetched,
    Item,
    filesystem,
    is_away,
    is_local,
    retry_read,
    row_error_of,
    source_errors,
    source_wait,
)
from earmill.pipeline.sources.confinement import is_relative, resolved, suggestions
from earmill.pipeline.sources.durations import guess_seconds, header_seconds
from earmill.pipeline.sources.fetch import Blob, load_blob
from earmill.pipeline.sources.hf_location import (
    AUDIO_FOLDER,
    ParquetSet,
    Place,
    check_names,
    dataset_confinement,
    dataset_folder,
    open_dataset,
    public_dataset_uri,
    quiet,
)
from earmill.pipeline.sources.hf_parquet import ParquetRows, Seen
from earmill.pipeline.sources.tables import public_value
from earmill.pipeline.spec.source import HfSpec


def features_of(spec: HfSpec, dataset: Any) -> Any:
    """Return the features of a dataset; SourceError if a column that the job names is missing."""
    features = dataset.features
    if features is None:  # some streams know them only from their rows
        features = Dataset.from_list(list(dataset.take(FEATURE_ROWS))).features
    named = [spec.audio_column, spec.id_column, spec.duration_column]
    for name in [name for name in named if name is not None and name not in features]:
        raise SourceError(
            f"source {spec.uri}: no column {name!r}{nearest(name, list(features))} "
            f"(columns: {', '.join(features)})"
        )
    for name in [name for name in named[1:] if name is not None]:
        if not isinstance(features[name], datasets.Value | datasets.ClassLabel):
            raise SourceError(
                f"source {spec.uri}: expected a column of single values, got {name!r} of "
                f"{_name(features[name])}"
            )
    return features


def audio_type(spec: HfSpec, features: Any, array_rate_hz: int | None) -> Any:
    """Return the Arrow type of the audio column, as its cells are stored.

    Raises:
        SourceError: The column holds no audio, or none that can be read.
    """
    kind = features.arrow_schema.field(spec.audio_column).type
    try:
        check_audio_type(spec.audio_column, kind, array_rate_hz)
    except SourceError as error:
        raise SourceError(f"source {spec.uri}: {error}") from error
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def carried(spec: HfSpec, features: Any) -> Columns:
    """Every column but the audio and the ids: its type and its class names, or why not."""
    schema = features.arrow_schema
    types, dropped = {}, {}
    labels: dict[str, tuple[str, ...]] = {}
    for name, feature in features.items():
        if name in (spec.audio_column, spec.id_column):
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


ID_DIGITS = 9
# Rows from which the features of a stream are inferred.
FEATURE_ROWS = 5
PLAN_BATCH_ROWS = 256
HEAD_BYTES = 4

HfRow = Mapping[str, Any]


class HfSource:
    """The rows of one split.

    Args:
        spec: The `source` section of a job.
        array_rate_hz: Rate of arrays of samples without a rate.
    Attributes:
        missing: Rows of the last listing whose local file does not exist.
        first_missing: The first of these files; empty if there is none.
    """

    _dataset: Dataset | IterableDataset

    def __init__(self, spec: HfSpec, array_rate_hz: int | None = None) -> None:
        self._spec, self._array_rate_hz = spec, array_rate_hz
        self.missing, self.first_missing = 0, ""
        with source_errors(spec.uri), quiet():
            check_names(spec)
            self._parquet, dataset = None, open_dataset(spec)
            if isinstance(dataset, ParquetSet):
                self._parquet = ParquetRows(dataset, spec.audio_column, array_rate_hz)
                dataset = None
        features = features_of(spec, self._parquet if dataset is None else dataset)
        self._carried = carried(spec, features)
        self._texts = {name for name, kind in self._carried.types.items() if has_text(kind)}
        ids = [spec.id_column] if spec.id_column is not None else []
        self._kept = [name for name in features if name in {*self._carried.types, *ids}]
        self._ids = ids
        self._audio_type = audio_type(spec, features, array_rate_hz)
        if dataset is not None:
            self._dataset = selected(dataset, [spec.audio_column, *self._kept])
        self._uri = public_dataset_uri(spec)
        self._folder, self._inside = dataset_folder(spec), dataset_confinement(spec)
        # A worker runs two shards at a time; each thread has its own position in the stream.
        self._places = threading.local()

    def items(self) -> Iterator[Item]:
        position = -1
        self.missing, self.first_missing = 0, ""
        with source_errors(self._spec.uri):
            for position, (place, row, clip) in enumerate(self._rows()):
                yield self._item(position, place, row, clip)
        if position < 0:
            raise SourceError(f"source {self._spec.uri}: the split has no rows")

    def _rows(self) -> Iterator[tuple[Place, HfRow, _Clip]]:
        if self._parquet is None:
            return self._mapped() if isinstance(self._dataset, Dataset) else self._streamed()
        seen = self._parquet.rows(self._kept, paths=self._spec.duration_column is None)
        return ((row.place, row.cells, _Clip.seen(row)) for row in seen)

    def _planned_columns(self) -> list[str]:
        """Return the columns for planning; without the audio if durations are given."""
        audio = [] if self._spec.duration_column else [self._spec.audio_column]
        return [*self._kept, *audio]

    def _mapped(self) -> Iterator[tuple[Place, HfRow, _Clip]]:
        """Yield the rows of a map-style dataset, with audio as views into its memory map."""
        columns = self._planned_columns()
        if not columns:
            return
        view = selected(self._dataset, columns)
        row = 0
        for batch in view.iter(batch_size=PLAN_BATCH_ROWS):
            clips = self._clips(batch)
            cells = batch.select(self._kept).to_pylist()
            for offset in range(batch.num_rows):
                yield Place(None, row), cells[offset] if cells else {}, clips[offset]
                row += 1

    def _streamed(self) -> Iterator[tuple[Place, HfRow, _Clip]]:
        dataset = selected(self._dataset, self._planned_columns())
        for shard in range(dataset.num_shards) if self._spec.streaming else [None]:
            for row, values in enumerate(part_of(dataset, shard)):
                yield Place(shard, row), values, self._clip_of(values)

    def _clips(self, batch: pa.Table) -> list[_Clip]:
        if self._spec.audio_column not in batch.column_names:
            return [_Clip()] * batch.num_rows
        return [self._clip(cell) for cell in batch.column(self._spec.audio_column)]

    def _clip_of(self, values: HfRow) -> _Clip:
        try:
            return self._clip(self._scalar(values.get(self._spec.audio_column)))
        except (TypeError, ValueError, pa.ArrowException):
            return _Clip()  # `fetch` raises the error

    def _clip(self, cell: pa.Scalar) -> _Clip:
        return _Clip(audio_cell(cell, self._array_rate_hz))

    def _scalar(self, value: Any) -> pa.Scalar:
        """Return a cell as an Arrow scalar."""
        if isinstance(value, pa.Scalar):
            return value
        return pa.array([value], self._audio_type)[0]

    def _item(self, position: int, place: Place, row: HfRow, clip: _Clip) -> Item:
        spec = self._spec
        clip = self._confined(position, clip)
        given = row.get(spec.duration_column) if spec.duration_column else None
        stated = float(given) if isinstance(given, int | float) else None
        return Item(
            row_id=self._row_id(position, row),
            uri=self._row_uri(place),
            size=clip.nbytes,
            seconds=clip.seconds() if stated is None else stated,
            extra=self._extra(row),
            position=position,
            estimated=stated is None and clip.estimated_s is not None,
            block=clip.block,
            **clip.stat,
        )

    def _count_missing(self, path: str) -> None:
        if is_local(path) and not os.path.lexists(path):
            self.missing += 1
            self.first_missing = self.first_missing or path

    def _confined(self, position: int, clip: _Clip) -> _Clip:
        """Return the cell with its path resolved; SourceError if the path is not allowed."""
        if not clip.cell.path or not clip.outside:
            return clip
        path = self._resolved(clip.cell.path)
        if path is None:
            return replace(clip, cell=replace(clip.cell, path=None))
        try:
            self._inside.check(path, relative=is_relative(clip.cell.path))
        except OutsideError as error:
            hint = f"if that is meant, set source.allow: [{', '.join(suggestions([path]))}]"
            raise SourceError(
                f"source {self._spec.uri}: row {position}: {error}; {hint}"
            ) from error
        self._count_missing(path)
        return replace(clip, cell=replace(clip.cell, path=path))

    def _resolved(self, path: str) -> str | None:
        """Return the path of a cell; a relative path lies in the folder of the dataset."""
        if not is_relative(path):
            return resolved(path, LocalFileSystem(), "")
        if self._folder is None:
            return None
        return resolved(path, *filesystem(self._folder, self._inside.options(self._folder)))

    def _row_id(self, position: int, row: HfRow) -> str:
        if self._spec.id_column is None:
            return f"{position:0{ID_DIGITS}d}"
        value = row[self._spec.id_column]
        if value is None or str(value) == "":
            raise SourceError(
                f"source {self._spec.uri}: row {position} has no value in id_column "
                f"{self._spec.id_column!r}"
            )
        return redact_uris(str(value))

    def _row_uri(self, place: Place) -> str:
        spec = self._spec
        named = {"config": spec.config, "revision": spec.revision, "split": spec.split}
        query = urlencode({key: value for key, value in named.items() if value is not None})
        return f"hf:{self._uri}{'?' + query if query else ''}{place.mark()}"

    def _extra(self, row: HfRow) -> dict[str, Any]:
        return {
            name: public_value(row.get(name)) if name in self._texts else row.get(name)
            for name in self._carried.types
        }

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        for item, row in self._fetched(items):
            try:
                if isinstance(row, RowError):
                    raise row
                yield item, self._blob(item, row).open()
            except Exception as error:
                row_error = row_error_of(item.uri, error)
                if row_error is None:
                    raise
                yield item, row_error

    def _fetched(self, items: Sequence[Item]) -> Iterator[tuple[Item, HfRow | RowError]]:
        if self._parquet is not None:
            yield from self._parquet.fetch(items, self._ids)
            return
        for item in items:
            try:
                yield item, self._row(item)
            except RowError as error:
                yield item, error

    def _blob(self, item: Item, row: HfRow) -> Blob:
        found = self._spec.id_column and redact_uris(str(row[self._spec.id_column]))
        if found and found != item.row_id:
            raise UnreadableError(f"{item.uri}: changed since it was planned: row id is {found!r}")
        cell = self._cell(item, row)
        if cell.data is not None:
            blob = Blob(data=cell.data.to_pybytes())
        elif cell.samples is not None:
            blob = Blob(data=wav_of(cell.samples, cell.rate_hz, item.uri))
        else:
            return self._from_path(item, cell.path)
        if item.size is not None and blob.nbytes != item.size:
            raise UnreadableError(
                f"{item.uri}: changed since it was planned: expected {item.size} bytes, "
                f"got {blob.nbytes}"
            )
        return blob

    def _cell(self, item: Item, row: HfRow) -> AudioCell:
        try:
            return audio_cell(self._scalar(row[self._spec.audio_column]), self._array_rate_hz)
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise UnreadableError(f"{item.uri}: cannot be read: {named_line(error)}") from error

    def _row(self, item: Item) -> HfRow:
        place = Place.of(item)
        try:
            return retry_read(lambda: self._row_at(place), is_away)
        # A dataset may use any file reader. Its error on bytes that arrived costs one row. If bytes
        # do not arrive, or a table is gone, no row is at fault.
        except Exception as error:
            if is_away(error):
                raise SourceOutage(f"{item.uri}: cannot be read: {named_line(error)}") from error
            raise UnreadableError(f"{item.uri}: cannot be read: {named_line(error)}") from error

    def _row_at(self, place: Place) -> HfRow:
        if place.shard is None and isinstance(self._dataset, Dataset):
            table: pa.Table = self._dataset[place.row]
            ids = {name: table.column(name)[0].as_py() for name in self._ids}
            return {self._spec.audio_column: table.column(self._spec.audio_column)[0], **ids}
        return self._cursor().row(place)

    def _cursor(self) -> _Cursor:
        cursor: _Cursor | None = getattr(self._places, "cursor", None)
        if cursor is None:
            cursor = self._places.cursor = _Cursor(self._dataset)
        return cursor

    def _from_path(self, item: Item, path: str | None) -> Blob:
        uri = self._resolved(path) if path else None
        if uri is None:
            raise UnreadableError(
                f"{item.uri}: the row has neither audio bytes nor a path nor an array"
            )
        with source_wait():
            blob = load_blob(Item(row_id=item.row_id, uri=uri), self._inside.options)
        if isinstance(blob, RowError):
            raise type(blob)(f"{item.uri}: {blob}")
        return blob

    def columns(self) -> Columns:
        return self._carried

    def skipped(self) -> dict[str, int]:
        return {}

    def describe(self) -> dict[str, Any]:
        spec = self._spec
        return {
            "kind": "hf",
            "uri": self._uri,
            "config": spec.config,
            "split": spec.split,
            "revision": spec.revision,
            "audio_column": spec.audio_column,
            "id_column": spec.id_column,
            "streaming": spec.streaming,
        }


def selected(dataset: Any, columns: Sequence[str]) -> Any:
    """Return a dataset with some of its columns; a map-style dataset then gives Arrow tables.

    A folder of audio files has only paths and labels and is returned as it is: `datasets` fails to
    select a label that some rows lack.
    """
    if isinstance(dataset, IterableDataset) and dataset.info.builder_name == AUDIO_FOLDER:
        return dataset
    some = dataset.select_columns(list(columns))
    return some.with_format("arrow") if isinstance(some, Dataset) else some


def part_of(dataset: IterableDataset, shard: int | None) -> IterableDataset:
    """Return a file shard of a stream; None returns the whole stream."""
    if shard is None:
        return dataset
    return dataset.shard(dataset.num_shards, shard, contiguous=True)


class _Cursor:
    """A position in a streamed dataset; going backward reads from the start of the shard.

    Args:
        dataset: The stream; its file shards are opened one at a time.
    """

    def __init__(self, dataset: IterableDataset) -> None:
        self._dataset = dataset
        self._rows: Iterator[HfRow] | None = None
        self._next = Place(None, 0)

    def row(self, place: Place) -> HfRow:
        """Return the row at `place`. After an exception, the next call opens the stream again."""
        ahead = self._next.shard == place.shard and self._next.row <= place.row
        rows, at = (self._rows, self._next.row) if ahead else (None, 0)
        self._rows = None  # an iterator that raised cannot continue
        if rows is None:
            rows = iter(part_of(self._dataset, place.shard).skip(place.row))
            at = place.row
        for _ in range(place.row - at):
            next(rows)
        try:
            row = next(rows)
        except StopIteration:
            raise IndexError(f"the stream ends before row {place.row}") from None
        self._rows, self._next = rows, Place(place.shard, place.row + 1)
        return row


@dataclass(frozen=True)
class _Clip:
    """An audio cell for planning.

    Args:
        cell: A view of the cell.
        in_cell: True if the audio is or may be in the cell, whatever its path.
        estimated_s: Estimated duration of a row that is known from a footer, s.
        block: Number of the row group of such a row.
        stat: etag and mtime of the file of such a row.
    """

    cell: AudioCell = NOTHING
    in_cell: bool = False
    estimated_s: float | None = None
    block: int | None = None
    stat: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def seen(cls, row: Seen) -> _Clip:
        in_cell = row.in_file is not False
        return cls(AudioCell(path=row.path), in_cell, row.seconds, row.block, row.stat)

    @property
    def outside(self) -> bool:
        """Return True if the audio is at the path."""
        return not self.in_cell and self.cell.data is None and self.cell.samples is None

    @property
    def nbytes(self) -> int | None:
        return self.cell.nbytes

    def seconds(self) -> float | None:
        data = self.cell.data
        if self.outside:
            return self._path_seconds()
        if data is None:
            return self.estimated_s if self.cell.samples is None else self.cell.seconds()
        exact = header_seconds(pa.BufferReader(data), data.size)
        if exact is not None:
            return exact
        head = bytes(memoryview(data)[:HEAD_BYTES])
        return guess_seconds(self.cell.path, data.size, head)

    def _path_seconds(self) -> float | None:
        path = self.cell.path
        if path is None or not is_local(path) or not os.path.isfile(path):
            return None
        return header_seconds(path, os.path.getsize(path))
