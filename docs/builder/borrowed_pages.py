"""Pages of the site whose text stands elsewhere in the repository, and files that pages link to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from docs.builder import cli_reference, python_reference

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Page:
    """A page that is no file of docs/.

    Args:
        text: Its Markdown.
        origin: The file that its relative links start from, in the repository.
    """

    text: str
    origin: str


def _file(origin: str) -> Callable[[], Page]:
    return lambda: Page((ROOT / origin).read_text(), origin)


def _layout() -> Page:
    from earmill.pipeline.storage import paths

    head = "# The layout on disk\n\nThe docstring of `pipeline/storage/paths.py`; a test pins it.\n"
    title, _, grammar = (paths.__doc__ or "").partition("\n")
    return Page(f"{head}\n{title}\n{grammar.replace('::', ':')}", "docs/reference/layout.md")


#: Name in the site -> how its page is made.
PAGES: Mapping[str, Callable[[], Page]] = {
    "infra.md": _file("infra/README.md"),
    "results.md": _file("benchmarks/RESULTS.md"),
    "changelog.md": _file("CHANGELOG.md"),
    "errors.md": _file("jobs/errors.md"),
    "reference/layout.md": _layout,
    "reference/cli.md": lambda: Page(cli_reference.page(), "docs/reference/cli.md"),
    **{
        name: (lambda name=name, make=make: Page(make(), f"docs/{name}"))
        for name, make in python_reference.PAGES.items()
    },
}

#: Origin in the repository -> name in the site.
BY_ORIGIN = {
    "infra/README.md": "infra.md",
    "benchmarks/RESULTS.md": "results.md",
    "CHANGELOG.md": "changelog.md",
    "jobs/errors.md": "errors.md",
}


def published_files() -> dict[str, Path]:
    """Files of other folders that the site holds as they are: name in the site -> file."""
    kept = [*ROOT.glob("jobs/*.yaml"), *(f for f in ROOT.glob("infra/*") if f.is_file())]
    return {
        f"files/{path.relative_to(ROOT).as_posix()}": path
        for path in sorted(kept)
        if path.suffix != ".md"
    }
