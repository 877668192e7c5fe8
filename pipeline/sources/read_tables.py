"""The tables a manifest may be: csv, tsv, JSON lines, Parquet. Bytes to columns of cells.

Parquet keeps its types; text tables get the ones that no text is lost by. A table that cannot be
taken as it is raises ValueError or csv.Error.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Mapping
from typing import Any

from earmill.pipeline.common.arrow_types import Columns, kept_type
from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.sources.base import Scalar
from earmill.pipeline.sources.scalars import typed_column, unified_column
from earmill.pipeline.storage.arrow_tables import table_of

RESERVED = ("uri", "id", "start", "end")

Column = list[Any]


def read_csv(raw: bytes, untyped: Collection[str] = RESERVED, **dialect: Any) -> dict[str, Column]:
    """A csv with a header line; columns get a type only where no text is lost by it."""
    text = io.StringIO(raw.decode("utf-8-sig"), newline="")
    rows = list(csv.reader(text, strict=True, **dialect))
    rows = [row for row in rows if row]
    header = rows[0] if rows else []
    if len(set(header)) != len(header):
        raise ValueError(f"the csv header names a column twice: {', '.join(header)}")
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != len(header):
            raise ValueError(f"csv row {number}: expected {len(header)} cells, got {len(row)}")
    columns = {name: [row[i] for row in rows[1:]] for i, name in enumerate(header)}
    return {
        name: list(cells) if name in untyped else list(typed_column(cells))
        for name, cells in columns.items()
    }


def read_tsv(raw: bytes, untyped: Collection[str] = RESERVED) -> dict[str, Column]:
    """The same with tabs; quotation marks are text, as in the tables of Common Voice."""
    return read_csv(raw, untyped, delimiter="\t", quoting=csv.QUOTE_NONE)


def read_jsonl(raw: bytes, untyped: Collection[str] = RESERVED) -> dict[str, Column]:
    """One JSON object a line; a key missing from a line is null."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(raw.decode("utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = loads_json(line)
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number}: expected a JSON object, got {type(row).__name__}")
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return _tidy({name: [row.get(name) for row in rows] for name in names}, untyped)


def read_parquet(
    raw: bytes, untyped: Collection[str] = RESERVED
) -> tuple[dict[str, Column], Columns]:
    """A parquet file, read whole: cells in their types, and what is known of the columns."""
    table = table_of(raw)
    types, dropped, columns = {}, {}, {}
    for field in table.schema:
        if field.name in untyped:
            columns[field.name] = table.column(field.name).to_pylist()
            continue
        kind = kept_type(field.type)
        if kind is None:
            dropped[field.name] = str(field.type)
        else:
            types[field.name] = kind
            columns[field.name] = table.column(field.name).to_pylist()
    return columns, Columns(types, dropped=dropped)


def _tidy(columns: Mapping[str, Column], untyped: Collection[str]) -> dict[str, Column]:
    tidy: dict[str, Column] = {}
    for name, cells in columns.items():
        values: list[Scalar] = unified_column(cells)
        tidy[name] = list(cells) if name in untyped else list(values)
    return tidy


def _inferred(read: Callable[..., dict[str, Column]]) -> Reader:
    return lambda raw, untyped: (read(raw, untyped), Columns())


Reader = Callable[[bytes, Collection[str]], tuple[dict[str, Column], Columns]]
READERS: dict[str, Reader] = {
    ".csv": _inferred(read_csv),
    ".tsv": _inferred(read_tsv),
    ".jsonl": _inferred(read_jsonl),
    ".json": _inferred(read_jsonl),
    ".parquet": read_parquet,
}
