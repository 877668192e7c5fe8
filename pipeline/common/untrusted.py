"""Bounds for text that others wrote: YAML and JSON of any size, depth or number of aliases.

A job file of 400 bytes can name a billion values through aliases, and a thousand brackets exhaust
the stack of a parser. What is counted here is the document with every alias written out, because
that is what hashing, copying and printing it would walk.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

# A long job file has some hundred lines; all of this leaves room for a hundred times more.
MAX_YAML_BYTES = 2**20
MAX_VALUES = 50_000
MAX_DEPTH = 40
MAX_ALIASES = 1000
# One line of a manifest, or the JSON of an option.
MAX_JSON_CHARS = 2**20


class TooMuchError(ValueError):
    """A document that is larger, deeper or more entangled than anybody writes by hand."""


def loads_json(text: str | bytes, *, max_chars: int | None = MAX_JSON_CHARS) -> Any:
    """`json.loads` whose failures are all ValueErrors.

    Args:
        max_chars: Longest text; None for files whose size is checked elsewhere.
    """
    if max_chars is not None and len(text) > max_chars:
        raise TooMuchError(f"expected JSON of at most {max_chars:,} characters, got {len(text):,}")
    try:
        return json.loads(text)
    except RecursionError:
        raise TooMuchError("the JSON is nested too deeply") from None


class BoundedComposer(yaml.SafeLoader):
    """SafeLoader that counts what it builds, aliases written out, and stops at the limits above.

    Nodes are counted while they are composed, so a bomb costs no more than its own text.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._aliases = 0
        # Values below a node, itself included; an unfinished node is an alias into itself.
        self._values: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """One node, its children included."""
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        self._aliases += is_alias
        if self._depth > MAX_DEPTH:
            raise TooMuchError(f"nested more than {MAX_DEPTH} levels deep")
        if self._aliases > MAX_ALIASES:
            raise TooMuchError(f"more than {MAX_ALIASES} aliases")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._values:
            raise TooMuchError("an alias to the value it stands in")
        if not is_alias and node is not None:
            self._values[id(node)] = self._count(node)
        return node

    def _count(self, node: yaml.Node) -> int:
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        total = 1 + sum(self._values[id(child)] for child in children)
        if total > MAX_VALUES:
            raise TooMuchError(f"more than {MAX_VALUES:,} values once its aliases are written out")
        return total
