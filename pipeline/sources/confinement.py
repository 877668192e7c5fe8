"""The places that a table may name, and the stores that get the credentials.

A manifest and the path cells of a dataset are data, often from other people. They may name files
below the folder of the table, and objects in the same bucket or on the same host. All other places
must be under a prefix in the job's `source.allow`. Addresses that are not public are reached only
if the job names their host. `storage_options` go to the source's own store and to no other host.
See docs/security.md for what this does not protect against.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from earmill.pipeline.common.errors import OutsideError
from earmill.pipeline.common.redact import redact
from earmill.pipeline.sources.base import is_local, public_uri
from earmill.pipeline.sources.places import (
    NOT_PUBLIC,
    OBJECT_STORES,
    PORTS,
    CheckedClient,
    Place,
    is_public,
)
from earmill.pipeline.storage.backend import is_chain, is_web, local_path

# fsspec protocols that only unpack or cache the next link of a chain.
WRAPPERS = frozenset({"zip", "tar", "simplecache"})
NAMED = 5


class Confinement:
    """The places that a source may read.

    Args:
        own: The folder in which relative uris must stay, then other places of the source itself.
        allow: Prefixes that the job names.
        storage_options: Options of the source's own store.
        store: The uri whose store the options belong to. None for a local source: the options then
            belong to the first store in `allow`.
    """

    def __init__(
        self,
        own: Sequence[str],
        allow: Sequence[str] = (),
        storage_options: Mapping[str, Any] | None = None,
        store: str | None = None,
    ) -> None:
        self._own = [Place.of(uri) for uri in own]
        self._allow = [Place.of(uri) for uri in allow]
        self._options = dict(storage_options or {})
        roots = dict.fromkeys((*self._own, *self._allow))
        self._client = CheckedClient(tuple(p for p in roots if p.scheme in PORTS and p.host))
        remote = [place for place in self._allow if place.scheme != "file" and place.authority]
        self._store = Place.of(store) if store is not None else next(iter(remote), None)

    def check(self, uri: str, *, relative: bool = False) -> None:
        """Raise OutsideError unless the uri may be read.

        Args:
            relative: True if the table holds a relative uri, which must stay in its folder.
        """
        try:
            place = _target(uri)
        except ValueError as error:
            raise OutsideError(f"{uri}: expected a plain uri, got {error}") from error
        roots = [*self._own[: 1 if relative else None], *self._allow]
        found = [root for root in roots if root.is_prefix_of(place)]
        if not found:
            raise OutsideError(f"{uri}: lies outside of what the source may read (source.allow)")
        named = any(root.authority for root in found)
        if not named and _on_network(place) and not is_public(place.host):
            raise OutsideError(f"{uri}: {place.host} {NOT_PUBLIC}")

    def options(self, uri: str) -> dict[str, Any]:
        """Return fsspec options for a uri; raise OutsideError unless it may be read."""
        self.check(uri)
        place = _target(uri)
        if place.scheme == "file":
            return {}
        options = dict(self._options) if self._is_own_store(place) else {}
        if place.scheme in PORTS:
            # The client checks redirects, and names whose address changes, when it connects.
            options.setdefault("get_client", self._client)
        return _for_target(uri, options)

    def _is_own_store(self, place: Place) -> bool:
        store = self._store
        if store is None or store.scheme != place.scheme:
            return False
        if store.authority == place.authority:
            return True
        # Buckets of one service share endpoint and keys, if the job names them.
        buckets = [root for root in self._allow if root.authority]
        return place.scheme in OBJECT_STORES and any(root.is_prefix_of(place) for root in buckets)


def resolved(uri: str, fs: Any, folder: str) -> str:
    """Return a uri that other processes can open.

    Args:
        uri: A uri of a table; a relative uri lies in the folder.
        fs: The filesystem of the folder; None if the folder is a uri.
        folder: A path of the filesystem, or a uri.
    """
    if not is_relative(uri):
        path = local_path(uri)
        return uri if path is None else posixpath.normpath(path)
    path = joined(folder, uri)
    return path if fs is None else public_uri(fs, path)


def joined(folder: str, path: str) -> str:
    """Join two paths and resolve dots. Empty parts stay, because keys of a bucket may have them."""
    if folder.startswith("/"):
        return posixpath.normpath(posixpath.join(folder, path))
    if is_web(folder):
        path = path.replace("#", "%23")  # clients do not send what follows #
    parts = folder.split("/")
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def is_relative(uri: str) -> bool:
    """Return True if a uri is a path below the folder of the table."""
    return is_local(uri) and not uri.startswith("/")


def store_of(uri: str) -> str:
    """Return the bucket or host of a uri, as a prefix."""
    place = _target(uri)
    return f"{place.scheme}://{place.authority}/"


def _target(uri: str) -> Place:
    """Return the place that is read; ValueError for chains that do more than unpack."""
    *wrappers, last = uri.split("::") if is_chain(uri) else [uri]
    for name in (link.partition("://")[0] for link in wrappers):
        if name not in WRAPPERS:
            raise ValueError(f"a chain through {name!r}")
    place = Place.of(last)
    if place.scheme in WRAPPERS:
        raise ValueError(f"{place.scheme} without the archive it is in")
    return place


def _for_target(uri: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options for a chained uri: the last link gets them, by the name of its protocol."""
    if not is_chain(uri) or not options:
        return options
    return {uri.rpartition("::")[2].partition("://")[0]: options}


def suggestions(uris: Iterable[str]) -> list[str]:
    """Return prefixes that would allow uris: stores, and the common folder of local files."""
    places = []
    for uri in uris:
        with suppress(ValueError):
            places.append(_target(uri))
    folders = {posixpath.dirname(place.path) for place in places if place.scheme == "file"}
    stores = {f"{p.scheme}://{redact(p.authority)}/" for p in places if p.scheme != "file"}
    return [*([posixpath.commonpath(folders)] if folders else []), *sorted(stores)[:NAMED]]


def _on_network(place: Place) -> bool:
    return place.scheme != "file" and place.scheme not in OBJECT_STORES
