"""What tests of commits publish, and every file that came of it."""

from __future__ import annotations

from earmill.pipeline.storage.layout import Layout
from tests.pipeline.outputs import (
    contents,
    make_bad,
    make_row,
)

ROWS = [make_row("a.wav"), make_row("b.wav", 7), make_row("c.wav", 0)]


BAD = [make_bad("x.wav"), make_bad("y.wav", "truncated")]


def all_files(layout: Layout) -> dict[str, bytes]:
    folders = ("data", "rows", "quarantine", "commits")
    return {name: data for folder in folders for name, data in contents(layout, folder).items()}
