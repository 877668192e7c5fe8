"""Pages of the Python reference: which names are on which, from the packages' own lists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

PAGES = (
    "reference/earmill.md",
    "reference/extending.md",
    "reference/models.md",
    "reference/stages.md",
)
#: What `earmill` exports beside functions and classes: modules, which have pages of their own.
_MODULES = {"events", "formats", "models", "sources", "stages", "testing"}


def page(name: str) -> str:
    """The Markdown of a page: a heading a name, and the place of its docstring for mkdocstrings."""
    return {
        "reference/earmill.md": _earmill,
        "reference/extending.md": _extending,
        "reference/models.md": _models,
        "reference/stages.md": _stages,
    }[name]()


def _entry(shown: str, home: str) -> str:
    """One name under the path that users import it by."""
    return f"## {shown}\n\n::: {home}\n"


def _homes(names: Mapping[str, object]) -> Callable[[str], str]:
    def home(name: str) -> str:
        found = names[name]
        return f"{found.__module__}.{found.__qualname__}"  # type: ignore[attr-defined]

    return home


def _earmill() -> str:
    import earmill

    names = [n for n in earmill.__all__ if n not in _MODULES and n != "__version__"]
    found = {name: getattr(earmill, name) for name in names}
    home = _homes(found)
    functions = [n for n in names if not inspect.isclass(found[n])]
    errors = [n for n in names if inspect.isclass(found[n]) and issubclass(found[n], Exception)]
    classes = [n for n in names if n not in functions and n not in errors]
    parts = ["# earmill\n\nEverything that `import earmill` gives. From the docstrings.\n"]
    for names_of_kind in (functions, classes, errors):
        parts += [_entry(f"earmill.{name}", home(name)) for name in names_of_kind]
    return "\n".join(parts)


def _extending() -> str:
    import earmill.formats
    import earmill.sources
    import earmill.testing

    parts = [
        "# Sources, formats, tests\n\nWhat [extensions](../extending.md) import: "
        "`earmill.sources`, `earmill.formats` and `earmill.testing`, and the events of a run.\n"
    ]
    for module in (earmill.sources, earmill.formats, earmill.testing):
        found = {name: getattr(module, name) for name in module.__all__}
        named = [n for n in found if inspect.isclass(found[n]) or inspect.isfunction(found[n])]
        named = [
            n for n in named if found[n].__module__.partition(".")[0] in ("earmill", "amtcore")
        ]
        parts += [_entry(f"{module.__name__}.{n}", _homes(found)(n)) for n in named]
    parts.append(_entry("earmill.events", "earmill.pipeline.driver.events"))
    return "\n".join(parts)


def _is_ours(found: object) -> bool:
    if not (inspect.isclass(found) or inspect.isfunction(found)):
        return False
    return found.__module__.partition(".")[0] in ("earmill", "amtcore")


def _models() -> str:
    import amtcore
    from amtcore import models

    names = list(models.__all__)
    found = {name: getattr(models, name) for name in names}
    head = (
        "# Models\n\nFrom the docstrings. Tables of every argument, with shapes and what differs "
        "from torch_amt: [api](../api.md), [loudness](../api_loudness.md).\n"
    )
    rest = ["Calibration", "get_num_threads", "set_num_threads", "set_buffer_limit"]
    found |= {name: getattr(amtcore, name) for name in rest}
    return "\n".join([head, *(_entry(f"amtcore.{n}", _homes(found)(n)) for n in [*names, *rest])])


def _stages() -> str:
    from amtcore import stages

    found = {name: getattr(stages, name) for name in stages.__all__}
    head = (
        "# Stages\n\nFrom the docstrings. Tables of every argument: [stages](../api_stages.md), "
        "[loudness](../api_loudness.md), [spiking neurons](../api_lif.md).\n"
    )
    return "\n".join([head, *(_entry(f"amtcore.{n}", _homes(found)(n)) for n in found)])
