"""Foreign tables (csv, tsv, JSON lines, Parquet): bytes to columns of cells.

Text is UTF-8, or UTF-16 with a byte order mark, and may be compressed. A blank line is a row
without values, which the caller counts. The index that pandas writes beside the columns is not
carried through. A table that cannot be read raises ValueError or csv.Error.

Carried cells get a type that Parquet and JSON share. A csv column becomes numbers only if all cells
look like numbers written by a program: a speaker "0042" must not become 42. NaN and infinity become
null, because JSON has neither.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from earmill.pipeline.common.arrow_types import MOST_EXACT, Columns, kept_type
from earmill.pipeline.common.redact import redact_uris
from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.sources.base import Scalar
from earmill.pipeline.storage.documents import table_of

INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,18})")
WHOLE = re.compile(r"-?(0|[1-9][0-9]*)")  # An integer of any size.
DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
BOOLEAN = re.compile(r"true|false")
RESERVED = ("uri", "id", "start", "end")
CHUNK_ROWS = 8192  # Rows of a text table that become Python objects at once.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
MOST_TEXT_BYTES = 4 << 30  # A small compressed file can hold text without end.
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
DELIMITERS = ",\t;|"
# Names that pandas gives to columns without a name, and to its index in Parquet.
INDEX = re.compile(r"Unnamed: [0-9].*|__index_level_[0-9]+__")
NO_VALUES, INDEX_OF_PANDAS = "no values", "index of pandas"

Cells = Sequence[Any]


def scalar(value: Any) -> Scalar:
    """Convert a value of JSON: lists and mappings to JSON text, NaN and infinity to None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True, ensure_ascii=False)
    return cast(Scalar, value)


def public_value(value: Any) -> Any:
    """Return a cell for publication: secrets in the uris of its texts are removed."""
    if isinstance(value, str):
        # JSON can hold escaped surrogates, which are no valid text.
        return redact_uris(value).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {key: public_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(public_value(item) for item in value)
    return value


def typed(cells: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert a column of text to the type that all of its filled cells look like: integer,
    decimal, true/false or text. Empty cells become null. A column with whole numbers that its type
    would round stays text."""
    cells = pc.if_else(pc.equal(cells, ""), pa.scalar(None, cells.type), cells)
    filled = cells.drop_null()

    def like(pattern: re.Pattern[str]) -> pa.ChunkedArray:
        return pc.match_substring_regex(filled, f"^({pattern.pattern})$")

    if not len(filled):
        return cells
    if pc.all(like(WHOLE)).as_py():
        try:
            return cells.cast(pa.int64())
        except pa.ArrowInvalid:
            return cells
    if pc.all(like(DECIMAL)).as_py():
        whole = filled.filter(like(WHOLE))
        long = whole.filter(pc.greater_equal(pc.utf8_length(whole), len(str(MOST_EXACT))))
        try:
            is_exact = pc.all(pc.less_equal(pc.abs(long.cast(pa.int64())), MOST_EXACT)).as_py()
        except pa.ArrowInvalid:
            return cells
        if is_exact is False:
            return cells
        numbers = cells.cast(pa.float64())
        # A number above the largest double is read as infinity.
        return pc.if_else(pc.is_finite(numbers), numbers, pa.scalar(None, numbers.type))
    return cells.cast(pa.bool_()) if pc.all(like(BOOLEAN)).as_py() else cells


def unified_column(cells: Sequence[Any]) -> list[Scalar]:
    """Convert a column to one type: mixed numbers become floats if these hold them exactly, other
    mixes text."""
    values = [scalar(cell) for cell in cells]
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        return values
    large = (isinstance(value, int) and abs(value) > MOST_EXACT for value in values)
    if kinds == {int, float} and not any(large):
        return [float(value) if value is not None else None for value in values]
    return [
        value if value is None or isinstance(value, str) else json.dumps(value) for value in values
    ]


class Column(Sequence[Any]):
    """The cells of a column, packed; a slice is a list of values."""

    def __init__(self, packed: pa.ChunkedArray) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: Any) -> Any:
        part = self._packed[index]
        return part.to_pylist() if isinstance(index, slice) else part.as_py()


def read_table(name: str, raw: bytes, untyped: Collection[str]) -> tuple[dict[str, Cells], Columns]:
    """Read a table by the ending of its name; cells of the columns `untyped` are not converted.
    Returns the columns, and the facts about the columns that are carried through."""
    path = PurePosixPath(name.lower())
    compression = COMPRESSIONS.get(path.suffix)
    ending = path.suffix if compression is None else PurePosixPath(path.stem).suffix
    if ending not in ENDINGS or (compression is not None and ending == ".parquet"):
        raise ValueError(
            f"expected a table that ends in {', '.join(ENDINGS)}, or text of these that ends in "
            f"{', '.join(COMPRESSIONS)}, got {path.suffix or 'no extension'!r}"
        )
    known = Columns()
    try:
        if ending == ".parquet":
            columns, known = _read_parquet(raw, untyped)
        else:
            content = raw if compression is None else _decompressed(raw, compression)
            columns = TEXT_READERS[ending](content, untyped)
    except UnicodeDecodeError as error:
        got = error.object[error.start]
        raise ValueError(
            f"expected text in UTF-8, got the byte {got:#04x}; save the table as UTF-8"
        ) from error
    dropped = _index_columns(columns, untyped)
    kept = {name: cells for name, cells in columns.items() if name not in dropped}
    types = {name: kind for name, kind in known.types.items() if name not in dropped}
    return kept, Columns(types, known.labels, {**known.dropped, **dropped})


def _index_columns(columns: Mapping[str, Cells], untyped: Collection[str]) -> dict[str, str]:
    """Return the index and blank columns of pandas, with the reason for leaving them out."""
    found = {}
    for name in (name for name in columns if INDEX.fullmatch(name) and name not in untyped):
        cells, values = columns[name], set[type]()
        for first in range(0, len(cells), CHUNK_ROWS):
            values |= {type(cell) for cell in cells[first : first + CHUNK_ROWS]}
        if values <= {int, type(None)}:
            found[name] = INDEX_OF_PANDAS if int in values else NO_VALUES
    return found


def _decompressed(raw: bytes, compression: str) -> bytes:
    try:
        stream = pa.CompressedInputStream(pa.BufferReader(raw), compression)
        content: bytes = stream.read(MOST_TEXT_BYTES + 1)
    except (OSError, pa.ArrowException) as error:
        raise ValueError(f"expected text compressed with {compression}: {error}") from error
    if len(content) > MOST_TEXT_BYTES:
        raise ValueError(f"expected at most {MOST_TEXT_BYTES:,} bytes of text, got more")
    return content


def _text(raw: bytes) -> io.TextIOWrapper:
    """Return the text of a file, without the line ends after its last line."""
    encoding = "utf-16" if raw.startswith(UTF_16) else "utf-8-sig"
    content = raw if encoding == "utf-16" else raw.rstrip(b"\r\n")
    return io.TextIOWrapper(io.BytesIO(content), encoding=encoding, newline="")


def _read_delimited(raw: bytes, untyped: Collection[str], delimiter: str) -> dict[str, Cells]:
    """Read a table with a header line, which decides the delimiter if it lacks `delimiter`.
    Quotation marks are text in tables with tabs, such as the tables of Common Voice."""
    lines = _text(raw)
    first = next((line for line in lines if line.strip()), "")
    found = [mark for mark in (delimiter, *DELIMITERS) if mark in first]
    dialect: dict[str, Any] = {"delimiter": found[0] if found else delimiter}
    if delimiter == dialect["delimiter"] == "\t":
        dialect["quoting"] = csv.QUOTE_NONE
    reader = csv.reader(chain([first], lines), strict=True, **dialect)
    # A column without a name gets the name that pandas would give it.
    names = [name.strip().strip("\ufeff").strip() for name in next(reader, [])]
    header = [name or f"Unnamed: {place}" for place, name in enumerate(names)]
    if len(set(header)) != len(header):
        raise ValueError(f"the csv header names a column twice: {', '.join(header)}")

    def whole(row: list[str]) -> list[str]:
        """Return the cells of a row; a blank line has a blank cell for each column."""
        while len(row) > len(header) and not row[-1].strip():
            row.pop()
        return row if any(cell.strip() for cell in row) else [""] * len(header)

    rows = map(whole, reader)
    packed: list[list[pa.Array]] = [[] for _ in header]
    count = 0
    while chunk := list(islice(rows, CHUNK_ROWS)):
        for number, row in enumerate(chunk, start=count + 1):
            if len(row) != len(header):
                raise ValueError(f"csv row {number}: expected {len(header)} cells, got {len(row)}")
        count += len(chunk)
        for place, cells in enumerate(zip(*chunk, strict=True)):
            packed[place].append(pa.array(cells, pa.large_string()))
    columns = (pa.chunked_array(arrays, pa.large_string()) for arrays in packed)
    return {
        name: Column(cells if name in untyped else typed(cells))
        for name, cells in zip(header, columns, strict=True)
    }


def _read_json(raw: bytes, untyped: Collection[str], *, lists: bool = True) -> dict[str, Cells]:
    """Read one JSON object a line or, with `lists`, one list of objects; a missing key is null."""
    text = _text(raw).read()
    rows: list[Any] = []
    if lists and text.lstrip().startswith("["):
        place = "entry"
        try:
            rows = loads_json(text, max_chars=None)
        except ValueError as error:
            raise ValueError(f"the list is not JSON: {error}") from error
    else:
        place = "line"
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                rows.append(loads_json(line) if line.strip() else {})
            except ValueError as error:
                raise ValueError(f"line {number} is not JSON: {error}") from error
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            got = type(row).__name__
            raise ValueError(f"{place} {number}: expected a JSON object, got {got}")
    columns: dict[str, Cells] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [row.get(name) for row in rows]
        columns[name] = cells if name in untyped else unified_column(cells)
    return columns


def _read_parquet(raw: bytes, untyped: Collection[str]) -> tuple[dict[str, Cells], Columns]:
    table = table_of(raw)
    carried = [field for field in table.schema if field.name not in untyped]
    types = {field.name: kept_type(field.type) for field in carried}
    dropped = {field.name: str(field.type) for field in carried if types[field.name] is None}
    kept = {name: kind for name, kind in types.items() if kind is not None}
    columns = [name for name in table.schema.names if name not in dropped]
    return {name: Column(table.column(name)) for name in columns}, Columns(kept, dropped=dropped)


TEXT_READERS: dict[str, Callable[[bytes, Collection[str]], dict[str, Cells]]] = {
    ".csv": partial(_read_delimited, delimiter=","),
    ".tsv": partial(_read_delimited, delimiter="\t"),
    ".jsonl": partial(_read_json, lists=False),
    ".ndjson": partial(_read_json, lists=False),
    ".json": _read_json,
}
ENDINGS = (*TEXT_READERS, ".parquet")
TABLE_ENDINGS = (*ENDINGS, *(text + packed for text in TEXT_READERS for packed in COMPRESSIONS))
