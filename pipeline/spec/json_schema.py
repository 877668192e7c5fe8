"""The JSON schema of a job file, for editors: what `earmill spec --json-schema` prints.

Made from the spec's own models, the installed kinds of source and formats, and the registered
models with their streams. It knows keys, types and names; what depends on several keys at once, or
on a model's parameters, is for `earmill plan` to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel

from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.reference import usable_kinds

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The whole schema: a mapping that `json.dumps` takes, the same for the same installation."""
    schema = _section(JobSpec)
    parts = schema["$defs"]
    del parts["SourceSection"]
    parts |= {kind.section.__name__: _section(kind.section) for kind in usable_kinds().values()}
    schema["properties"]["source"] = {
        "description": schema["properties"]["source"]["description"],
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": sorted(usable_kinds())}},
        "allOf": [
            _where("kind", name, {"$ref": f"#/$defs/{kind.section.__name__}"})
            for name, kind in usable_kinds().items()
        ],
    }
    _name_models(parts["ExtractSpec"])
    return {"$schema": DIALECT, "title": "earmill job", **schema}


def _section(model: type[BaseModel]) -> dict[str, Any]:
    schema: dict[str, Any] = _cleaned(model.model_json_schema())
    return schema


def _where(key: str, value: str, then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"properties": {key: {"const": value}}, "required": [key]}, "then": then}


def _name_models(extract: dict[str, Any]) -> None:
    """Registered models and, of each, the streams; `torch_module` declares its own."""
    from amtcore.features.build import list_models

    models = list_models()
    extract["properties"]["model"]["enum"] = [model.name for model in models]
    extract["allOf"] = [
        _where("model", model.name, {"properties": {"streams": _only(model.streams)}})
        for model in models
        if model.streams
    ]


def _only(streams: Iterable[str]) -> dict[str, Any]:
    return {"propertyNames": {"enum": sorted(streams)}}


def _cleaned(schema: Any) -> Any:
    """Without the titles that pydantic makes of names, and with the first line of docstrings."""
    if isinstance(schema, list):
        return [_cleaned(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        key: _cleaned(part)
        for key, part in schema.items()
        if not (key == "title" and isinstance(part, str))
    }
    if "properties" in schema and isinstance(text := schema.get("description"), str):
        kept["description"] = text.partition("\n")[0]
    return kept
