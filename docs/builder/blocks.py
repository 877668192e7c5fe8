"""What a page shows as code: blocks with their language, and the commands in blocks and in text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

_META = re.compile(r"\A---\n(.*?)\n---\n", re.S)
_FENCE = re.compile(
    r"(?m)^(?P<indent>[ ]*)(?P<mark>```+)[ ]*(?P<language>[\w-]*)[^\n]*\n"
    r"(?P<text>.*?)^(?P=indent)(?P=mark)[ ]*$",
    re.S,
)
#: A fenced block, or a check in a comment.
BLOCK = re.compile(f"{_FENCE.pattern}|<!-- check: (?P<check>.*?) -->", re.S | re.M)
_INDENTED = re.compile(r"(?m)^    (earmill .*(?:\\\n.*)*)$")
_INLINE = re.compile(r"`(earmill [^`]+)`")
#: Languages of blocks that a shell reads; blocks without a language may hold commands as well.
SHELL = ("bash", "console", "sh", "")


@dataclass(frozen=True)
class Block:
    """A piece of a page, in the page's order.

    Args:
        language: As the fence says, "" where it says nothing; "check" for an expression in a
            comment, `<!-- check: accuracy > 0.9 -->`, which must then be true.
        text: What is in it, without the fence's indentation. line: Where it begins, from 1.
    """

    language: str
    text: str
    line: int


def meta_of(page: str) -> dict[str, Any]:
    """The mapping at the head of a page."""
    found = _META.match(page)
    return (yaml.safe_load(found[1]) or {}) if found else {}


def without_meta(page: str) -> str:
    """The page without that."""
    return _META.sub("", page)


def blocks_of(page: str) -> list[Block]:
    """All blocks of a page and the checks between them."""
    found = []
    for match in BLOCK.finditer(page):
        line = page.count("\n", 0, match.start()) + 1
        if match["check"] is not None:
            found.append(Block("check", " ".join(match["check"].split()), line))
        else:
            text = re.sub(rf"(?m)^{match['indent']}", "", match["text"])
            found.append(Block(match["language"], text, line))
    return found


def commands_of(page: str) -> Iterator[list[str]]:
    """Every command line, as words: of shell blocks, indented ones, and `earmill ..` in text."""
    for block in blocks_of(page):
        if block.language in SHELL:
            yield from _lines(block.text, all_of_them=block.language != "")
    prose = _FENCE.sub("", page)
    for match in [*_INDENTED.finditer(prose), *_INLINE.finditer(prose)]:
        yield from _words(" ".join(match[1].split()))


def _lines(text: str, *, all_of_them: bool) -> Iterator[list[str]]:
    text = re.sub(r"<<'?(\w+)'?\n.*?\n\1\b", "", text, flags=re.S)
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip().removeprefix("$ ")
        if all_of_them or re.match(r"(earmill|make) ", line):
            yield from _words(line)


def _words(line: str) -> Iterator[list[str]]:
    """The commands of a line, cut at pipes, redirections and `&&`; settings before one left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.commenters, lexer.whitespace_split = "#", True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if not set(word) <= set("();<>|&"):
            words.append(word)
        elif words:
            named = [i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)]
            if named:
                yield words[named[0] :]
            words = [] if word not in ("<", ">", ">>") else ["#"]
