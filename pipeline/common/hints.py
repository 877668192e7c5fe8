"""What to write instead: the valid words, and the one that was probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def alternatives(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]


def nearest(word: str, valid: Sequence[str]) -> str:
    """`; did you mean 'x'?` for the nearest valid word, or nothing."""
    matches = difflib.get_close_matches(word, valid, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
