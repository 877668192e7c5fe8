"""The `Args` of a docstring as data: what a field means is written once, beside it."""

from __future__ import annotations

import inspect
import re

SECTION = re.compile(r"^(Args|Attributes):$")
ENTRY = re.compile(r"^    (\w+): (.*)$")


def argument_texts(docstring: str | None) -> dict[str, str]:
    """Name to meaning, each on one line.

    Example:
        >>> argument_texts("A row.\\n\\n    Args:\\n        uri: where\\n            it is.\\n")
        {'uri': 'where it is.'}
    """
    found: dict[str, str] = {}
    inside, last = False, ""
    for line in inspect.cleandoc(docstring or "").splitlines():
        if not line.startswith(" "):
            inside = bool(SECTION.match(line)) or (inside and not line)
        elif inside and (entry := ENTRY.match(line)):
            last = entry[1]
            found[last] = entry[2].strip()
        elif inside and last:
            found[last] += " " + line.strip()
    return found
