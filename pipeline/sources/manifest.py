"""A table that names clips: csv, jsonl or parquet with columns uri, and optionally id, start, end.

start and end are seconds and select a span of the file; every other column is carried through.
Relative uris resolve against the table's own folder, so a corpus with its manifest can be moved.
A malformed table is an error before any work; a bad file behind a good line is one bad row.
"""

from __future__ import annotations

import csv
import io
import json
import math
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any

import pyarrow.parquet
from fsspec.implementations.local import LocalFileSystem

from pipeline.errors import SourceError
from pipeline.source_spec import ManifestSpec
from pipeline.sources.base import (
    Fetched,
    Item,
    Scalar,
    filesystem,
    is_local,
    public_uri,
    source_errors,
    stat_fields,
)
from pipeline.sources.durations import guess_seconds, header_seconds
from pipeline.sources.fetch import fetch_all
from pipeline.sources.scalars import typed_column, unified_column

RESERVED = ("uri", "id", "start", "end")
STAT_THREADS = 16

Column = list[Any]


class ManifestSource:
    """The clips a table names.

    Args:
        spec: The `source` section of a job.
    """

    def __init__(self, spec: ManifestSpec) -> None:
        self._spec = spec
        with source_errors(spec.uri):
            self._fs, self._path = filesystem(spec.uri, spec.storage_options)
            if not self._fs.isfile(self._path):
                raise FileNotFoundError(self._path)
        # Credentials of the table's store; a local table may name objects of any one store.
        local = isinstance(self._fs, LocalFileSystem)
        self._protocol = None if local else spec.uri.split("://", 1)[0]

    def items(self) -> Iterator[Item]:
        with source_errors(self._spec.uri):
            columns = self._columns()
        if not columns["uri"]:
            raise SourceError(f"source {self._spec.uri}: the table has no rows")
        uris = [self._resolved(uri, row) for row, uri in enumerate(columns["uri"])]
        stats = self._stats(uris)
        extra = [name for name in columns if name not in RESERVED]
        for row, uri in enumerate(uris):
            start_s = self._seconds(columns, "start", row)
            end_s = self._seconds(columns, "end", row)
            yield Item(
                row_id=self._row_id(columns, row, start_s, end_s),
                uri=uri,
                start_s=start_s,
                end_s=end_s,
                seconds=_estimate(uri, stats[uri], start_s, end_s),
                extra={name: columns[name][row] for name in extra},
                position=row,
                etag=stats[uri].get("etag"),
                size=stats[uri].get("size"),
                mtime=stats[uri].get("mtime"),
            )

    def _columns(self) -> dict[str, Column]:
        suffix = PurePosixPath(self._path).suffix.lower()
        readers = {".csv": read_csv, ".jsonl": read_jsonl, ".parquet": read_parquet}
        if suffix not in readers:
            raise SourceError(
                f"source {self._spec.uri}: expected a .csv, .jsonl or .parquet table, "
                f"got {suffix or 'no extension'!r}"
            )
        try:
            columns = readers[suffix](self._fs.cat_file(self._path))
        except (ValueError, csv.Error) as error:
            raise SourceError(f"source {self._spec.uri}: {' '.join(str(error).split())}") from error
        if "uri" not in columns:
            raise SourceError(
                f"source {self._spec.uri}: the table has no column 'uri' (found: "
                f"{', '.join(columns) or 'none'})"
            )
        return columns

    def _bad_row(self, row: int, problem: str) -> SourceError:
        return SourceError(f"source {self._spec.uri}: row {row + 1}: {problem}")

    def _resolved(self, uri: Any, row: int) -> str:
        if not isinstance(uri, str) or not uri.strip():
            raise self._bad_row(row, f"expected a path or URI in 'uri', got {uri!r}")
        if not is_local(uri) or uri.startswith("/"):
            return uri
        folder = posixpath.dirname(self._path)
        return public_uri(self._fs, posixpath.normpath(posixpath.join(folder, uri)))

    def _seconds(self, columns: Mapping[str, Column], name: str, row: int) -> float | None:
        value = columns[name][row] if name in columns else None
        if value is None or value == "":
            return None
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            raise self._bad_row(row, f"expected seconds in {name!r}, got {value!r}") from None
        if not math.isfinite(seconds):
            raise self._bad_row(row, f"expected finite seconds in {name!r}, got {value!r}")
        return seconds

    def _row_id(
        self, columns: Mapping[str, Column], row: int, start_s: float | None, end_s: float | None
    ) -> str:
        given = columns["id"][row] if "id" in columns else None
        if given is not None and str(given) != "":
            return str(given)
        uri = str(columns["uri"][row])
        if start_s is None and end_s is None:
            return uri
        span = ",".join("" if value is None else repr(value) for value in (start_s, end_s))
        return f"{uri}#t={span}"

    def _options(self, uri: str) -> dict[str, Any]:
        """Storage options for a uri: those of the job if it is of the table's own protocol."""
        protocol = uri.split("://", 1)[0] if "://" in uri else None
        fits = self._protocol in (None, protocol)
        return dict(self._spec.storage_options) if protocol is not None and fits else {}

    def _stats(self, uris: Sequence[str]) -> dict[str, dict[str, Any]]:
        """etag, size and mtime of every distinct uri; nothing for those that cannot be had."""
        distinct = sorted(set(uris))
        with ThreadPoolExecutor(STAT_THREADS, thread_name_prefix="stat") as pool:
            return dict(zip(distinct, pool.map(self._stat, distinct), strict=True))

    def _stat(self, uri: str) -> dict[str, Any]:
        try:
            fs, path = filesystem(uri, self._options(uri))
            return stat_fields(fs.info(path))
        # Whatever a backend raises: the row stays in the plan, and its fetch says what is wrong.
        except Exception:
            return {}

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        return fetch_all(items, self._options)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "manifest",
            "uri": self._spec.uri,
            "resolved": public_uri(self._fs, self._path),
        }


def _estimate(
    uri: str, stat: Mapping[str, Any], start_s: float | None, end_s: float | None
) -> float | None:
    if end_s is not None:
        return max(0.0, end_s - (start_s or 0.0))
    size = stat.get("size")
    if size is None:
        return None
    whole = header_seconds(uri, size) if is_local(uri) else None
    whole = guess_seconds(uri, size) if whole is None else whole
    return max(0.0, whole - (start_s or 0.0))


def read_csv(raw: bytes) -> dict[str, Column]:
    """A csv with a header line; columns get a type only where no text is lost by it."""
    rows = list(csv.reader(io.StringIO(raw.decode("utf-8-sig"), newline=""), strict=True))
    rows = [row for row in rows if row]
    header = rows[0] if rows else []
    if len(set(header)) != len(header):
        raise ValueError(f"the csv header names a column twice: {', '.join(header)}")
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != len(header):
            raise ValueError(f"csv row {number}: expected {len(header)} cells, got {len(row)}")
    columns = {name: [row[i] for row in rows[1:]] for i, name in enumerate(header)}
    return {
        name: list(cells) if name in RESERVED else list(typed_column(cells))
        for name, cells in columns.items()
    }


def read_jsonl(raw: bytes) -> dict[str, Column]:
    """One JSON object a line; a key missing from a line is null."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(raw.decode("utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number}: expected a JSON object, got {type(row).__name__}")
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return _tidy({name: [row.get(name) for row in rows] for name in names})


def read_parquet(raw: bytes) -> dict[str, Column]:
    """A parquet file, read whole."""
    table = pyarrow.parquet.read_table(io.BytesIO(raw))
    return _tidy({name: table.column(name).to_pylist() for name in table.column_names})


def _tidy(columns: Mapping[str, Column]) -> dict[str, Column]:
    tidy: dict[str, Column] = {}
    for name, cells in columns.items():
        values: list[Scalar] = unified_column(cells)
        tidy[name] = list(cells) if name in RESERVED else list(values)
    return tidy
