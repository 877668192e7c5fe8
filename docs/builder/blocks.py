"""Blocks of code in a page, with their language, and the mapping at the page's head."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mkdocs.utils.meta import get_data

FENCE = re.compile(
    r"(?m)^(?P<indent>[ ]*)(?P<mark>```+)[ ]*(?P<language>[\w-]*)[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)(?P=mark)[ ]*$",
    re.S,
)
#: A fenced block, or a check in a comment.
BLOCK = re.compile(f"{FENCE.pattern}|<!-- check: (?P<check>.*?) -->", re.S | re.M)


@dataclass(frozen=True)
class Block:
    """A piece of a page.

    Args:
        language: Language of the fence, or "". "check" is the expression of a comment
            `<!-- check: accuracy > 0.9 -->`, which must be true at this place.
        text: Content of the block without the fence's indentation.
        line: First line, from 1.
    """

    language: str
    text: str
    line: int


def meta_of(page: str) -> dict[str, Any]:
    """Return the mapping at the head of a page."""
    meta: dict[str, Any] = get_data(page)[1]
    return meta


def blocks_of(page: str) -> list[Block]:
    """Return all blocks of a page and the checks between them, in order."""
    found = []
    for match in BLOCK.finditer(page):
        line = page.count("\n", 0, match.start()) + 1
        if match["check"] is not None:
            found.append(Block("check", " ".join(match["check"].split()), line))
        else:
            text = re.sub(rf"(?m)^{match['indent']}", "", match["text"])
            found.append(Block(match["language"], text, line))
    return found
