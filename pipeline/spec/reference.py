"""The reference page of the job file, docs/spec.md, and its JSON schema for editors.

Types, bounds and defaults come from pydantic, descriptions from the docstrings of the sections.
The schema has keys, types and names; rules about several keys are checked by `earmill plan`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from earmill.pipeline.common.errors import ExtensionError
from earmill.pipeline.common.extension_points import FORMATS, SOURCES
from earmill.pipeline.spec.job import (
    AudioSpec,
    CalibrationSpec,
    ExtractSpec,
    JobSpec,
    ListenerSpec,
    OutputSpec,
    RunSpec,
)
from earmill.pipeline.spec.licenses import License, LicensesSpec
from earmill.pipeline.spec.source import SourceKind, SourceSection, source_kind
from earmill.pipeline.spec.spans import SpansSpec
from earmill.pipeline.spec.variants import NoiseSpec, VariantSpec, VariantsSpec

AFTER_SOURCE: tuple[tuple[str, type[BaseModel]], ...] = (
    ("audio", AudioSpec),
    ("audio.calibration", CalibrationSpec),
    ("audio.spans", SpansSpec),
    ("audio.variants", VariantsSpec),
    ("audio.variants.of, each entry", VariantSpec),
    ("audio.variants.of.N.noise", NoiseSpec),
    ("extract, each entry", ExtractSpec),
    ("extract, listener of an entry", ListenerSpec),
    ("output", OutputSpec),
    ("licenses", LicensesSpec),
    ("licenses.source, licenses.features", License),
    ("run", RunSpec),
)
PLACES = {model.__name__: f"section {title}" for title, model in AFTER_SOURCE}
PLACES[SourceSection.__name__] = "one of the source sections"
HEADER = """\
# The job file

A job file is one YAML mapping. Unknown keys, duplicate keys and aliases that unfold into more than
50,000 values are refused. Any key can be overridden, e.g. `--set output.dtype=float32` or
`--set extract.0.fs_hz=16000`. `--set` takes YAML, but a value that begins with `*` is text
(`--set 'source.glob=**/*.wav'`); in a file such a value needs quotes.
`earmill spec` prints this page. `earmill spec --json-schema` prints a JSON schema
([job.schema.json](job.schema.json)), with which editors complete and check keys. Editors with the
YAML language server need `# yaml-language-server: $schema=job.schema.json` in the first line.
"""
#: Pages that descriptions name; the reference itself lies in docs.
_PAGE = re.compile(r"docs/([\w/-]+\.md)")
STREAMS_NOTE = """\
`extract.N.streams` maps the name of a stream to its options; `{}` or null takes all defaults.
The last table has the streams of each model.
"""
FRAME_OPTIONS = """\
| key | of streams | type | default | meaning |
| --- | --- | --- | --- | --- |
| `frame_rate_hz` | all but spikes and loudness_summary | number > 0 \
| `{rate_hz:g}`; loudness traces: every frame of the model \
| Frames per second, at most one per sample (loudness: per frame of the model). |
| `pool` | all but spikes and loudness_summary | `mean`, `rms`, `max`, `subsample` \
| `{pool}` | How the samples of a frame become one value. |
| `unit` | short_term_loudness, long_term_loudness, loudness_summary | `sone`, `phon` \
| `sone` | Unit of the stored loudness. |"""


def reference() -> str:
    from amtcore.features.registry import list_models

    parts = [HEADER.rstrip()]
    for title, model in sections():
        summary = (model.__doc__ or "").strip().splitlines()[0]
        schema = model.model_json_schema()
        required, definitions = schema.get("required", ()), schema.get("$defs", {})
        rows = []
        for name, entry in schema["properties"].items():
            default = "required" if name in required else _default(model, name, entry)
            meaning = _PAGE.sub(r"[docs/\1](\1)", entry["description"])
            rows.append((f"`{name}`", type_text(entry, definitions), default, meaning))
        parts += [f"## {title}", summary, table(("key", "type", "default", "meaning"), rows)]
    for name, why in _kinds()[1].items():
        parts.append(f"## source, kind: {name}\n\nNot usable here: {why}")
    parts += ["## Output formats", _formats_table()]
    parts += ["## Stream options", STREAMS_NOTE.rstrip(), *_stream_options()]
    streams = [
        (f"`{model.name}`", f"`{stream}`", text)
        for model in list_models()
        for stream, text in model.streams.items()
    ]
    parts += ["## Models and their streams", table(("model", "stream", "what"), streams)]
    return "\n\n".join(parts) + "\n"


def sections() -> list[tuple[str, type[BaseModel]]]:
    kinds = [(f"source, kind: {name}", kind.section) for name, kind in _kinds()[0].items()]
    return [("The job", JobSpec), *kinds, *AFTER_SOURCE]


def _kinds() -> tuple[dict[str, SourceKind], dict[str, str]]:
    """Return the installed kinds of source, and the reasons for kinds that cannot be loaded."""
    found: dict[str, SourceKind] = {}
    broken: dict[str, str] = {}
    for name in SOURCES.names():
        try:
            found[name] = source_kind(name)
        except ExtensionError as error:
            broken[name] = str(error)
    return found, broken


def _formats_table() -> str:
    rows: list[tuple[str, ...]] = []
    for name in FORMATS.names():
        try:
            found = FORMATS.load(name)
        except ExtensionError as error:
            rows.append((f"`{name}`", "", f"Not usable here: {error}", ""))
            continue
        told = (str(getattr(found, part, "not said")) for part in ("summary", "integrity"))
        rows.append((f"`{name}`", f"`{getattr(found, 'suffix', '')}`", *told))
    return table(("format", "files", "what", "a changed byte shows by"), rows)


def _default(model: type[BaseModel], name: str, entry: Mapping[str, Any]) -> str:
    """Return a default in YAML; the default of a section is in the section's own table."""
    if "default" not in entry:
        value = model.model_fields[name].get_default(call_default_factory=True)
    else:
        value = entry["default"]
        if isinstance(value, dict) and model is not AudioSpec:
            return "the section's defaults"
        if isinstance(value, dict):
            value = {key: inner for key, inner in value.items() if inner is not None}
    return f"`{json.dumps(value)}`"


def type_text(entry: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return a JSON schema type in words: `number > 0 or null`."""
    if "anyOf" in entry:
        return " or ".join(type_text(part, definitions) for part in entry["anyOf"])
    if "$ref" in entry:
        return PLACES[entry["$ref"].rpartition("/")[2]]
    if "const" in entry:
        return f"`{entry['const']}`"
    if "enum" in entry:
        return ", ".join(f"`{word}`" for word in entry["enum"])
    kind = entry.get("type")
    if kind == "array":
        return f"list of {type_text(entry['items'], definitions)}"
    words = {
        "string": "text",
        "number": "number",
        "integer": "whole number",
        "boolean": "true or false",
        "object": "mapping",
        "null": "null",
    }
    bounds = {"exclusiveMinimum": ">", "minimum": ">=", "maximum": "<=", "exclusiveMaximum": "<"}
    text = words.get(str(kind), "any value")
    return text + "".join(f" {sign} {entry[key]:g}" for key, sign in bounds.items() if key in entry)


def _stream_options() -> list[str]:
    from amtcore.features.feature_model import DEFAULT_FRAME_RATE_HZ, DEFAULT_POOL
    from amtcore.features.parameters import parameters_of
    from amtcore.features.spike_encoder import SpikeOptions

    of_events = [
        (
            f"`{each.name}`",
            each.type_text.replace("list of number", "list of numbers"),
            "required" if each.required else f"`{json.dumps(each.default)}`",
            each.doc,
        )
        for each in parameters_of(SpikeOptions).values()
    ]
    return [
        FRAME_OPTIONS.format(rate_hz=DEFAULT_FRAME_RATE_HZ, pool=DEFAULT_POOL),
        "Options of a stream of events, `spikes`:",
        table(("key", "type", "default", "meaning"), of_events),
    ]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in r) + " |" for r in lines
    )


DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    from amtcore.features.registry import list_models

    schema: dict[str, Any] = _cleaned(JobSpec.model_json_schema())
    parts, kinds = schema["$defs"], _kinds()[0]
    del parts["SourceSection"]
    for kind in kinds.values():
        parts[kind.section.__name__] = _cleaned(kind.section.model_json_schema())
    schema["properties"]["source"] = {
        "description": schema["properties"]["source"]["description"],
        "type": "object",
        "required": ["kind"],
        "properties": {"kind": {"enum": sorted(kinds)}},
        "allOf": [
            _where("kind", name, {"$ref": f"#/$defs/{kind.section.__name__}"})
            for name, kind in kinds.items()
        ],
    }
    models = list_models()
    extract = parts["ExtractSpec"]
    extract["properties"]["model"]["enum"] = [model.name for model in models]
    extract["allOf"] = [
        _where(
            "model",
            model.name,
            {"properties": {"streams": {"propertyNames": {"enum": sorted(model.streams)}}}},
        )
        for model in models
        if model.streams  # `torch_module` has streams of its own
    ]
    return {"$schema": DIALECT, "title": "earmill job", **schema}


def _where(key: str, value: str, then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"properties": {key: {"const": value}}, "required": [key]}, "then": then}


def _cleaned(schema: Any) -> Any:
    """Remove the titles that pydantic makes of names, and keep the first line of docstrings."""
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
