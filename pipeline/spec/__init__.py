"""The job file: its sections, their checks and canonical form, overrides, messages, reference page.

This module has the base class of all sections: frozen, no unknown keys, URIs without secrets. The
`Args` of a section's docstring describe its fields, for the reference page and the JSON schema.

The package may import `common`, `storage` and `audio`, whose settings it names.
"""

from __future__ import annotations

import inspect
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from earmill.pipeline.common.redact import has_secrets

SECTION = re.compile(r"^(Args|Attributes):$")
ENTRY = re.compile(r"^    (\w+): (.*)$")


def argument_texts(docstring: str | None) -> dict[str, str]:
    """Return the arguments of a docstring, each with its description on one line.

    Example:
        >>> argument_texts("A row.\\n\\n    Args:\\n        uri: where\\n            it is.\\n")
        {'uri': 'where it is.'}
    """
    found: dict[str, str] = {}
    inside, last = False, ""
    for line in inspect.cleandoc(docstring or "").splitlines():
        if not line.startswith(" "):
            inside = bool(SECTION.match(line)) or (inside and not line)
        elif inside and (entry := ENTRY.match(line)):
            last = entry[1]
            found[last] = entry[2].strip()
        elif inside and last:
            found[last] += " " + line.strip()
    return found


PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# The only keys for credentials: never stored, never shown.
Options = Annotated[dict[str, Any], Field(default_factory=dict, repr=False)]


class SpecModel(BaseModel):
    """Base of every section: frozen, no unknown keys, each field described in its docstring."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        meanings: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            meanings |= argument_texts(base.__doc__)
        for name, field in cls.model_fields.items():
            field.description = meanings.get(name)
        cls.model_rebuild(force=True)


def plain_uri(value: str) -> str:
    if not value.strip():
        raise ValueError("expected a path or URI, got an empty string")
    if has_secrets(value):
        # Plan, provenance and card contain the URI; they never contain storage_options.
        raise ValueError("credentials inside a URI would be published; use storage_options")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"expected a name in UTF-8, got {value!a}; rename the folder") from None
    return value


def plain_uris(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(plain_uri(value) for value in values)


PlainUri = Annotated[str, AfterValidator(plain_uri)]
