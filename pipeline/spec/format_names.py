"""Names of output formats in a job: those of the entry points of `earmill.formats`.

A format is imported as soon as a job names it, so that one that is broken ends the job before any
work. The built-in ones import what they need when they are used.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, GetJsonSchemaHandler

from earmill.pipeline.common.errors import ExtensionError
from earmill.pipeline.common.extension_points import FORMATS


def _usable(name: str) -> str:
    try:
        FORMATS.load(name)
    except ExtensionError as error:
        raise ValueError(str(error)) from error
    return name


class _Installed:
    """The names as a JSON schema, at the time it is asked for."""

    @staticmethod
    def __get_pydantic_json_schema__(core_schema: Any, handler: GetJsonSchemaHandler) -> Any:
        return {"type": "string", "enum": [*FORMATS.names()]}


FormatName = Annotated[str, AfterValidator(_usable), _Installed]
