"""What mkdocs calls while it builds the site."""

from __future__ import annotations

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.builder import borrowed_pages, links, mathematics

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
    """Links as the site has them."""
    name = page.file.src_uri
    return links.rewrite(
        markdown, origin=_origins[name], page=name, held=_held, root=borrowed_pages.ROOT
    )


def on_page_content(html: str, **_: Any) -> str:
    """Formulas drawn."""
    return mathematics.drawn(html)
