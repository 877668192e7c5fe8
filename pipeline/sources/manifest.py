"""A table of clips: csv, tsv, jsonl or parquet, with a column uri, and optionally id, start, end.

start and end are seconds and select a span of the file. Other columns are carried through. Relative
uris lie in the folder of the table. A malformed table, or a uri that the source may not read
(`sources.confinement`), is an error before any work. Items hold no secrets: fetching looks up
signed uris in the table again.
"""

from __future__ import annotations

import csv
import math
import os
import posixpath
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common.arrow_types import Columns, has_text
from earmill.pipeline.common.errors import OutsideError, SourceError
from earmill.pipeline.common.redact import MASK, has_secrets, redact, redact_uris
from earmill.pipeline.common.text import nearest, one_line
from earmill.pipeline.sources import base
from earmill.pipeline.sources.base import Fetched, Item, Reference
from earmill.pipeline.sources.confinement import Confinement, Place, allow_hint
from earmill.pipeline.sources.durations import guess_seconds, header_seconds
from earmill.pipeline.sources.fetch import ahead, fetch_rows, open_ranged
from earmill.pipeline.sources.files import BLANK_ROW, file_info
from earmill.pipeline.sources.tables import CHUNK_ROWS, RESERVED, Cells, public_value, read_table
from earmill.pipeline.spec.source import ManifestSpec
from earmill.pipeline.storage.backend import is_local, local_path

# Names of the uri in tables of other tools. An error suggests them; they are never assumed.
FOREIGN_NAMES = (
    "audio_filepath audio_path path file filename file_name filepath file_path wav url".split()
)
# Names of the start of a span in other tables. Beside one of them, "duration" is the span's length.
FOREIGN_STARTS = ["offset", "start_s", "start_time", "begin"]
FOREIGN_ENDS = ["end_s", "end_time", "stop"]
SPAN_ELSEWHERE = {"offset", "duration"}  # Columns of a span in tables of NeMo.
STAT_THREADS = 16

Stat = Mapping[str, Any]
ABSENT: Stat = {}  # `stat_fields` of a local file that does not exist.
Folder = tuple[Any, str]  # A filesystem and a path in it, or None and a uri.


class ManifestSource:
    """The clips that a table names. `missing` counts the rows whose local file does not exist, and
    `first_missing` names the first of these files."""

    kind = "manifest"

    def __init__(self, spec: ManifestSpec) -> None:
        self._spec = spec
        self._path_columns = ["uri"]
        if spec.reference_column is not None:
            self._path_columns.append(spec.reference_column)
        with base.source_errors(spec.uri):
            self._fs, self._path = base.filesystem(spec.uri, spec.storage_options)
            self._fs.invalidate_cache()
            if not base.retry_listing(lambda: self._fs.isfile(self._path)):
                raise FileNotFoundError(self._path)
            self._folder = self._folder_of_paths()
            self._inside = self._confinement()
        self._carried = Columns()
        self._blank = 0
        self.missing, self.first_missing = 0, ""

    def items(self) -> Iterator[Item]:
        with base.source_errors(self._spec.uri):
            columns = self._columns()
        rows = self._check_places(columns)
        if not rows:
            raise SourceError(f"source {self._spec.uri}: the table has no rows")
        self._blank = len(columns["uri"]) - rows
        self.missing, self.first_missing = 0, ""
        roles = {*RESERVED, *(self._spec.columns or {}), self._spec.reference_column}
        extra = [name for name in columns if name not in roles]
        plain = {name for name, kind in self._carried.types.items() if not has_text(kind)}
        for first, chunk, paths in self._chunks(columns, list(columns)):
            stats = self._stats({uri for uris in paths for uri in uris if uri})
            for at, named in enumerate(zip(*paths, strict=True)):
                cells = {name: column[at] for name, column in chunk.items()}
                values = {
                    name: cells[name] if name in plain else public_value(cells[name])
                    for name in extra
                }
                uri, *references = files = [each for each in named if each]
                if absent := [each for each in files if stats[each] is ABSENT]:
                    self.missing += 1
                    self.first_missing = self.first_missing or absent[0]
                item = self._item(first + at, cells, uri, stats[uri], values)
                for reference in references:
                    of_pair = Reference(redact(reference), **stats[reference])
                    item = replace(item, reference=of_pair)
                yield item

    def _item(
        self, row: int, cells: Mapping[str, Any], uri: str, stat: Stat, extra: Mapping[str, Any]
    ) -> Item:
        start_s, end_s = self._seconds(row, cells, "start"), self._seconds(row, cells, "end")
        given_s = None
        if "duration" in (self._spec.columns or {}):
            given_s = self._seconds(row, cells, "duration")
        if given_s is not None and given_s <= 0:
            raise self._bad_row(row, f"expected a duration above 0 s, got {given_s:g}")
        if start_s is not None and end_s is None and given_s is not None:
            end_s = start_s + given_s
        seconds, estimated = given_s, False
        if seconds is None:
            seconds, estimated = _expected(uri, stat, start_s, end_s)
        given_id = cells.get("id")
        if given_id is not None and str(given_id) != "":
            row_id = redact_uris(str(given_id))
        else:
            row_id = redact(base.as_text(str(cells["uri"])))
            if (start_s, end_s) != (None, None):
                span = ["" if value is None else repr(value) for value in (start_s, end_s)]
                row_id = f"{row_id}#t={','.join(span)}"
        return Item(
            row_id=row_id,
            uri=redact(uri),
            start_s=start_s,
            end_s=end_s,
            seconds=seconds,
            estimated=estimated,
            extra=extra,
            position=row,
            **stat,
        )

    def _seconds(self, row: int, cells: Mapping[str, Any], name: str) -> float | None:
        value = cells.get(name)
        if value is None or value == "":
            return None
        try:
            seconds = float(value)
        except (TypeError, ValueError):
            raise self._bad_row(row, f"expected seconds in {name!r}, got {value!r}") from None
        if not math.isfinite(seconds):
            raise self._bad_row(row, f"expected finite seconds in {name!r}, got {value!r}")
        return seconds

    def _bad_row(self, row: int, problem: str) -> SourceError:
        return SourceError(f"source {self._spec.uri}: row {row + 1}: {problem}")

    def _columns(self) -> dict[str, Cells]:
        """Read the table, with its columns renamed by `source.columns`."""
        source, roles = f"source {self._spec.uri}", self._spec.columns or {}
        # These cells stay text, because an id 1.50 is no number.
        untyped = {*RESERVED, *roles.values(), *self._path_columns}
        columns, self._carried = self._table(untyped)
        names = {theirs: ours for ours, theirs in roles.items()}
        keys = [f"columns.{ours}" for ours in names.values()] + ["reference_column"]
        for theirs, key in zip([*names, *self._path_columns[1:]], keys, strict=False):
            if theirs not in columns:
                raise SourceError(
                    f"{source}: source.{key}: the table has no column "
                    f"{theirs!r}{nearest(theirs, list(columns))} (found: {', '.join(columns)})"
                )
        for theirs, ours in names.items():
            if ours != theirs and ours in columns and ours not in names:
                raise SourceError(
                    f"{source}: source.columns.{ours} is {theirs!r}, but the table "
                    f"has a column {ours!r} too; rename one of them in the table"
                )
        columns = {names.get(name, name): cells for name, cells in columns.items()}
        if "uri" not in columns:
            raise SourceError(
                f"{source}: the table has no column 'uri' (found: "
                f"{', '.join(columns) or 'none'}){_columns_hint(columns)}"
            )
        if self._spec.columns is None and SPAN_ELSEWHERE <= set(columns) and "start" not in columns:
            raise SourceError(
                f"{source}: the columns offset and duration look like a span, which "
                "is read from start and end; set source.columns: {uri: uri, start: offset, "
                "duration: duration}, or {uri: uri} to carry them through and take whole files"
            )
        return columns

    def _table(self, untyped: Collection[str]) -> tuple[dict[str, Cells], Columns]:
        """Read the table; cells of the columns `untyped` are not converted."""
        try:
            raw = base.retry_listing(lambda: self._fs.cat_file(self._path))
            return read_table(self._path, raw, untyped)
        except (ValueError, csv.Error) as error:
            raise SourceError(f"source {self._spec.uri}: {one_line(error)}") from error

    def _folder_of_paths(self) -> Folder:
        """Return the folder in which relative uris lie: the table's, or the job's `prefix`."""
        folder, prefix = posixpath.dirname(self._path), self._spec.prefix
        if prefix is None:
            return self._fs, folder
        if base.is_relative(prefix) and not prefix.startswith("~/"):
            return self._fs, base.joined(folder, prefix.rstrip("/"))
        local = local_path(prefix)
        return (None, prefix.rstrip("/")) if local is None else (LocalFileSystem(), local)

    def _confinement(self) -> Confinement:
        spec, folder = self._spec, self._folder
        is_here = isinstance(self._fs, LocalFileSystem)
        table = base.public_uri(self._fs, self._path)
        own = [folder[1] if folder[0] is None else base.public_uri(*folder)]
        own.append(base.public_uri(self._fs, posixpath.dirname(self._path)))
        store = own[0] if is_here else table
        if local_path(store) is not None:
            return Confinement(own, spec.allow, spec.storage_options)
        if not is_here:
            own.append(Place.read_at(table).store)
        store = Place.read_at(store).store
        return Confinement(own, spec.allow, spec.storage_options, store=store)

    def columns(self) -> Columns:
        return self._carried

    def _chunks(
        self, columns: Mapping[str, Cells], names: Sequence[str]
    ) -> Iterator[tuple[int, dict[str, list[Any]], list[list[str]]]]:
        """Yield chunks of the table without its blank rows. A chunk is the number of its first row,
        the cells of the named columns, and the resolved paths of each of `_path_columns`."""
        position = 0
        for first in range(0, len(columns["uri"]), CHUNK_ROWS):
            some = columns["uri"][first : first + CHUNK_ROWS]
            filled = [
                at
                for at, uri in enumerate(some)
                if not _is_blank(uri)
                or not all(_is_blank(cells[first + at]) for cells in columns.values())
            ]
            chunk = {name: columns[name][first : first + CHUNK_ROWS] for name in names}
            cells = {name: [column[at] for at in filled] for name, column in chunk.items()}
            paths = [
                [self._resolved(cell, row, name) for row, cell in enumerate(cells[name], position)]
                for name in self._path_columns
            ]
            yield position, cells, paths
            position += len(filled)

    def _resolved(self, uri: Any, row: int, column: str) -> str:
        """Return the uri of a cell; an empty text for a row without a reference recording."""
        if column != "uri" and _is_blank(uri):
            return ""
        if not isinstance(uri, str) or not uri.strip():
            raise self._bad_row(row, f"expected a path or URI in {column!r}, got {uri!r}")
        literal = base.resolved(uri, *self._folder)
        # A path that does not exist may be meant without blanks, or with / for \.
        readings = [uri.strip(), uri.replace("\\", "/"), uri.strip().replace("\\", "/")]
        readings = [text for text in readings if text != uri]
        if readings and is_local(literal) and not os.path.lexists(literal):
            for other in (base.resolved(text, *self._folder) for text in readings):
                if is_local(other) and os.path.lexists(other):
                    return other
        return literal

    def _check_places(self, columns: Mapping[str, Cells]) -> int:
        """Refuse places that the source may not read, before any is read; count the rows."""
        refused: list[tuple[int, str, OutsideError]] = []
        rows = 0
        for first, cells, paths in self._chunks(columns, self._path_columns):
            rows = first + len(paths[0])
            for name, uris in zip(self._path_columns, paths, strict=True):
                for row, (uri, cell) in enumerate(zip(uris, cells[name], strict=True), first):
                    try:
                        if uri:
                            self._inside.check(uri, relative=base.is_relative(cell))
                    except OutsideError as error:
                        refused.append((row, uri, error))
        if refused:
            row, _, problem = refused[0]
            more = f"; {len(refused)} rows do so" if len(refused) > 1 else ""
            hint = allow_hint(uri for _, uri, _ in refused)
            raise self._bad_row(row, f"{problem}{more}{hint}")
        return rows

    def _stats(self, uris: Set[str]) -> dict[str, Stat]:
        """Return etag, size and mtime of every uri; empty if they are unknown."""

        def asked(uri: str) -> Stat:
            try:
                fs, path = base.object_of(uri, self._inside.options(uri))
                return base.stat_fields(fs.info(path))
            # Backends raise any class. The row stays planned, and its fetch raises the error.
            except Exception:
                return {}

        local = {
            uri: {"etag": None, **file_info(uri)} if os.path.lexists(uri) else ABSENT
            for uri in uris
            if is_local(uri)
        }
        others = sorted(uris - local.keys())
        return local | dict(zip(others, ahead(asked, others, STAT_THREADS), strict=True))

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        wanted = [replace(item, uri=self._real_uri(item)) for item in items]
        fetched = fetch_rows(wanted, self._inside.options)
        for item, (_, stream) in zip(items, fetched, strict=True):
            yield item, stream

    def open_ranged(self, item: Item) -> BinaryIO | None:
        real = replace(item, uri=self._real_uri(item))
        return open_ranged(real, self._inside.options(real.uri))

    def _real_uri(self, item: Item) -> str:
        """Return the uri of the table, which may hold secrets that the item lacks."""
        if MASK not in item.uri:
            return item.uri
        # If the table has changed, the masked uri stays, and its fetch raises the error.
        return self._signed.get((item.position, item.uri), item.uri)

    @cached_property
    def _signed(self) -> dict[tuple[int, str], str]:
        """The uris with secrets, by row and uri without secrets."""
        with base.source_errors(self._spec.uri):
            return {
                (row, redact(uri)): uri
                for first, _, paths in self._chunks(self._columns(), self._path_columns)
                for uris in paths
                for row, uri in enumerate(uris, first)
                if has_secrets(uri)
            }

    def skipped(self) -> dict[str, int]:
        return {BLANK_ROW: self._blank} if self._blank else {}

    def describe(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "uri": self._spec.uri,
            "resolved": base.public_uri(self._fs, self._path),
        }


def _is_blank(cell: Any) -> bool:
    return cell is None or (isinstance(cell, str) and not cell.strip())


def _expected(
    uri: str, stat: Stat, start_s: float | None, end_s: float | None
) -> tuple[float | None, bool]:
    """Return the seconds of a row, and True if they are estimated from its bytes."""
    if end_s is not None:
        return max(0.0, end_s - (start_s or 0.0)), False
    size = stat.get("size")
    if size is None:
        return None, False
    whole = header_seconds(uri, size) if is_local(uri) else None
    estimated = whole is None
    whole = guess_seconds(uri, size) if whole is None else whole
    return max(0.0, whole - (start_s or 0.0)), estimated


def _columns_hint(columns: Mapping[str, Cells]) -> str:
    """Return a `source.columns` for a table without uri, with the columns of its spans."""
    names = {"uri": FOREIGN_NAMES}
    if "start" not in columns:
        names["start"] = FOREIGN_STARTS
    if "end" not in columns:
        has_end = any(name in columns for name in FOREIGN_ENDS)
        names |= {"end": FOREIGN_ENDS} if has_end else {"duration": ["duration"]}
    found = {
        ours: next((name for name in theirs if name in columns), None)
        for ours, theirs in names.items()
    }
    named = ", ".join(f"{ours}: {theirs}" for ours, theirs in found.items() if theirs)
    return f"; set source.columns to {{{named}}}" if found["uri"] else ""
