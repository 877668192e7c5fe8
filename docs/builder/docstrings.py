"""Docstrings for griffe: sections with blank lines between them, and examples as blocks of code.

An example is a doctest, or text indented below `Example:`.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

import griffe

_SECTION = re.compile(r"(?m)(?<=\S)\n(?=(?:Returns|Raises|Yields|Example|Shape|Invariants):\n)")
_DOCTEST = re.compile(r"(?m)^( *)>>> .*\n(?:\1\S.*\n?)*")
_EXAMPLE = re.compile(r"(?m)^Example:\n((?:    .*\n?|\n)+)")


def with_code_blocks(text: str) -> str:
    """Return a docstring with fences around examples and blank lines before sections."""
    text = _SECTION.sub("\n\n", text)
    text = _EXAMPLE.sub(lambda found: _fenced(textwrap.dedent(found[1])), text)
    return _DOCTEST.sub(lambda found: _fenced(textwrap.dedent(found[0])), text)


def _fenced(code: str) -> str:
    return f"\n```python\n{code.rstrip()}\n```\n"


class Examples(griffe.Extension):
    """Rewrites every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe for every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = with_code_blocks(obj.docstring.value)
