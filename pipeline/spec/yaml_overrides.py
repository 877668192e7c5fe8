"""Job YAML in, one plain mapping out: a strict loader and `--set a.b=c` overrides.

PyYAML keeps the last of two equal keys and reads `1e-3` as text. Both would change a job silently,
so this loader refuses equal keys and reads `1e-3` as a number (YAML 1.2 floats). Override values
are YAML, too; list elements are named by index (`extract.0.fs_hz=16000`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.common.text import one_line
from earmill.pipeline.common.untrusted import MAX_YAML_BYTES, BoundedComposer, TooMuchError

# YAML 1.2 core schema float: a number with a dot, an exponent, or both.
FLOAT_PATTERN = re.compile(
    r"^[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$"
)
# First characters of YAML aliases, anchors, tags and the like. A command line has nothing to refer
# to, so `--set source.glob=*.wav` means the text.
INDICATORS = ("*", "&", "!", "%", "@", "`", "|", ">")
ALIAS_PROBLEM = "while scanning an alias"


class StrictLoader(BoundedComposer):
    """Bounded SafeLoader that refuses duplicate keys and reads `1e-3` as a float."""


def _construct_mapping(loader: StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            line = key_node.start_mark.line + 1
            raise SpecError(f"line {line}: key {key!r} is given twice; keep one of them")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)
StrictLoader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT_PATTERN, list("-+0123456789."))


def load_yaml(text: str, *, name: str) -> Any:
    """Parse one YAML document; `name` is its name in messages."""
    if len(text) > MAX_YAML_BYTES:
        raise SpecError(f"{name}: expected a job of at most {MAX_YAML_BYTES:,} bytes")
    try:
        return yaml.load(text, Loader=StrictLoader)
    except yaml.YAMLError as error:
        raise SpecError(f"{name}: not valid YAML: {_problem(error)}") from error
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from error
    except TooMuchError as error:
        raise SpecError(f"{name}: refused: {error}; write the values out") from None
    # An unhashable key such as `{a: 1}: 2`, a date such as 2024-13-01, a number of 5000 digits.
    except (TypeError, ValueError, OverflowError) as error:
        raise SpecError(f"{name}: not valid YAML: {one_line(error)}") from error


def _problem(error: yaml.YAMLError) -> str:
    """Return problem and place, without PyYAML's quote of the text, which may be a secret."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        place = f"(line {mark.line + 1}, column {mark.column + 1})"
        alias = error.context == ALIAS_PROBLEM or "undefined alias" in str(error.problem)
        hint = "; put quotes around a value that begins with *" if alias else ""
        return f"{error.problem} {place}{hint}"
    return one_line(error)


def apply_overrides(data: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `data` with every `a.b=c` applied, left to right."""
    result: dict[str, Any] = copy.deepcopy(dict(data))
    for override in overrides:
        path, separator, text = override.partition("=")
        keys = path.strip().split(".")
        # Messages name the key only: the value may be a credential.
        if not separator or not all(keys):
            raise SpecError(f"--set {path}: expected KEY.PATH=VALUE, e.g. extract.0.fs_hz=16000")
        is_text = text.lstrip().startswith(INDICATORS)
        value = text.strip() if is_text else load_yaml(text, name=f"--set {path}")
        _set_value(result, keys, value)
    return result


def _set_value(root: dict[str, Any], keys: list[str], value: Any) -> None:
    override = ".".join(keys)
    node: Any = root
    for depth, key in enumerate(keys):
        where = ".".join(keys[:depth]) or "the job"
        place: int | str = key
        if isinstance(node, list):
            if not key.isdecimal() or int(key) >= len(node):
                raise SpecError(
                    f"--set {override}: {where} is a list of {len(node)}; "
                    f"expected an index 0 to {len(node) - 1}, got {key!r}"
                )
            place = int(key)
        elif not isinstance(node, dict):
            raise SpecError(f"--set {override}: {where} is a single value, it has no key {key!r}")
        if depth == len(keys) - 1:
            node[place] = value
        elif isinstance(node, dict) and node.get(place) is None:
            # A section that was left out, or left empty in the YAML, starts empty here.
            node[place] = {}
        node = node[place]
