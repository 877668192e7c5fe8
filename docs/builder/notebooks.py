"""Notebooks of tutorials, made from the text of the pages.

    python -m docs.builder.notebooks                       # write docs/notebooks/*.ipynb
    python -m docs.builder.notebooks --execute             # and run each in an empty folder
    python -m docs.builder.notebooks --execute classifier  # or those that are named

Pages with `notebook: true` in their head have one. Python blocks become cells, shell blocks start
with `%%bash`, job files with `%%writefile`. Notebooks hold no outputs.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.utils.meta import get_data
from nbformat import v4

from docs.builder.blocks import BLOCK, meta_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "notebooks"
_NAMED = re.compile(r"\A# ([\w./-]+\.yaml)\n")
_OF_ITSELF = re.compile(r"(?m)^\[This page as a notebook\].*\n\n")
_LIMIT_S = 500


def pages() -> list[Path]:
    """Return the pages that have a notebook."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [page for page in found if meta_of(page.read_text()).get("notebook")]


def notebook_file(page: Path) -> Path:
    """Return the file of a page's notebook."""
    return FOLDER / f"{page.stem}.ipynb"


def notebook(page: str) -> str:
    """Return the notebook of a page as JSON."""
    made = v4.new_notebook(cells=list(_cells(_OF_ITSELF.sub("", get_data(page)[0]))))
    made.metadata["kernelspec"] = {"display_name": "Python 3", "name": "python3"}
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number}"
    return f"{nbformat.writes(made)}\n"


def _cells(text: str) -> Iterator[Any]:
    end = 0
    for match in BLOCK.finditer(text):
        if before := text[end : match.start()].strip():
            yield v4.new_markdown_cell(before)
        end = match.end()
        language, code = match["language"], (match["text"] or "").rstrip()
        if language == "python":
            yield v4.new_code_cell(code)
        elif language == "bash":
            yield v4.new_code_cell(f"%%bash\n{code}")
        elif language == "yaml" and (named := _NAMED.match(code)):
            yield v4.new_code_cell(f"%%writefile {named[1]}\n{code}")
        elif language == "yaml":  # a part of a job file, to read
            yield v4.new_markdown_cell(f"```yaml\n{code}\n```")
    if after := text[end:].strip():
        yield v4.new_markdown_cell(after)


def main(arguments: list[str]) -> None:
    """Write the notebooks; run all or the named ones with --execute, and raise errors of cells."""
    chosen = arguments[1:] if arguments[:1] == ["--execute"] else None
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for page in pages():
        file = notebook_file(page)
        file.write_text(notebook(page.read_text()))
        print(file.relative_to(ROOT), flush=True)
        if chosen is not None and (not chosen or page.stem in chosen):
            from nbclient import NotebookClient

            made = nbformat.read(file, as_version=4)
            with tempfile.TemporaryDirectory() as folder:
                where = {"metadata": {"path": folder}}
                NotebookClient(made, timeout=_LIMIT_S, resources=where).execute()


if __name__ == "__main__":
    main(sys.argv[1:])
