"""What every section of a job file is made of: a frozen model, no unknown keys, plain uris."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from earmill.pipeline.common.redact import has_secrets
from earmill.pipeline.spec.docstrings import argument_texts

PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# The one place for credentials: never stored, never shown.
Options = Annotated[dict[str, Any], Field(default_factory=dict, repr=False)]


class SpecModel(BaseModel):
    """Base of every section: frozen, no unknown keys, each field described in its docstring."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        meanings = argument_texts(cls.__doc__)
        for name, field in cls.model_fields.items():
            field.description = meanings.get(name)
        cls.model_rebuild(force=True)


def plain_uri(value: str) -> str:
    if not value.strip():
        raise ValueError("expected a path or URI, got an empty string")
    if has_secrets(value):
        # The uri is written into plan, provenance and card; storage_options never is.
        raise ValueError("credentials inside a URI would be published; use storage_options")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"expected a name in UTF-8, got {value!a}; rename the folder") from None
    return value


def plain_uris(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(plain_uri(value) for value in values)
