r"""Formulas as MathML, which browsers draw themselves: no script, no fonts, no other host.

The extension arithmatex has put them into `\(...\)` and `\[...\]` of the page's HTML.
"""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def drawn(page: str) -> str:
    """The page's HTML with its formulas as MathML."""

    def replaced(match: re.Match[str]) -> str:
        tag, formula = match[1], html.unescape(match[2]).strip()
        kind = "block" if tag == "div" else "inline"
        return f'<{tag} class="formula">{convert(formula, display=kind)}</{tag}>'

    return _FORMULA.sub(replaced, page)
