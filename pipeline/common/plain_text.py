"""Text from outside made safe to show: nothing in it may act on a terminal, a page or a log.

File names, row ids, URIs and error texts come from whoever made the corpus. ESC, carriage return,
C1 controls and Unicode's direction marks are shown as escapes (`\\x1b`), so that a line stays one
line and says what it says. Whatever the command prints passes through `visible`.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

# Cc: C0 and C1 controls. Cs: lone surrogates, which no terminal encoding takes. Cf: direction marks
# and zero-width characters, which make one name look like another. Zl, Zp: Unicode's line breaks.
HIDDEN_CATEGORIES = frozenset({"Cc", "Cs", "Cf", "Zl", "Zp"})


@lru_cache(maxsize=4096)
def _shown(character: str) -> str:
    if unicodedata.category(character) in HIDDEN_CATEGORIES:
        return character.encode("unicode_escape", "surrogatepass").decode("ascii")
    return character


def visible(text: str, *, keep: str = "") -> str:
    r"""The text with every character that is not a visible one written as its escape.

    Args:
        keep: Characters that stay, such as the line breaks of a text of several lines.

    Example:
        >>> visible("a\x1b[31mb")
        'a\\x1b[31mb'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in keep else _shown(c) for c in text)
