"""Results that a prompt or a notebook shows in a few words, instead of all of their fields."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

# Lines of a longer list that are shown.
FEW = 3


class Shown(ABC):
    """A result with a short `repr` and a table for notebooks."""

    __slots__ = ()

    @abstractmethod
    def shown(self) -> Mapping[str, str]:
        """Return what a person wants to see first, by its name."""

    def __repr__(self) -> str:
        said = ", ".join(f"{name}: {text}" for name, text in self.shown().items())
        return f"<{type(self).__name__}: {said}>"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{html.escape(text)}</td></tr>"
            for name, text in self.shown().items()
        )
        return f"<table><caption>{type(self).__name__}</caption>{rows}</table>"


def few(lines: Sequence[str]) -> str:
    """Return the first of some lines, and how many more there are."""
    more = f" and {len(lines) - FEW:,} more" if len(lines) > FEW else ""
    return "; ".join(lines[:FEW]) + more
