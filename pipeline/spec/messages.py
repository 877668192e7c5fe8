"""Sentences about jobs: validation errors, and how two jobs differ.

Values under `storage_options` are never printed, because they hold credentials.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from earmill.pipeline.common.text import alternatives, cut, few, nearest
from earmill.pipeline.spec import KEY_ERROR

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


def explain(error: ValidationError) -> str:
    """Return the main error of a validation as one line, and the number of other errors."""
    details = error.errors(include_url=False, include_context=True)
    # A list without a good entry is too short as well.
    entries = {detail["loc"][:-k] for detail in details for k in range(1, len(detail["loc"]))}
    details = [d for d in details if d["type"] != "too_short" or d["loc"] not in entries]
    line = _explain_one(details[0])
    more = len(details) - 1
    return line if not more else f"{line} (and {more} more)"


def _explain_one(detail: Any) -> str:
    path, kind = ".".join(map(str, detail["loc"])) or "the job", detail["type"]
    if kind == "missing":
        return f"{path}: missing, and it has no default"
    if kind == KEY_ERROR:
        return f"{path}: {detail['msg']}"
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
