"""The corpus machine: sources, plan, workers, commits, readers.

`open_features` is what most users need; it loads on first use, so that importing the package, or
one light module of it, costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.reader import Features, Row, open_features

__all__ = ["Features", "Row", "open_features"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from pipeline import reader

        return getattr(reader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
