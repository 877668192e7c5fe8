"""Columns carried through: any table cell as one of the types Parquet and JSON share.

Text stays text: a speaker "0042" must not become 42. A column of a csv becomes numbers only if all
its cells look like numbers a program wrote. NaN and infinity become null: JSON has neither.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
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


class TextKind:
    """What the filled cells of a csv column have in common: integers, decimals, true/false, or
    text; told as they come."""

    def __init__(self) -> None:
        self._filled = False
        self._left: list[tuple[Callable[[str], object], Callable[[str], Scalar]]] = [
            (INTEGER.fullmatch, int),
            (DECIMAL.fullmatch, lambda cell: scalar(float(cell))),
            (BOOLEANS.__contains__, BOOLEANS.__getitem__),
        ]

    def see(self, cells: Sequence[str]) -> None:
        """Some more cells."""
        filled = [cell for cell in cells if cell]
        self._filled = self._filled or bool(filled)
        self._left = [kind for kind in self._left if all(map(kind[0], filled))]

    def typed(self, cells: Sequence[str]) -> list[Scalar]:
        """Cells as what all that were seen are; empty ones are None."""
        if not self._filled or not self._left:
            return [cell or None for cell in cells]
        convert = self._left[0][1]
        return [convert(cell) if cell else None for cell in cells]


def typed_column(cells: Sequence[str]) -> list[Scalar]:
    """A csv column: integers, decimals or true/false if every filled cell is one, else text."""
    kind = TextKind()
    kind.see(cells)
    return kind.typed(cells)


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
