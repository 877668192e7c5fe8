"""What mkdocs calls while it builds the site."""

from __future__ import annotations

import logging
import re
from html import escape, unescape
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.builder import borrowed_pages, links, mathematics, measured

_LOG = logging.getLogger("mkdocs.hooks")
_FIGURE = re.compile(r'<p><img alt="([^"]*)" src="figure:(\w+)" ?/?></p>')
_origins: dict[str, str] = {}
_held: dict[str, str] = {}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages and files that are not in docs/, and note where every page is from."""
    _held.clear()
    _origins.clear()
    for file in files.documentation_pages():
        _origins[file.src_uri] = f"docs/{file.src_uri}"
    for file in files:
        _held[f"docs/{file.src_uri}"] = file.src_uri
    for name, make in borrowed_pages.PAGES.items():
        page = make()
        files.append(File.generated(config, name, content=page.text))
        _origins[name] = page.origin
        _held[f"docs/{name}"] = name
    for name, path in borrowed_pages.published_files().items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
        _held[path.relative_to(borrowed_pages.ROOT).as_posix()] = name
    _held.update(borrowed_pages.BY_ORIGIN)
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Links as the site has them, and the tables of figures that a page asks for."""
    name = page.file.src_uri
    text = links.rewrite(
        markdown, origin=_origins[name], page=name, held=_held, root=borrowed_pages.ROOT
    )
    return measured.filled(text)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Formulas and figures drawn; with `extra.draw` false only looked for, which takes no time."""

    def drawn(match: re.Match[str]) -> str:
        said, name = match.groups()
        svg = _drawing(name, page, draw=bool(config.extra.get("draw", True)))
        label = escape(unescape(said))
        return f'<figure class="drawing" role="img" aria-label="{label}">{svg}</figure>'

    return _FIGURE.sub(drawn, mathematics.drawn(html))


def _drawing(name: str, page: Page, *, draw: bool) -> str:
    from docs.builder.figures import NAMES, make

    if name not in NAMES:
        _LOG.warning("%s asks for a figure %s, which nothing draws", page.file.src_uri, name)
        return ""
    return make(name) if draw else "<svg></svg>"
