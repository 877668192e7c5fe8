"""Sources and formats of installed distributions, found as Python entry points. Listing a group
imports nothing. A name that two distributions claim is an error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from earmill.pipeline.common.errors import ExtensionError, is_out_of_memory
from earmill.pipeline.common.missing_modules import install_line
from earmill.pipeline.common.text import alternatives, named_line, nearest


@dataclass(frozen=True)
class ExtensionPoint:
    """One group of entry points; `what` is the noun for an entry point in messages."""

    group: str
    what: str

    def names(self) -> tuple[str, ...]:
        return tuple(sorted({point.name for point in self._registered()}))

    def load(self, name: str) -> Any:
        """Import and return the object behind a name; ExtensionError if that fails."""
        point = self._only(name)
        try:
            return point.load()
        # The module of an extension may raise anything while it is imported.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            advice = "mend or remove that distribution"
            if isinstance(error, ModuleNotFoundError) and error.name != point.module:
                advice = install_line(error)
            raise ExtensionError(
                f"{self.what} {name!r} of {_owner(point)} ({point.value}) cannot be loaded: "
                f"{named_line(error)}; {advice}"
            ) from error

    def owner(self, name: str) -> str:
        """Return the distribution behind a name with its version: `earmill 0.1.0`."""
        return _owner(self._only(name))

    def _registered(self) -> Sequence[EntryPoint]:
        return _installed(self.group, tuple(sys.path))

    def _only(self, name: str) -> EntryPoint:
        points = [point for point in self._registered() if point.name == name]
        if len(points) == 1:
            return points[0]
        if points:
            owners = " and ".join(sorted(_owner(point) for point in points))
            raise ExtensionError(
                f"{self.what} {name!r} is registered by {owners}; remove one of them, or ask its "
                "author for another name"
            )
        known = self.names()
        if not known:
            raise ExtensionError(
                f"no {self.what} is registered under {self.group!r}, not even earmill's own: its "
                "metadata is older than its code; install it again (pip install -e .)"
            )
        raise ExtensionError(
            f"expected {alternatives(known)}, got {name!r}{nearest(name, known)}; "
            f"others are installed as distributions with an entry point in {self.group!r}"
        )


SOURCES = ExtensionPoint("earmill.sources", "source kind")
FORMATS = ExtensionPoint("earmill.formats", "format")


@lru_cache(maxsize=32)
def _installed(group: str, path: tuple[str, ...]) -> Sequence[EntryPoint]:
    """Return a group's entry points for a `sys.path`, without leftovers of a failed removal."""
    files = "METADATA", "PKG-INFO"
    points = entry_points(group=group)
    return [p for p in points if p.dist is not None and any(map(p.dist.read_text, files))]


def _owner(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unknown distribution"
