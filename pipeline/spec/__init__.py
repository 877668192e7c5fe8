"""The job file: its sections, their checks and canonical form, overrides, messages, reference page.

This module has the base class of all sections: frozen, no unknown keys, URIs without secrets. The
`Args` of a section's docstring describe its fields, for the reference page and the JSON schema.

The package may import `common`, `storage` and `audio`, whose settings it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from amtcore.features.parameters import argument_texts
from earmill.pipeline.common.redact import has_secrets
from earmill.pipeline.common.text import nearest

KEY_ERROR = "key"  # Type of errors whose text is complete but for the path of the key.


def key_errors(texts: Mapping[str, str]) -> ValidationError:
    """Return the error of a section with wrong keys, from a text for each key."""
    errors = []
    for key, text in texts.items():
        kind = PydanticCustomError(KEY_ERROR, "{text}", {"text": text})
        errors.append(InitErrorDetails(type=kind, loc=(key,), input=None))
    return ValidationError.from_exception_data("section", errors)


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

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        """Refuse unknown keys; the message of pydantic does not name the valid keys."""
        valid = [*cls.model_fields]
        keys = map(str, value) if isinstance(value, Mapping) else ()
        if unknown := [key for key in keys if key not in valid]:
            known = f"(valid keys: {', '.join(valid)})"
            raise key_errors({k: f"unknown key{nearest(k, valid)} {known}" for k in unknown})
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true and false for a number: pydantic takes them for 1 and 0."""
        values = value if isinstance(value, list | tuple) else [value]
        if truth := [each for each in values if isinstance(each, bool)]:
            kinds = set(types_in(cls.model_fields[str(info.field_name)].annotation))
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"expected a number, got {str(truth[0]).lower()}")
        return value


def types_in(annotation: Any) -> Iterator[Any]:
    """Yield the types inside an annotation."""
    yield annotation
    for argument in get_args(annotation):
        yield from types_in(argument)


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


PlainUri = Annotated[str, AfterValidator(plain_uri)]
