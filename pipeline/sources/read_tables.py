"""The tables a manifest may be: csv, tsv, JSON lines, Parquet. Bytes to columns of cells.

Parquet keeps its types; text tables get the ones that no text is lost by. A table that cannot be
taken as it is raises ValueError or csv.Error. Columns of csv and Parquet lie packed: their cells
become objects a slice at a time.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import Any, overload

import pyarrow as pa

from earmill.pipeline.common.arrow_types import Columns, kept_type
from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.sources.base import Scalar
from earmill.pipeline.sources.scalars import TextKind, unified_column
from earmill.pipeline.storage.arrow_tables import table_of

RESERVED = ("uri", "id", "start", "end")

# Rows of a text table that become Python objects at once.
CHUNK_ROWS = 8192


class Column(Sequence[Any]):
    """The cells of a column; a slice of it is a list.

    Args:
        packed: The cells. typed: Makes values of them.
    """

    def __init__(
        self, packed: pa.ChunkedArray, typed: Callable[[list[Any]], list[Any]] = list
    ) -> None:
        self._packed, self._typed = packed, typed

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            return self._typed(self._packed.slice(start, max(0, stop - start)).to_pylist())
        place = range(len(self))[index]
        return self[place : place + 1][0]


Cells = Sequence[Any]


def read_csv(raw: bytes, untyped: Collection[str] = RESERVED, **dialect: Any) -> dict[str, Cells]:
    """A csv with a header line; columns get a type only where no text is lost by it."""
    text = io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8-sig", newline="")
    rows = (row for row in csv.reader(text, strict=True, **dialect) if row)
    header = next(rows, [])
    if len(set(header)) != len(header):
        raise ValueError(f"the csv header names a column twice: {', '.join(header)}")
    kinds = [TextKind() for _ in header]
    packed: list[list[pa.Array]] = [[] for _ in header]
    count = 0
    while chunk := list(islice(rows, CHUNK_ROWS)):
        for number, row in enumerate(chunk, start=count + 1):
            if len(row) != len(header):
                raise ValueError(f"csv row {number}: expected {len(header)} cells, got {len(row)}")
        count += len(chunk)
        for place, cells in enumerate(zip(*chunk, strict=True)):
            kinds[place].see(cells)
            packed[place].append(pa.array(cells, pa.large_string()))
    return {
        name: Column(
            pa.chunked_array(packed[place], pa.large_string()),
            list if name in untyped else kinds[place].typed,
        )
        for place, name in enumerate(header)
    }


def read_tsv(raw: bytes, untyped: Collection[str] = RESERVED) -> dict[str, Cells]:
    """The same with tabs; quotation marks are text, as in the tables of Common Voice."""
    return read_csv(raw, untyped, delimiter="\t", quoting=csv.QUOTE_NONE)


def read_jsonl(raw: bytes, untyped: Collection[str] = RESERVED) -> dict[str, Cells]:
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
) -> tuple[dict[str, Cells], Columns]:
    """A parquet file, read whole: cells in their types, and what is known of the columns."""
    table = table_of(raw)
    types, dropped = {}, {}
    columns: dict[str, Cells] = {}
    for field in table.schema:
        if field.name in untyped:
            columns[field.name] = Column(table.column(field.name))
            continue
        kind = kept_type(field.type)
        if kind is None:
            dropped[field.name] = str(field.type)
        else:
            types[field.name] = kind
            columns[field.name] = Column(table.column(field.name))
    return columns, Columns(types, dropped=dropped)


def _tidy(columns: Mapping[str, Cells], untyped: Collection[str]) -> dict[str, Cells]:
    tidy: dict[str, Cells] = {}
    for name, cells in columns.items():
        values: list[Scalar] = unified_column(cells)
        tidy[name] = list(cells) if name in untyped else list(values)
    return tidy


def _inferred(read: Callable[..., dict[str, Cells]]) -> Reader:
    return lambda raw, untyped: (read(raw, untyped), Columns())


Reader = Callable[[bytes, Collection[str]], tuple[dict[str, Cells], Columns]]
READERS: dict[str, Reader] = {
    ".csv": _inferred(read_csv),
    ".tsv": _inferred(read_tsv),
    ".jsonl": _inferred(read_jsonl),
    ".json": _inferred(read_jsonl),
    ".parquet": read_parquet,
}
