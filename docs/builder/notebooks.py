"""Notebooks of tutorials, from the pages' own text; `make notebooks` writes and executes them.

    python -m docs.builder.notebooks            # write docs/notebooks/*.ipynb
    python -m docs.builder.notebooks --execute  # and run each in an empty folder

A page whose head says `notebook: true` has one. Python blocks are cells, shell blocks start with
`%%bash`, job files with `%%writefile`; what a block prints is left out, so that a notebook holds no
figures but those of whoever runs it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.builder.blocks import BLOCK, meta_of, without_meta

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "notebooks"
_NAMED = re.compile(r"\A# ([\w./-]+\.yaml)\n")
_OF_ITSELF = re.compile(r"(?m)^\[This page as a notebook\].*\n\n")
_LIMIT_S = 500


def pages() -> list[Path]:
    """The pages that have a notebook."""
    found = sorted((ROOT / "docs").rglob("*.md"))
    return [page for page in found if meta_of(page.read_text()).get("notebook")]


def notebook_file(page: Path) -> Path:
    """Where the notebook of a page lies."""
    return FOLDER / f"{page.stem}.ipynb"


def notebook(page: str) -> str:
    """The notebook of a page's text, as JSON."""
    cells = [_cell(number, *cell) for number, cell in enumerate(_cells(page))]
    whole = {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _cells(page: str) -> Iterator[tuple[str, str]]:
    """Kind and text of every cell."""
    text, end = _OF_ITSELF.sub("", without_meta(page)), 0
    for match in BLOCK.finditer(text):
        if before := text[end : match.start()].strip():
            yield "markdown", before
        end = match.end()
        language, code = match["language"], (match["text"] or "").rstrip()
        if language == "python":
            yield "code", code
        elif language == "bash":
            yield "code", f"%%bash\n{code}"
        elif language == "yaml" and (named := _NAMED.match(code)):
            yield "code", f"%%writefile {named[1]}\n{code}"
    if after := text[end:].strip():
        yield "markdown", after


def _cell(number: int, kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}}
    if kind == "code":
        cell |= {"execution_count": None, "outputs": []}
    return cell | {"source": text.splitlines(keepends=True)}


def execute(file: Path) -> None:
    """Run a notebook in an empty folder; an error of a cell is raised."""
    import nbclient
    import nbformat

    made = nbformat.read(file, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        nbclient.NotebookClient(made, timeout=_LIMIT_S, resources=where).execute()


def main(arguments: list[str]) -> None:
    """Write the notebooks, and run them with --execute."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    FOLDER.mkdir(exist_ok=True)
    for page in pages():
        file = notebook_file(page)
        file.write_text(notebook(page.read_text()))
        began = time.perf_counter()
        if "--execute" in arguments:
            execute(file)
        print(f"{file.relative_to(ROOT)}  {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
