"""The `source` section of a job: its `kind` names an entry point, which brings the section's model.

A kind of source is registered in the group `earmill.sources`, built-in or not, as a `SourceKind`.
Only the kind that a job names is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import BeforeValidator, SerializeAsAny
from pydantic_core import PydanticCustomError

from earmill.pipeline.common.errors import ExtensionError
from earmill.pipeline.common.extension_points import SOURCES
from earmill.pipeline.common.text import alternatives
from earmill.pipeline.spec.section import SpecModel

KIND_ERROR = "source_kind"


class SourceSection(SpecModel):
    """Base of the sections of all kinds of source.

    Args:
        kind: The name the kind is registered under; a `Literal` of it in every section.
    """

    kind: str


@dataclass(frozen=True)
class SourceKind:
    """What an entry point of `earmill.sources` leads to.

    Args:
        section: The model of the job's `source` section. Its docstring describes the kind and, as
            `Args`, each key.
        open: The source of a section: `earmill.pipeline.sources.base.Source`.
        has_arrays: Rows may be arrays of samples: `open` also takes the job's
            `audio.array_rate_hz`, or None.
    """

    section: type[SourceSection]
    open: Callable[..., Any]
    has_arrays: bool = False


def source_kind(name: str) -> SourceKind:
    """The kind of source registered under a name.

    Raises:
        ExtensionError: There is none, or it is not what an entry point of the group leads to.
    """
    found = SOURCES.load(name)
    if not isinstance(found, SourceKind):
        raise ExtensionError(
            f"source kind {name!r} of {SOURCES.owner(name)}: expected its entry point to lead to a "
            f"SourceKind, got {type(found).__name__}"
        )
    if not (isinstance(found.section, type) and issubclass(found.section, SourceSection)):
        raise ExtensionError(
            f"source kind {name!r} of {SOURCES.owner(name)}: expected a subclass of SourceSection "
            f"as its section, got {found.section!r}"
        )
    says = get_args(found.section.model_fields["kind"].annotation)
    if says != (name,):
        raise ExtensionError(
            f"source kind {name!r} of {SOURCES.owner(name)}: expected kind: Literal[{name!r}] in "
            f"{found.section.__name__}, got {found.section.model_fields['kind'].annotation}"
        )
    return found


def section_for(value: Any) -> type[SourceSection] | None:
    """The model of a section as it stands in a job file; None where its kind is none."""
    try:
        return source_kind(value["kind"]).section
    except (ExtensionError, LookupError, TypeError):
        return None


def _as_section(value: Any) -> Any:
    """A mapping as the section that its `kind` names; anything else is left to the validation."""
    if not isinstance(value, Mapping):
        return value
    if "kind" not in value:
        said = f"missing; expected {alternatives(SOURCES.names())}"
        raise PydanticCustomError(KIND_ERROR, "{said}", {"said": said})
    try:
        kind = source_kind(str(value["kind"]))
    except ExtensionError as error:
        raise PydanticCustomError(KIND_ERROR, "{said}", {"said": str(error)}) from error
    return kind.section.model_validate(dict(value))


SourceSpec = Annotated[SerializeAsAny[SourceSection], BeforeValidator(_as_section)]
