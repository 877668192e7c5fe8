"""JSON of the output as the dataclass that wrote it: every field of its type, or one error.

What lies in an output may have been damaged or made by others. A value of the wrong type or an
unknown format must be found where the file is read, not where the value is used.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.storage import paths

T = TypeVar("T")


class UnreadableVersionError(Exception):
    """A file of another layout version than those that this release reads."""


class Strict:
    """Base of the dataclasses that are read: no conversions between types, no unknown fields."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")


def typed_json(kind: type[T], text: str | bytes) -> T:
    """The object of a dataclass that the JSON text describes.

    Raises:
        ValueError: In one line, which value is wrong: not JSON, a field missing, unknown or of
            another type.
    """
    try:
        return _adapter(kind).validate_json(text)  # type: ignore[arg-type]
    except ValidationError as err:
        first = err.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise ValueError(f"{where}: {first['msg']}") from None


def versioned_json(kind: type[T], text: str | bytes) -> T:
    """The same of a dataclass with a `layout_version`, which must be one that is read here.

    Raises:
        ValueError: As above. UnreadableVersionError: It is of another version.
    """
    try:
        found = typed_json(kind, text)
        version = found.layout_version  # type: ignore[attr-defined]
    except ValueError:
        version = _version(text)
        if version is None or paths.is_readable(version):
            raise
    if not paths.is_readable(version):
        raise UnreadableVersionError(
            f"expected layout version {paths.readable_versions()}, got {version}"
        )
    return found


def _version(text: str | bytes) -> object:
    """What a text that is no such object says of its version; None where it says nothing."""
    try:
        data = loads_json(text, max_chars=None)
    except ValueError:
        return None
    return data.get("layout_version") if isinstance(data, dict) else None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
