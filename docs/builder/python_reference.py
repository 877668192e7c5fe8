"""Pages of the Python reference: which names are on which, from the packages' own lists.

Nothing is imported: the lists are read off the files, and mkdocstrings reads docstrings likewise.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src"
#: What `earmill` exports beside functions and classes: modules, which have pages of their own.
_MODULES = {"events", "formats", "models", "sources", "stages", "testing", "__version__"}
#: Aliases of types, which have no docstring.
_ALIASES = {"Fetched", "Options"}


def exported(module: str) -> list[str]:
    """`__all__` of a module of ours."""
    place = SOURCES / module.replace(".", "/")
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise ValueError(f"expected a list __all__ in {file}; the reference is made of it")


def _entries(module: str, names: Iterable[str]) -> str:
    """The place of each name's heading and docstring."""
    return "\n".join(f"::: {module}.{name}\n" for name in names)


def _is_error(name: str) -> bool:
    return name.endswith(("Error", "Stopped", "Outage"))


def _earmill() -> str:
    names = [name for name in exported("earmill") if name not in _MODULES]
    functions = [name for name in names if name[0].islower()]
    errors = [name for name in names if _is_error(name)]
    classes = [name for name in names if name not in functions and name not in errors]
    head = "# earmill\n\nEverything that `import earmill` gives. From the docstrings.\n\n"
    return head + _entries("earmill", [*functions, *classes, *errors])


def _extending() -> str:
    head = (
        "# Sources, formats, tests\n\nWhat [extensions](../extending.md) import, and the events of "
        "a run.\n\n"
    )
    parts = [
        _entries(module, [name for name in exported(module) if name not in _ALIASES])
        for module in ("earmill.sources", "earmill.formats", "earmill.testing")
    ]
    events = "::: earmill.pipeline.driver.events\n"
    return head + "\n".join([*parts, events])


def _is_model(name: str) -> bool:
    return name[-4:].isdigit() and name[:3] != "IHC"


def _models() -> str:
    names = exported("amtcore")
    helpers = [name for name in names if name[0].islower() or name == "Calibration"]
    head = (
        "# Models\n\nFrom the docstrings. Tables of every argument, with shapes and what differs "
        "from torch_amt: [api](../api.md), [loudness](../api_loudness.md).\n\n"
    )
    return head + _entries("amtcore", [*filter(_is_model, names), *helpers])


def _stages() -> str:
    names = [n for n in exported("amtcore") if not _is_model(n) and n != "Calibration"]
    head = (
        "# Stages\n\nFrom the docstrings. Tables of every argument: [stages](../api_stages.md), "
        "[loudness](../api_loudness.md), [spiking neurons](../api_lif.md).\n\n"
    )
    return head + _entries("amtcore", [name for name in names if name[0].isupper()])


PAGES: Mapping[str, Callable[[], str]] = {
    "reference/earmill.md": _earmill,
    "reference/extending.md": _extending,
    "reference/models.md": _models,
    "reference/stages.md": _stages,
}
