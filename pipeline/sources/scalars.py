"""Columns carried through: any table cell as one of the types Parquet and JSON share.

Text stays text: a speaker "0042" must not become 42. A column of a csv becomes numbers only if all
its cells look like numbers a program wrote. NaN and infinity become null: JSON has neither.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from earmill.pipeline.common.redact import redact_uris
from earmill.pipeline.sources.base import Scalar

INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,17})")
DECIMAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
BOOLEANS = {"true": True, "false": False}


def scalar(value: Any) -> Scalar:
    """One cell: lists and mappings become JSON text, dates ISO text, bytes are refused (None)."""
    as_python = getattr(value, "item", None)
    if callable(as_python):  # numpy and arrow scalars
        value = as_python()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    if isinstance(value, bytes | bytearray | memoryview):
        return None
    as_iso = getattr(value, "isoformat", None)
    return as_iso() if callable(as_iso) else str(value)


def public_value(value: Any) -> Any:
    """A cell as it may be published: what is secret in the uris of its texts is removed."""
    if isinstance(value, str):
        # JSON can escape what is no text.
        return redact_uris(value).encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {key: public_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(public_value(item) for item in value)
    return value


def typed_column(cells: Sequence[str]) -> list[Scalar]:
    """A csv column: integers, decimals or true/false if every filled cell is one, else text."""
    filled = [cell for cell in cells if cell != ""]
    if filled and all(INTEGER.fullmatch(cell) for cell in filled):
        return [int(cell) if cell else None for cell in cells]
    if filled and all(DECIMAL.fullmatch(cell) for cell in filled):
        return [scalar(float(cell)) if cell else None for cell in cells]
    if filled and all(cell in BOOLEANS for cell in filled):
        return [BOOLEANS[cell] if cell else None for cell in cells]
    return [cell if cell else None for cell in cells]


def unified_column(cells: Sequence[Any]) -> list[Scalar]:
    """A column of mixed cells with one type: numbers together are floats, any other mix is text."""
    values = [scalar(cell) for cell in cells]
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        return values
    if kinds == {int, float}:
        return [float(value) if value is not None else None for value in values]
    return [value if value is None or isinstance(value, str) else _text(value) for value in values]


def _text(value: bool | int | float) -> str:
    return json.dumps(value)
