"""Which places a table may send us to, and who is given the credentials.

A manifest and the path cells of a dataset are data, often somebody else's. They may name what lies
beside them: files below the table's own folder, objects in its own bucket or on its own host.
Everything else must be under a prefix that the job itself names in `source.allow`. Addresses that
are not public are reached only where the job names their host. `storage_options` go to the source's
own store and to no other host. See docs/security.md for what this does not defend against.
"""

from __future__ import annotations

import ipaddress
import posixpath
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common.errors import OutsideError
from earmill.pipeline.common.redact import redact
from earmill.pipeline.sources.base import is_local, public_uri

LOCAL_SCHEMES = frozenset({"file", "local"})
# Their authority is a bucket or container: the host is the store's, not the table's, to say.
OBJECT_STORES = frozenset({"s3", "gs", "abfs", "az", "adl", "hf", "oss", "oci", "memory"})
ALIASES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs"}
# fsspec protocols that only unpack or keep what the link behind them names.
WRAPPERS = frozenset({"zip", "tar", "simplecache"})
NAMED = 5
PORTS = {"http": 80, "https": 443}
HF_REVISION = re.compile(r"^(/?datasets/[^/@]+/[^/@]+)@[^/]+")
# No path of ours needs them, and programs disagree about what they mean.
ODD_CHARACTERS = re.compile(r"[\\\x00-\x20\x7f]")


@dataclass(frozen=True)
class Place:
    """A uri taken apart; an empty authority stands for every host where `is_prefix_of` is asked.

    Args:
        scheme: Lower case; `file` for local paths.
        authority: Bucket, or host and port.
        path: Absolute and without escapes.
    """

    scheme: str
    authority: str
    path: str

    @classmethod
    def of(cls, uri: str) -> Place:
        """Raises ValueError for what cannot be judged."""
        if is_local(uri) or uri.partition("://")[0].lower() in LOCAL_SCHEMES:
            return cls("file", "", posixpath.normpath(LocalFileSystem._strip_protocol(uri)))
        if ODD_CHARACTERS.search(uri.partition("://")[2].partition("/")[0]):
            raise ValueError("unusual characters in the host")
        parts = urlsplit(uri)
        scheme = ALIASES.get(parts.scheme, parts.scheme)
        path = unquote(parts.path)
        if ".." in re.split(r"[/\\]", path):
            raise ValueError("'..' in the path")
        if scheme == "hf":
            found = HF_REVISION.match(f"{parts.netloc}{path}")
            path = path if found is None else path.replace(f"@{found[0].rpartition('@')[2]}", "", 1)
        authority = parts.netloc
        if scheme not in OBJECT_STORES:
            host, port = (parts.hostname or "").rstrip("."), parts.port or PORTS.get(scheme)
            authority = f"{host}:{port}" if host and port else host
        return cls(scheme, authority, path or "/")

    def is_prefix_of(self, other: Place) -> bool:
        if self.scheme != other.scheme or self.authority not in ("", other.authority):
            return False
        root = self.path.rstrip("/")
        return other.path == root or other.path.startswith(f"{root}/")

    @property
    def host(self) -> str:
        return self.authority.rpartition(":")[0] if self.scheme in PORTS else self.authority


class Confinement:
    """What one source may read.

    Args:
        own: The folder that relative uris must stay in, and further places of the source itself.
        allow: Prefixes that the job names.
        storage_options: For the source's own store.
        store: The uri whose store the options belong to; None where the source is local, which
            gives them to the first store that `allow` names.
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
        remote = [place for place in self._allow if place.scheme != "file" and place.authority]
        self._store = Place.of(store) if store is not None else next(iter(remote), None)

    def check(self, uri: str, *, relative: bool = False) -> None:
        """Raise OutsideError unless the uri may be read.

        Args:
            relative: The uri was written relative to the table, and must stay in its folder.
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
            raise OutsideError(
                f"{uri}: {place.host} is no public address and not named in source.allow"
            )

    def options(self, uri: str) -> dict[str, Any]:
        """fsspec options for a uri; OutsideError unless it may be read."""
        self.check(uri)
        place = _target(uri)
        if place.scheme == "file":
            return {}
        options = dict(self._options) if self._is_own_store(place) else {}
        if place.scheme in PORTS and "get_client" not in options and is_public(place.host):
            # Redirects and names that change their address are stopped where they connect.
            options["get_client"] = public_client
        return _for_target(uri, options)

    def _is_own_store(self, place: Place) -> bool:
        store = self._store
        if store is None or store.scheme != place.scheme:
            return False
        if store.authority == place.authority:
            return True
        # Buckets of one service that the job itself names share its endpoint and keys.
        buckets = [root for root in self._allow if root.authority]
        return place.scheme in OBJECT_STORES and any(root.is_prefix_of(place) for root in buckets)


def resolved(uri: str, fs: Any, folder: str) -> str:
    """A uri as other processes can open it; relative ones lie in a folder of a filesystem."""
    if is_relative(uri):
        # The path of an http filesystem is the whole url, whose slashes must stay.
        scheme, separator, inside = folder.rpartition("://")
        path = posixpath.normpath(posixpath.join(inside, uri))
        return public_uri(fs, f"{scheme}{separator}{path}")
    if is_local(uri) or (uri.partition("://")[0].lower() in LOCAL_SCHEMES and "::" not in uri):
        return posixpath.normpath(LocalFileSystem._strip_protocol(uri))
    return uri


def is_relative(uri: str) -> bool:
    """Whether a uri is a path below the table's folder."""
    return is_local(uri) and not uri.startswith("/")


def store_of(uri: str) -> str:
    """The bucket or host of a uri, as a prefix."""
    place = _target(uri)
    return f"{place.scheme}://{place.authority}/"


def _target(uri: str) -> Place:
    """The place that is really read; ValueError for chains that do more than unpack."""
    *wrappers, last = uri.split("::")
    names = [link.partition("://")[0] for link in wrappers]
    for name in names:
        if name not in WRAPPERS:
            raise ValueError(f"a chain through {name!r}")
    scheme = last.partition("://")[0]
    if "://" in last and scheme in WRAPPERS:
        raise ValueError(f"{scheme} without the archive it is in")
    return Place.of(last)


def _for_target(uri: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a chained uri go to its last link, by the protocol's name."""
    if "::" not in uri or not options:
        return options
    return {uri.rpartition("::")[2].partition("://")[0]: options}


def suggestions(uris: Iterable[str]) -> list[str]:
    """Prefixes that would let uris in: the stores, and the folder that local files share."""
    places = []
    for uri in uris:
        with suppress(ValueError):
            places.append(_target(uri))
    folders = {posixpath.dirname(place.path) for place in places if place.scheme == "file"}
    stores = {f"{p.scheme}://{redact(p.authority)}/" for p in places if p.scheme != "file"}
    return [*([posixpath.commonpath(folders)] if folders else []), *sorted(stores)[:NAMED]]


def _on_network(place: Place) -> bool:
    return place.scheme != "file" and place.scheme not in OBJECT_STORES


@lru_cache(maxsize=4096)
def is_public(host: str) -> bool:
    """Whether every address of a host is one of the public internet; true if it has none."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True  # the connection will fail, or be judged by its address
    return all(_is_global(str(address[0])) for *_, address in found)


def _is_global(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(found, "ipv4_mapped", None)
    return bool((inner or found).is_global) and not found.is_multicast


async def public_client(**options: Any) -> Any:
    """An aiohttp session that connects to public addresses only, wherever it is redirected."""
    import aiohttp

    connector = aiohttp.TCPConnector(socket_factory=_public_socket)
    return aiohttp.ClientSession(connector=connector, **options)


def _public_socket(address_info: Any) -> socket.socket:
    family, kind, protocol, _, address = address_info
    if not _is_global(str(address[0])):
        raise OutsideError(f"{address[0]} is no public address and not named in source.allow")
    return socket.socket(family, kind, protocol)
