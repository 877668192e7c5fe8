r"""Hooks of mkdocs: pages from other folders, links, tables of results, formulas, figures.

Pages are written to be read in the repository. For the site these parts are replaced:

    [speed](../benchmarks/RESULTS.md)      a link to the site's page of the file; the text alone if
                                           the site lacks the file
    <!-- results: Exactness -->            the first table of this section of RESULTS.md
    <!-- results: Exactness | Dau1997 -->  the rows whose first cell begins with this text
    <!-- results: Exactness | Dau1997 | stage; float32 = error -->
                                           these columns of the rows, the second one renamed
    <!-- commands -->, <!-- layout -->     the reference of the commands; the grammar of a dataset's
                                           files
    \(a < b\)                              MathML, which browsers draw without script or font
    ![description](figure:home)            a drawing by earmill's models, see `figures`; the
                                           description is its caption
    ![description](images/watch.png)       a picture; the description is its caption
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator, Mapping
from html import escape, unescape
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import typer.main
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from typer.cli import get_docs_for_click

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "RESULTS.md"
#: File of the repository outside docs/ -> its name in the site.
BORROWED = {
    "infra/README.md": "infra.md",
    "benchmarks/RESULTS.md": "results.md",
    "CHANGELOG.md": "changelog.md",
    "jobs/errors.md": "errors.md",
}
_LOG = logging.getLogger("mkdocs.hooks")
_FENCE = re.compile(r"(^(```+|~~~+).*?^\2[ \t]*$)", re.M | re.S)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
_ASKED = re.compile(
    r"<!-- (commands|layout|results: ([^|>]+?)"
    r"(?:\s*\|\s*([^|>]*?))?(?:\s*\|\s*([^|>]+?))?)\s*-->"
)
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)
_FIGURE = re.compile(r'<p><img alt="([^"]*)" src="figure:(\w+)" ?/?></p>')
_PICTURE = re.compile(r'<p><img alt="([^"]+)" src="([^"]+)" ?/?></p>')
_CELL = re.compile(r"<td\b.*?</td>", re.S)
_LONG_CODE = re.compile(r"(?<=<code>)[^<]{16,}(?=</code>)")
_MARK = re.compile(r"([_=/(])(?=[\w'.])")
#: Files of the site: name in the repository -> name in the site.
_held: dict[str, str] = {}


def borrowed() -> dict[str, str]:
    """Return `BORROWED`, and the files that the site holds unchanged."""
    files = [*ROOT.glob("jobs/*.yaml"), *(file for file in ROOT.glob("infra/*") if file.is_file())]
    names = [file.relative_to(ROOT).as_posix() for file in files]
    return {name: f"files/{name}" for name in names} | BORROWED


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add files from outside docs/, and record the origin of every file."""
    found = borrowed()
    _held.clear()
    _held.update({f"docs/{file.src_uri}": file.src_uri for file in files} | found)
    for origin, name in found.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / origin)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Replace links, tables, commands and the layout in a page."""
    name = page.file.src_uri
    origin = next(origin for origin, held in _held.items() if held == name)
    text = _ASKED.sub(_made, linked(markdown, origin=origin, page=name, held=_held))
    return without_targets(text) if name == BORROWED["benchmarks/RESULTS.md"] else text


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Draw formulas and figures; with `extra.draw` false only check the names of figures."""
    from docs.builder.figures import NAMES, make

    def figure(match: re.Match[str]) -> str:
        said, name = match.groups()
        if name not in NAMES:
            _LOG.warning("%s asks for a figure %s, which nothing draws", page.file.src_uri, name)
            return ""
        svg = make(name) if config.extra.get("draw", True) else "<svg></svg>"
        return captioned(f'<div aria-hidden="true">{svg}</div>', said, "drawing")

    return with_breaks(with_pictures(_FIGURE.sub(figure, with_formulas(html))))


def with_breaks(html: str) -> str:
    """Return a page's HTML whose code in cells may break after marks, where it is long."""

    def broken(cell: re.Match[str]) -> str:
        return _LONG_CODE.sub(lambda code: _MARK.sub("\\1<wbr>", code[0]), cell[0])

    return _CELL.sub(broken, html)


def with_pictures(html: str) -> str:
    """Return a page's HTML with every picture that is a paragraph as a figure with a caption."""

    def figure(match: re.Match[str]) -> str:
        return captioned(f'<img alt="" src="{match[2]}">', match[1], "picture")

    return _PICTURE.sub(figure, html)


def captioned(drawing: str, caption: str, kind: str) -> str:
    """Return a figure. Screen readers read the caption, so the drawing itself has no text."""
    text = escape(unescape(caption))
    return f'<figure class="{kind}">{drawing}<figcaption>{text}</figcaption></figure>'


def linked(text: str, *, origin: str, page: str, held: Mapping[str, str]) -> str:
    """Return Markdown with the links of the site.

    Args:
        text: Markdown.
        origin: File of the repository from which relative links start.
        page: The page's name in the site.
        held: Maps files of the repository to names in the site.
    """

    def replaced(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, hash_, anchor = target.partition("#")
        found = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        if found in held:
            name = posixpath.relpath(held[found], posixpath.dirname(page) or ".")
            return f"{image}[{label}]({name}{hash_}{anchor})"
        if not (ROOT / found).exists():
            _LOG.warning("%s links to %s, which is not in the repository", origin, target)
        return label

    parts = _FENCE.split(text)  # text, fence, its mark, text, ...
    parts[::3] = [_LINK.sub(replaced, part) for part in parts[::3]]
    del parts[2::3]
    return "".join(parts)


def _made(match: re.Match[str]) -> str:
    if match[1] == "commands":
        return commands()
    if match[1] == "layout":
        from earmill.pipeline.storage import paths

        return (paths.__doc__ or "").replace("::", ":")
    made = without_targets(table(RESULTS.read_text(), match[2], match[3], match[4]))
    return f"{made}\n"  # a table right below would belong to the paragraph otherwise


def commands() -> str:
    """Return the reference of all commands, without its title."""
    from earmill.jobs.cli import app

    group: Any = typer.main.get_command(app)
    context = group.make_context("earmill", [], resilient_parsing=True)
    return get_docs_for_click(obj=group, ctx=context, name="earmill").partition("\n")[2]


def table(results: str, section: str, only: str | None = None, columns: str | None = None) -> str:
    """Return the first table of a section, and the line about its measurement.

    Args:
        results: Text of RESULTS.md.
        section: Title of the section.
        only: First cell of the rows to show begins with this text; all rows if empty.
        columns: Columns to show, each `name` or `name = new name`, with `;` between; all if None.

    Raises:
        ValueError: No such section, row or column.
    """
    found = re.search(rf"(?ms)^## {re.escape(section)}\n(.*?)(?=^## |\Z)", results)
    if found is None:
        raise ValueError(f"expected a section {section!r} in RESULTS.md; run its benchmark")
    lines = found[1].strip().splitlines()
    rows = dropwhile(lambda line: not line.startswith("|"), lines)
    head, rule, *body = [*takewhile(lambda line: line.startswith("|"), rows), "", ""]
    body = [row for row in body if row.startswith(f"| {only or ''}")]
    if not body:
        raise ValueError(f"expected rows of {only!r} in the section {section!r} of RESULTS.md")
    shown = [head, rule, *body]
    if columns is not None:
        shown = [*_columns(head, [head, rule, *body], columns, section)]
    return "\n".join([*shown, "", lines[0]])


def _columns(head: str, rows: list[str], columns: str, section: str) -> Iterator[str]:
    """Yield the rows of a table with the named columns, and new names in its head."""
    names = _cells(head)
    wanted = [[part.strip() for part in column.partition(" = ")] for column in columns.split(";")]
    missing = [name for name, _, _ in wanted if name not in names]
    if missing:
        raise ValueError(f"expected columns {missing} in the section {section!r}, got {names}")
    places = [names.index(name) for name, _, _ in wanted]
    for row in rows:
        cells = [_cells(row)[place] for place in places]
        if row == head:
            cells = [new or name for name, _, new in wanted]
        yield f"| {' | '.join(cells)} |"


def without_targets(text: str) -> str:
    """Return Markdown without the targets of measurements: columns and remarks "wanted"."""
    parts = re.split(r"((?:^\|.*\n?)+)", text, flags=re.M)
    for place in range(1, len(parts), 2):
        rows = [_cells(row) for row in parts[place].splitlines()]
        kept = [at for at, name in enumerate(rows[0]) if not name.startswith("wanted")]
        if len(kept) < len(rows[0]):
            lines = [f"| {' | '.join(row[at] for at in kept)} |\n" for row in rows]
            parts[place] = "".join(lines)
    return re.sub(r" \(wanted: [^)]*\)| Wanted: [^.|]*\.", "", "".join(parts))


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def with_formulas(html: str) -> str:
    """Return a page's HTML with formulas, which arithmatex has marked, as MathML."""

    def drawn(match: re.Match[str]) -> str:
        tag, formula = match[1], unescape(match[2]).strip()
        kind = "block" if tag == "div" else "inline"
        return f'<{tag} class="formula">{convert(formula, display=kind)}</{tag}>'

    return _FORMULA.sub(drawn, html)
