"""Columns of the source that are carried through: their Arrow types and names of classes.

Types that the source does not know (csv, JSON) are inferred from the values of the whole plan. They
are stored as JSON: a primitive by its Arrow name, any other type as `{"kind": [...]}`. Binary
values, extension types and unions are not carried through.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from earmill.pipeline.common.errors import CommitError


@dataclass(frozen=True)
class Columns:
    """Facts of a source about the columns that it carries through.

    Args:
        types: Arrow types from `kept_type`; types of other columns are inferred.
        labels: Column to the names of its classes, in the order of their numbers; `tags[]` for the
            elements of a list, `meta.kind` for a field of a struct.
        dropped: Column that is not carried through to the reason.
    """

    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)


def kept_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type in which a column is carried through; None if it is not."""
    encoded = _encoded(kind)
    return None if encoded is None else arrow_type(encoded)


def type_json(kind: pa.DataType) -> Any:
    encoded = _encoded(kind)
    if encoded is None:
        raise CommitError(f"expected a type that is carried through, got {kind}")
    return encoded


def _encoded(kind: pa.DataType) -> Any:
    if pa.types.is_dictionary(kind):
        return _encoded(kind.value_type)
    if pa.types.is_null(kind):
        return "string"
    if pa.types.is_timestamp(kind):
        return {"timestamp": [kind.unit, kind.tz]}
    if pa.types.is_decimal(kind):
        return {"decimal": [kind.bit_width, kind.precision, kind.scale]}
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if is_text or (pa.types.is_primitive(kind) and not pa.types.is_interval(kind)):
        return str(kind)
    for name, is_one in _LISTS.items():
        if is_one(kind):
            size = [kind.list_size] if name == "fixed_size_list" else []
            return _nested(name, [kind.value_type], size)
    if pa.types.is_map(kind):
        return _nested("map", [kind.key_type, kind.item_type])
    if pa.types.is_struct(kind) and kind.num_fields:
        fields = [kind.field(index) for index in range(kind.num_fields)]
        return _nested("struct", [f.type for f in fields], [f.name for f in fields])
    return None


_LISTS: Mapping[str, Callable[[pa.DataType], bool]] = {
    "list": pa.types.is_list,
    "large_list": pa.types.is_large_list,
    "fixed_size_list": pa.types.is_fixed_size_list,
}


def _nested(name: str, parts: Sequence[pa.DataType], more: Sequence[Any] = ()) -> Any:
    encoded = [_encoded(part) for part in parts]
    return None if any(part is None for part in encoded) else {name: [*encoded, *more]}


def arrow_type(encoded: Any) -> pa.DataType:
    """Return the type of its JSON form; CommitError for any other JSON."""
    try:
        if isinstance(encoded, str):
            return pa.type_for_alias(encoded)
        ((name, parts),) = encoded.items()
        return _MADE[name](*parts)
    except (ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as error:
        raise CommitError(f"expected the type of a column, got {encoded!r}") from error


def _struct(*parts: Any) -> pa.DataType:
    half = len(parts) // 2
    return pa.struct([*zip(parts[half:], map(arrow_type, parts[:half]), strict=True)])


_MADE: Mapping[str, Callable[..., pa.DataType]] = {
    "timestamp": pa.timestamp,
    "decimal": lambda bits, *digits: getattr(pa, f"decimal{bits}")(*digits),
    "list": lambda of: pa.list_(arrow_type(of)),
    "large_list": lambda of: pa.large_list(arrow_type(of)),
    "fixed_size_list": lambda of, size: pa.list_(arrow_type(of), size),
    "map": lambda key, item: pa.map_(arrow_type(key), arrow_type(item)),
    "struct": _struct,
}


def has_text(kind: pa.DataType) -> bool:
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return True
    return any(has_text(kind.field(index).type) for index in range(kind.num_fields))


def plain_json(value: Any) -> Any:
    """Return a cell that JSON cannot hold as text for hashing: times in ISO 8601."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)


# Whole numbers up to this size are exact in double.
MOST_EXACT = 2**53
LARGE = "large int64"  # Whole numbers above it, which are never stored as double.


def extra_types(extras: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return types that fit all values, by column: double for integers and floats that are exact in
    it. Any other mixture, or a column without values, is string."""
    seen = SeenTypes()
    for extra in extras:
        seen.add(extra)
    return seen.found()


class SeenTypes:
    """The result of `extra_types`, row by row."""

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}

    def add(self, extra: Mapping[str, Any]) -> None:
        for name, value in extra.items():
            kinds = self._seen.setdefault(name, set())
            if value is not None:
                kinds.add(_kind(name, value))

    def found(self) -> dict[str, str]:
        return {name: _merge(kinds) for name, kinds in sorted(self._seen.items())}


def _kind(name: str, value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "bool"
    if isinstance(value, int | np.integer):
        if abs(int(value)) <= MOST_EXACT:
            return "int64"
        return LARGE if -(2**63) <= int(value) < 2**63 else "string"
    if isinstance(value, float | np.floating):
        return "double"
    if isinstance(value, str):
        return "string"
    raise CommitError(
        f"column {name!r}: expected text, a number, true/false or nothing, "
        f"got {type(value).__name__}; convert it in the source"
    )


def _merge(kinds: set[str]) -> str:
    if kinds <= {"int64", LARGE} and kinds:
        return "int64"
    if len(kinds) == 1:
        return next(iter(kinds))
    return "double" if kinds == {"int64", "double"} else "string"


def column(name: str, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return the cells of one column; CommitError if a cell does not fit the type."""
    if all(value is None for value in values):
        return pa.nulls(len(values), kind)
    if kind == pa.string():
        values = [
            value if value is None or isinstance(value, str) else str(value) for value in values
        ]
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as err:
        raise CommitError(f"column {name!r}: expected {kind} values: {err}") from err
