r"""Text for people: safe lines, suggestions, figures in words and short forms of results.

`visible` shows ESC, carriage return, C1 controls and Unicode's direction marks as escapes (`\x1b`);
the command prints all text through it. `one_line` and `named_line` also remove secrets and line
breaks. Both are idempotent.
"""

from __future__ import annotations

import difflib
import html
import math
import os
import traceback
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from earmill.pipeline.common.redact import redact_text

# Cc: C0 and C1 controls. Cs: lone surrogates, which no terminal encoding takes. Cf: direction marks
# and zero-width characters, which make one name look like another. Zl, Zp: Unicode's line breaks.
HIDDEN_CATEGORIES = frozenset({"Cc", "Cs", "Cf", "Zl", "Zp"})


def visible(text: str, *, keep: str = "") -> str:
    r"""Replace every invisible character but those in `keep` by its escape, as ESC by `\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c
        if c in keep or unicodedata.category(c) not in HIDDEN_CATEGORIES
        else c.encode("unicode_escape", "surrogatepass").decode("ascii")
        for c in text
    )


MESSAGE_LIMIT = 600
VALUE_LIMIT = 60  # Most characters of a value or a name that a message quotes.


def one_line(text: BaseException | str) -> str:
    return visible(redact_text(" ".join(str(text).split())))


def cut(text: str) -> str:
    return text if len(text) <= VALUE_LIMIT else f"{text[: VALUE_LIMIT - 3]}..."


def named_line(error: BaseException, *, where: bool = False) -> str:
    """Return class and text of an exception, cut, and with `where` the line that raised it."""
    place = ""
    if where and (frames := traceback.extract_tb(error.__traceback__)):
        last = frames[-1]
        place = f" ({os.path.basename(last.filename)}:{last.lineno} {last.name})"
    return f"{type(error).__name__}: {one_line(error) or 'no message'}"[:MESSAGE_LIMIT] + place


def alternatives(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]


def nearest(word: str, valid: Sequence[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest valid word, or an empty text."""
    matches = difflib.get_close_matches(word, valid, n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""


LEAST = 0.01  # Least figure that is shown exactly.


def figure(value: float) -> str:
    """Return a rate or a factor: 1,234, 123, 12.3, 1.2, 0.05."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 1:
        return f"{value:.1f}"
    if size >= LEAST:
        return f"{value:.2f}"
    return f"less than {LEAST}" if size else "0"


def quantity(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def in_units(seconds: float) -> tuple[float, str]:
    """Return a time in a unit that suits it: s, min, h or d."""
    for unit, size, most in (("s", 1, 120), ("min", 60, 120), ("h", 3600, 72)):
        if abs(seconds) < most * size:
            return seconds / size, unit
    return seconds / 86400, "d"


def duration(seconds: float) -> str:
    """Return a time that has passed or is left: under 1 s, 42 s, 12.5 min, 3.2 h, 4.5 d."""
    if seconds < 1:
        return "under 1 s"
    value, unit = in_units(seconds)
    return f"{value:.0f} s" if unit == "s" else f"{value:,.1f} {unit}"


def audio(seconds: float) -> str:
    """Return seconds of audio as people say them: 42 s, 12.5 min, 3.20 h, 1,234 h."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.2f} h" if seconds < 360_000 else f"{seconds / 3600:,.0f} h"


def bytes_text(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def json_value(value: Any, of_text: Callable[[str], str] = lambda text: text) -> Any:
    """Return a value for JSON: texts by `of_text`, and None for NaN and infinite numbers."""
    if isinstance(value, str):
        return of_text(value)
    if isinstance(value, Mapping):
        return {str(key): json_value(item, of_text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item, of_text) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


FEW = 3


class Shown(ABC):
    """A result with a short `repr` and a table for notebooks."""

    __slots__ = ()

    @abstractmethod
    def shown(self) -> Mapping[str, str]:
        """Return the main figures by their names."""

    def __repr__(self) -> str:
        figures = ", ".join(f"{name}: {text}" for name, text in self.shown().items())
        return f"<{type(self).__name__}: {figures}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
            for name, text in self.shown().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def few(texts: Sequence[str], most: int = FEW, separator: str = "; ") -> str:
    """Return the first `most` texts, and the number of further texts."""
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more
