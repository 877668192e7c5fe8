"""What installed distributions offer by name, as Python entry points; loaded when it is asked for.

A group (`earmill.sources`, `earmill.formats`) is listed from the metadata of the environment, which
imports nothing. Built-in names are found in the same way as a stranger's. A name that two
distributions claim belongs to neither; a name that cannot be imported fails for who asks for it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import (
    Distribution,
    EntryPoint,
    PackageNotFoundError,
    distribution,
    distributions,
)
from itertools import chain
from typing import Any

from packaging.utils import canonicalize_name

from earmill.pipeline.common.errors import ExtensionError, is_out_of_memory
from earmill.pipeline.common.missing_modules import install_line
from earmill.pipeline.common.text import alternatives, named_line, nearest


@dataclass(frozen=True)
class ExtensionPoint:
    """One group of entry points.

    Args:
        group: Its name in the metadata.
        what: What one of them is, in messages.
    """

    group: str
    what: str

    def names(self) -> tuple[str, ...]:
        """All registered names, sorted; those that cannot be loaded as well."""
        return tuple(sorted({found.name for found in self._registered()}))

    def check(self, name: str) -> None:
        """Whether exactly one distribution registers a name; imports nothing.

        Raises:
            ExtensionError: None does, or several do.
        """
        self._only(name)

    def load(self, name: str) -> Any:
        """The object behind a name.

        Raises:
            ExtensionError: The name is unknown, claimed twice, or cannot be imported.
        """
        found = self._only(name)
        try:
            return found.load()
        # A stranger's module: whatever it raises while it is imported concerns this name alone.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            advice = "mend or remove that distribution"
            if isinstance(error, ModuleNotFoundError) and error.name != found.module:
                advice = install_line(error)
            raise ExtensionError(
                f"{self.what} {name!r} of {_owner(found)} ({found.value}) cannot be loaded: "
                f"{named_line(error)}; {advice}"
            ) from error

    def owner(self, name: str) -> str:
        """The distribution behind a name with its version: `earmill 0.1.0`."""
        return _owner(self._only(name))

    def _registered(self) -> Sequence[EntryPoint]:
        return _listed(self.group, tuple(sys.path))

    def _only(self, name: str) -> EntryPoint:
        found = [each for each in self._registered() if each.name == name]
        if len(found) == 1:
            return found[0]
        if found:
            owners = " and ".join(sorted(_owner(each) for each in found))
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
# How the headings of our groups begin where a distribution lists its entry points.
_HEADING = "[earmill."


@lru_cache(maxsize=8)
def _listed(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points of a group; `path` is what they depend on."""
    offering: dict[str, Distribution] = {}
    for each in chain.from_iterable(_offering(place) for place in path):
        offering.setdefault(canonicalize_name(each.name), each)
    return tuple(
        point
        for name, each in offering.items()
        for point in _first(name, each).entry_points.select(group=group)
    )


@lru_cache(maxsize=256)
def _offering(place: str) -> tuple[Distribution, ...]:
    """Those at one place of the path that have entry points of ours.

    Each place is read once, as Ray puts others before it. What has no metadata is the rest of a
    removal that failed.
    """
    return tuple(
        each
        for each in distributions(path=[place])
        if _HEADING in (each.read_text("entry_points.txt") or "")
        and (each.read_text("METADATA") or each.read_text("PKG-INFO"))
    )


def _first(name: str, offering: Distribution) -> Distribution:
    """Of the distributions of a name the first on the path counts, also if it offers nothing."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        return offering  # its folder has another name than its metadata


def _owner(found: EntryPoint) -> str:
    return f"{found.dist.name} {found.dist.version}" if found.dist else "an unknown distribution"
