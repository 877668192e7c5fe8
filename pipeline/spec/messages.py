"""Sentences about jobs: validation errors, and how two jobs differ.

Values under `storage_options` are never printed, because they hold credentials.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from earmill.pipeline.common.text import alternatives, cut, few, nearest
from earmill.pipeline.spec import types_in
from earmill.pipeline.spec.source import KIND_ERROR, SourceSection, section_for

SECRET_KEY = "storage_options"

# pydantic names Python types; these texts say what to write in YAML.
PHRASES = {
    "too_short": "expected at least one entry",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
    "model_type": "expected a mapping",
    "model_attributes_type": "expected a mapping",
    "string_type": "expected text",
    "int_parsing": "expected a whole number",
    "int_from_float": "expected a whole number",
    "float_parsing": "expected a number",
}

# Examples for sections of a wrong form.
EXAMPLES = {
    "source": "{kind: files, uri: recordings}",
    "extract": "[{model: dau1997}]",
    "output": "{uri: features}",
}

Node = type[BaseModel] | None


def explain(error: ValidationError, model: type[BaseModel], data: Mapping[str, Any]) -> str:
    """Return the main error of a validation as one line, and the number of other errors."""
    details = error.errors(include_url=False, include_context=True)
    # A list without a good entry is too short as well.
    entries = {detail["loc"][:-k] for detail in details for k in range(1, len(detail["loc"]))}
    details = [d for d in details if d["type"] != "too_short" or d["loc"] not in entries]
    # A misspelt required key shows up twice; the misspelling is the cause, so it goes first.
    details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
    line = _explain_one(details[0], model, data)
    more = len(details) - 1
    return line if not more else f"{line} (and {more} more)"


def _explain_one(detail: Any, model: type[BaseModel], data: Any) -> str:
    path, kind = ".".join(map(str, detail["loc"])) or "the job", detail["type"]
    if kind == "extra_forbidden":
        parent = _parent(detail["loc"], model, data)
        valid = [] if parent is None else list(parent.model_fields)
        hint = nearest(str(detail["loc"][-1]), valid)
        return f"{path}: unknown key{hint} (valid keys: {', '.join(valid)})"
    if kind == "missing":
        return f"{path}: missing, and it has no default"
    if kind == KIND_ERROR:
        return f"{path}.kind: {detail['ctx']['text']}"
    if kind == "value_error":
        return f"{path}: {detail['ctx']['error']}"
    message = PHRASES.get(kind, detail["msg"][:1].lower() + detail["msg"][1:])
    hint = f"; e.g. {path}: {EXAMPLES[path]}" if path in EXAMPLES else ""
    if kind == "literal_error":
        expected = str(detail["ctx"]["expected"]).replace(" or ", ", ").split(", ")
        words = [word.strip("'") for word in expected]
        message = f"expected {alternatives(words)}"
        hint = nearest(str(detail["input"]), words) or hint
    return f"{path}: {message}, got {_shown(detail['input'], path)}{hint}"


def _shown(value: Any, path: str) -> str:
    if SECRET_KEY in path:
        return "a value that is not shown"
    if isinstance(value, list | tuple | Mapping):
        return f"a {'mapping' if isinstance(value, Mapping) else 'list'} of {len(value)}"
    return cut(repr(value))


def _parent(loc: Sequence[int | str], model: type[BaseModel], data: Any) -> Node:
    """Return the model that has the last key of `loc`; None in a free mapping."""
    node: Node = model
    for part in loc[:-1]:
        data = data[part]
        if isinstance(part, str):
            node = _child(node, part, data)
    return node


def _child(node: Node, key: str, value: Any) -> Node:
    """Return the model of a key; the value decides the section of a source."""
    if node is None or key not in node.model_fields:
        return None
    for kind in types_in(node.model_fields[key].annotation):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return section_for(value) if kind is SourceSection else kind
    return None


NAMED = 5
_MISSING = object()


def describe_changes(stored: Any, wanted: Any) -> str:
    return few(list(_changes(stored, wanted, "")), NAMED)


def _changes(stored: Any, wanted: Any, path: str) -> Iterator[str]:
    both = (stored, wanted)
    if all(isinstance(value, list | tuple) for value in both) and len(stored) == len(wanted):
        stored, wanted = dict(enumerate(stored)), dict(enumerate(wanted))
    elif not all(isinstance(value, Mapping) for value in both):
        there, here = (
            "nothing"
            if value is _MISSING
            else json.dumps(value, sort_keys=True, ensure_ascii=False)
            for value in both
        )
        if there != here:
            yield f"{path}: {cut(there)} there, {cut(here)} in the job"
        return
    for key in sorted({*stored, *wanted}):
        below = f"{path}.{key}" if path else str(key)
        yield from _changes(stored.get(key, _MISSING), wanted.get(key, _MISSING), below)
