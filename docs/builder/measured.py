"""Tables of figures that the benchmarks measured, out of benchmarks/RESULTS.md.

A page asks by a comment, `<!-- results: Exactness | Dau1997 -->`: the table of that section, rows
whose first cell begins so. `<!-- results: The whole job -->` is a section's first table, whole.
"""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "RESULTS.md"
_ASKED = re.compile(r"<!-- results: ([^|>]+?)(?: \| ([^>]+?))? -->")


def filled(page: str, results: str | None = None) -> str:
    """The page's Markdown with the tables it asks for, each with its command and machine."""
    text = RESULTS.read_text() if results is None else results
    return _ASKED.sub(lambda found: table(text, found[1], found[2]), page)


def table(results: str, section: str, only: str | None = None) -> str:
    """The first table of a section, with the line that says how it was measured.

    Raises:
        ValueError: No such section, or no such row in it.
    """
    found = re.search(rf"(?ms)^## {re.escape(section)}\n(.*?)(?=^## |\Z)", results)
    if found is None:
        raise ValueError(f"expected a section {section!r} in RESULTS.md; run its benchmark")
    lines = found[1].strip().splitlines()
    rows = [line for line in lines if line.startswith("|")]
    rows = rows[
        : next((i for i, row in enumerate(rows[2:], 2) if _is_rule(row)), len(rows) + 1) - 1
    ]
    head, body = rows[:2], rows[2:]
    if only is not None:
        body = [row for row in body if row.startswith(f"| {only}")]
    if not body:
        raise ValueError(f"expected rows of {only!r} in the section {section!r} of RESULTS.md")
    return "\n".join([*head, *body, "", lines[0]])


def _is_rule(row: str) -> bool:
    return set(row) <= set("|- :")
