"""A Hugging Face dataset: a hub id, a `save_to_disk` folder or parquet, map-style or streaming.

The audio column is always read with `Audio(decode=False)`: we take the encoded bytes (or the path,
where bytes are null) and decode them ourselves, so a broken clip costs one row.
A streamed dataset is read once to plan it, unless `duration_column` is given; while fetching, each
worker keeps its place in the stream, so shards in order cost one pass over the files they lie in.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import datasets
import pyarrow as pa
from datasets import Audio, Dataset, IterableDataset

from pipeline.errors import RowError, SourceError, UnreadableError
from pipeline.source_spec import HfSpec
from pipeline.sources.base import (
    Fetched,
    Item,
    Scalar,
    filesystem,
    is_local,
    one_line,
    public_uri,
    source_errors,
)
from pipeline.sources.durations import guess_seconds, header_seconds
from pipeline.sources.fetch import Blob, load_blob
from pipeline.sources.scalars import scalar
from pipeline.spec_errors import nearest

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
ROW_MARK = re.compile(r"#(?:shard=(\d+)&)?row=(\d+)$")
ID_DIGITS = 9
PLAN_BATCH_ROWS = 256
HEAD_BYTES = 4

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a row is: its file shard when streaming, and its number there or in the dataset."""

    shard: int | None
    row: int

    def mark(self) -> str:
        return f"#row={self.row}" if self.shard is None else f"#shard={self.shard}&row={self.row}"

    @classmethod
    def of(cls, item: Item) -> Place:
        found = ROW_MARK.search(item.uri)
        if found is None:
            raise UnreadableError(f"{item.uri}: expected a uri ending in #row=N")
        return cls(None if found[1] is None else int(found[1]), int(found[2]))


class HfSource:
    """The rows of one split.

    Args:
        spec: The `source` section of a job.
    """

    def __init__(self, spec: HfSpec) -> None:
        self._spec = spec
        with source_errors(spec.uri), _quiet():
            dataset = _open(spec)
        self._scalars = _check_columns(spec, dataset)
        wanted = [spec.audio_column, *self._scalars]
        dataset = dataset.cast_column(spec.audio_column, Audio(decode=False))
        self._dataset: Dataset | IterableDataset = dataset.select_columns(wanted)
        self._uri = _public_uri(spec)
        # A worker runs two shards at a time, each in its own thread and with its own place.
        self._places = threading.local()

    def items(self) -> Iterator[Item]:
        position = -1
        rows = self._streamed() if self._spec.streaming else self._mapped()
        with source_errors(self._spec.uri):
            for position, (place, row, audio) in enumerate(rows):
                yield self._item(position, place, row, audio)
        if position < 0:
            raise SourceError(f"source {self._spec.uri}: the split has no rows")

    def _planned_columns(self) -> list[str]:
        """Columns the plan needs: without the audio bytes if the durations are given."""
        audio = [] if self._spec.duration_column else [self._spec.audio_column]
        return [*self._scalars, *audio]

    def _mapped(self) -> Iterator[tuple[Place, Row, _Clip]]:
        """Rows of a map-style dataset, the audio as views into its memory map."""
        columns = self._planned_columns()
        if not columns:
            return
        view = self._dataset.select_columns(columns).with_format("arrow")
        row = 0
        for batch in view.iter(batch_size=PLAN_BATCH_ROWS):
            clips = _clips(batch, self._spec.audio_column)
            scalars = batch.select(self._scalars).to_pylist()
            for offset in range(batch.num_rows):
                yield Place(None, row), scalars[offset] if scalars else {}, clips[offset]
                row += 1

    def _streamed(self) -> Iterator[tuple[Place, Row, _Clip]]:
        dataset = self._dataset.select_columns(self._planned_columns())
        for shard in range(dataset.num_shards):
            part = dataset.shard(dataset.num_shards, shard, contiguous=True)
            for row, values in enumerate(part):
                yield Place(shard, row), values, _Clip.of(values.get(self._spec.audio_column))

    def _item(self, position: int, place: Place, row: Row, clip: _Clip) -> Item:
        spec = self._spec
        given = row.get(spec.duration_column) if spec.duration_column else None
        return Item(
            row_id=self._row_id(position, row),
            uri=self._row_uri(place),
            size=clip.nbytes,
            seconds=float(given) if isinstance(given, int | float) else clip.seconds(),
            extra=self._extra(row),
            position=position,
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
        return str(value)

    def _row_uri(self, place: Place) -> str:
        spec = self._spec
        named = {"config": spec.config, "revision": spec.revision, "split": spec.split}
        query = urlencode({key: value for key, value in named.items() if value is not None})
        return f"hf:{self._uri}{'?' + query if query else ''}{place.mark()}"

    def _extra(self, row: Row) -> dict[str, Scalar]:
        return {name: scalar(row[name]) for name in self._scalars if name != self._spec.id_column}

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        for item in items:
            try:
                yield item, self._blob(item).open()
            except RowError as error:
                yield item, error

    def _blob(self, item: Item) -> Blob:
        row = self._row(item)
        found = self._spec.id_column and str(row[self._spec.id_column])
        if found and found != item.row_id:
            raise UnreadableError(f"{item.uri}: changed since it was planned: row id is {found!r}")
        audio = row[self._spec.audio_column] or {}
        if audio.get("bytes") is None:
            return self._from_path(item, audio.get("path"))
        blob = Blob(data=audio["bytes"])
        if item.size is not None and blob.nbytes != item.size:
            raise UnreadableError(
                f"{item.uri}: changed since it was planned: expected {item.size} bytes, "
                f"got {blob.nbytes}"
            )
        return blob

    def _row(self, item: Item) -> Row:
        place = Place.of(item)
        try:
            if place.shard is None:
                return dict(self._dataset[place.row])
            return self._cursor().row(place)
        # Readers of every file format stand behind a dataset; whatever they raise costs one row.
        except Exception as error:
            raise UnreadableError(f"{item.uri}: cannot be read: {one_line(error)}") from error

    def _cursor(self) -> _Cursor:
        cursor: _Cursor | None = getattr(self._places, "cursor", None)
        if cursor is None:
            cursor = self._places.cursor = _Cursor(self._dataset)
        return cursor

    def _from_path(self, item: Item, path: str | None) -> Blob:
        if not path:
            raise UnreadableError(f"{item.uri}: the row has neither audio bytes nor a path")
        blob = load_blob(Item(row_id=item.row_id, uri=path), lambda uri: self._path_options(uri))
        if isinstance(blob, RowError):
            raise type(blob)(f"{item.uri}: {blob}")
        return blob

    def _path_options(self, uri: str) -> Mapping[str, Any]:
        return {} if is_local(uri) else self._spec.storage_options

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


class _Cursor:
    """A place in a streamed dataset that moves forward for free and backward by starting over.

    Args:
        dataset: The stream; its file shards are opened one at a time.
    """

    def __init__(self, dataset: IterableDataset) -> None:
        self._dataset = dataset
        self._rows: Iterator[Row] | None = None
        self._next = Place(None, 0)

    def row(self, place: Place) -> Row:
        """The row at `place`. After an exception the next call starts afresh behind the bad row."""
        ahead = self._next.shard == place.shard and self._next.row <= place.row
        rows, at = (self._rows, self._next.row) if ahead else (None, 0)
        self._rows = None  # an iterator that raised is finished for good
        if rows is None:
            shards = self._dataset.num_shards
            part = self._dataset.shard(shards, place.shard, contiguous=True)
            rows, at = iter(part.skip(place.row)), place.row
        for _ in range(place.row - at):
            next(rows)
        try:
            row = next(rows)
        except StopIteration:
            raise IndexError(f"shard {place.shard} ends before row {place.row}") from None
        self._rows, self._next = rows, Place(place.shard, place.row + 1)
        return row


@dataclass(frozen=True)
class _Clip:
    """What the plan sees of one audio cell: a view of its bytes, or its path."""

    data: pa.Buffer | None = None
    path: str | None = None

    @classmethod
    def of(cls, cell: Row | None) -> _Clip:
        cell = cell or {}
        data = cell.get("bytes")
        return cls(None if data is None else pa.py_buffer(data), cell.get("path"))

    @property
    def nbytes(self) -> int | None:
        return None if self.data is None else int(self.data.size)

    def seconds(self) -> float | None:
        if self.data is None:
            return self._path_seconds()
        exact = header_seconds(pa.BufferReader(self.data), self.data.size)
        if exact is not None:
            return exact
        head = bytes(memoryview(self.data)[:HEAD_BYTES])
        return guess_seconds(self.path, self.data.size, head)

    def _path_seconds(self) -> float | None:
        if self.path is None or not is_local(self.path) or not os.path.isfile(self.path):
            return None
        return header_seconds(self.path, os.path.getsize(self.path))


def _clips(batch: pa.Table, column: str) -> list[_Clip]:
    if column not in batch.column_names:
        return [_Clip()] * batch.num_rows
    cells = [cell if cell.is_valid else None for cell in batch.column(column)]
    return [
        _Clip() if cell is None else _Clip(cell["bytes"].as_buffer(), cell["path"].as_py())
        for cell in cells
    ]


# Opening: which kind of uri it is, which split, which columns.


def _open(spec: HfSpec) -> Any:
    if is_local(spec.uri) and not _local_exists(spec.uri):
        if not HUB_ID.fullmatch(spec.uri):
            raise FileNotFoundError(spec.uri)
        return _load(spec, spec.uri)
    fs, path = filesystem(spec.uri, spec.storage_options)
    if any(fs.exists(f"{path}/{name}") for name in ("dataset_dict.json", "state.json")):
        return _load_saved(spec)
    if fs.isdir(path) and is_local(spec.uri):
        return _load(spec, path)
    pattern = spec.uri if not fs.isdir(path) else f"{spec.uri.rstrip('/')}/**/*.parquet"
    return _load(spec, "parquet", data_files=path if is_local(spec.uri) else pattern)


def _local_exists(uri: str) -> bool:
    fs, path = filesystem(uri)
    return bool(fs.exists(path) or fs.glob(path))


def _load(spec: HfSpec, name: str, **options: Any) -> Any:
    """`load_dataset`, after finding the only split where none is named."""
    if name != "parquet":
        options |= {"name": spec.config, "revision": spec.revision}
        options["token"] = spec.storage_options.get("token")
    elif not is_local(spec.uri):
        options["storage_options"] = spec.storage_options
        # Without etags a file that was replaced in the bucket would come from the old download.
        options["download_config"] = datasets.DownloadConfig(
            use_etag=True, storage_options=dict(spec.storage_options)
        )
    split = spec.split
    if split is None:
        # A stream of every split costs listings only; without it all splits would be downloaded.
        split = _only(spec, list(datasets.load_dataset(name, streaming=True, **options)))
    return datasets.load_dataset(name, split=split, streaming=spec.streaming, **options)


def _load_saved(spec: HfSpec) -> Any:
    options = {} if is_local(spec.uri) else spec.storage_options
    loaded = datasets.load_from_disk(spec.uri, storage_options=options or None)
    if isinstance(loaded, Mapping):
        split = spec.split or _only(spec, list(loaded))
        if split not in loaded:
            raise SourceError(
                f"source {spec.uri}: no split {split!r}{nearest(split, list(loaded))} "
                f"(splits: {', '.join(loaded)})"
            )
        loaded = loaded[split]
    return loaded.to_iterable_dataset() if spec.streaming else loaded


def _only(spec: HfSpec, splits: list[str]) -> str:
    if len(splits) != 1:
        raise SourceError(f"source {spec.uri}: set source.split to one of {', '.join(splits)}")
    return splits[0]


def _check_columns(spec: HfSpec, dataset: Any) -> list[str]:
    """Names of the scalar columns; SourceError when a named column is missing."""
    if dataset.features is None:  # a stream that has to be peeked into
        dataset = dataset._resolve_features()
    features = dataset.features
    named = [spec.audio_column, spec.id_column, spec.duration_column]
    for name in [name for name in named if name is not None and name not in features]:
        raise SourceError(
            f"source {spec.uri}: no column {name!r}{nearest(name, list(features))} "
            f"(columns: {', '.join(features)})"
        )
    kinds = (datasets.Value, datasets.ClassLabel)
    scalars = [name for name, feature in features.items() if isinstance(feature, kinds)]
    binary = {"binary", "large_binary"}
    return [
        name
        for name in scalars
        if name != spec.audio_column and getattr(features[name], "dtype", "") not in binary
    ]


def _public_uri(spec: HfSpec) -> str:
    """The dataset's uri as other processes see it: absolute for local paths."""
    if not is_local(spec.uri) or not _local_exists(spec.uri):
        return spec.uri
    return public_uri(*filesystem(spec.uri))


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars while loading: the job has its own."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
