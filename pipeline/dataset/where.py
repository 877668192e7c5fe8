"""Conditions on quarantined rows: a small language that can only compare.

    condition  = all ("or" all)*
    all        = one ("and" one)*
    one        = "not" one | "(" condition ")" | test
    test       = column ("=" | "!=" | "<" | "<=" | ">" | ">=") value
               | column ["not"] "in" "(" value ("," value)* ")"
               | column ["not"] "like" text           % stands for any text, _ for any character
    value      = text in single or double quotes, or a number

Columns are those of the quarantine table; `error` is short for `error_class`. Keywords in any case.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.formats.row_table import QUARANTINE_SCHEMA

Predicate = Callable[[Mapping[str, Any]], bool]

COLUMNS = {**{name: name for name in QUARANTINE_SCHEMA.names}, "error": "error_class"}
MAX_CHARS = 10_000
MAX_DEPTH = 50
_NUMBERS = {"attempts"}
_COMPARE = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>'(?:[^']|'')*'|"(?:[^"]|"")*")|(?P<number>-?\d+(?:\.\d+)?)"""
    r"""|(?P<word>[A-Za-z_]+)|(?P<sign><>|!=|<=|>=|==|[=<>(),]))"""
)
_KEYWORDS = ("and", "or", "not", "in", "like")


def everything(row: Mapping[str, Any]) -> bool:
    """The condition that every row fulfils."""
    return True


def parse_where(text: str) -> Predicate:
    """A condition as a function of a row.

    Raises:
        SpecError: It is none; says where and what was expected.
    """
    return _Parser(text).whole()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._depth = text, 0
        self._tokens: list[tuple[str, str]] = []
        if len(text) > MAX_CHARS:
            raise SpecError(
                f"--where: expected at most {MAX_CHARS:,} characters, got {len(text):,}"
            )
        position = 0
        while text[position:].strip():
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._error(f"cannot read {text[position:].strip()[:20]!r}")
            kind = str(match.lastgroup)
            word = match.group(kind)
            if kind == "word" and word.lower() in _KEYWORDS:
                kind, word = "keyword", word.lower()
            self._tokens.append((kind, word))
            position = match.end()
        self._tokens.append(("end", "the end"))

    def whole(self) -> Predicate:
        """Everything there is, to the end."""
        found = self._any()
        if self._tokens[0][0] != "end":
            raise self._error(f"expected and, or, or the end, got {self._tokens[0][1]!r}")
        return found

    def _any(self) -> Predicate:
        parts = [self._all()]
        while self._took("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else lambda row: any(part(row) for part in parts)

    def _all(self) -> Predicate:
        parts = [self._one()]
        while self._took("and"):
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else lambda row: all(part(row) for part in parts)

    def _one(self) -> Predicate:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"nested deeper than {MAX_DEPTH}")
        if self._took("not"):
            inner = self._one()
            found: Predicate = lambda row: not inner(row)  # noqa: E731
        elif self._took("("):
            found = self._any()
            self._need(")")
        else:
            found = self._test()
        self._depth -= 1
        return found

    def _test(self) -> Predicate:
        kind, name = self._tokens.pop(0)
        if kind != "word" or name not in COLUMNS:
            raise self._error(f"expected a column out of {', '.join(COLUMNS)}, got {name!r}")
        column = COLUMNS[name]
        negated = self._took("not")
        if self._took("in"):
            test = self._values(column)
        elif self._took("like"):
            test = _like(self._value(column, like=True))
        elif not negated and self._tokens[0][1] in _COMPARE:
            compare, value = _COMPARE[self._tokens.pop(0)[1]], self._value(column)
            return lambda row: row[column] is not None and bool(compare(row[column], value))
        else:
            raise self._error(
                f"expected =, !=, in or like after {name}, got {self._tokens[0][1]!r}"
            )
        return lambda row: row[column] is not None and test(row[column]) != negated

    def _values(self, column: str) -> Callable[[Any], bool]:
        self._need("(")
        values = {self._value(column)}
        while self._took(","):
            values.add(self._value(column))
        self._need(")")
        return lambda value: value in values

    def _value(self, column: str, *, like: bool = False) -> Any:
        kind, word = self._tokens.pop(0)
        if like and column in _NUMBERS:
            raise self._error(f"expected text columns for like, got {column}")
        wanted = "number" if column in _NUMBERS else "text"
        if kind != wanted:
            what = "a number" if wanted == "number" else "text in quotes"
            raise self._error(f"expected {what} for {column}, got {word!r}")
        if kind == "number":
            return float(word)
        return word[1:-1].replace(word[0] * 2, word[0])

    def _took(self, word: str) -> bool:
        if self._tokens[0] in (("keyword", word), ("sign", word)):
            self._tokens.pop(0)
            return True
        return False

    def _need(self, word: str) -> None:
        if not self._took(word):
            raise self._error(f"expected {word!r}, got {self._tokens[0][1]!r}")

    def _error(self, reason: str) -> SpecError:
        return SpecError(
            f"--where {self._text[:100]!r}: {reason}; for example: error = 'unreadable'"
        )


def _like(pattern: str) -> Callable[[Any], bool]:
    parts = (".*" if c == "%" else "." if c == "_" else re.escape(c) for c in pattern)
    matcher = re.compile("".join(parts), re.DOTALL)
    return lambda value: matcher.fullmatch(str(value)) is not None
