"""The places that a table may name, the stores that get the credentials, and checked connections.

Other people may have written a table. It may name files below its folder, and objects in the same
bucket or on the same host. All other places must be under a prefix in the job's `source.allow`.
Addresses that are not public are reached only if the job names their host. `storage_options` go to
the source's own store alone. See docs/security.md for what this does not protect against. Each
redirect of a web server is checked, and the address again when the socket is made, so that a name
cannot change its address in between.
"""

from __future__ import annotations

import asyncio
import ipaddress
import posixpath
import re
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

from earmill.pipeline.common.errors import OutsideError
from earmill.pipeline.common.redact import redact
from earmill.pipeline.storage.backend import is_chain, local_path

# The authority of these uris is a bucket or container; options of the store set the host.
OBJECT_STORES = frozenset({"s3", "gs", "abfs", "az", "adl", "hf", "oss", "oci", "memory"})
ALIASES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs"}
PORTS = {"http": 80, "https": 443}
# fsspec protocols that only unpack or cache the next link of a chain.
WRAPPERS = frozenset({"zip", "tar", "simplecache"})
HF_REVISION = re.compile(r"^(/?datasets/[^/@]+/[^/@]+)@[^/]+")
NOT_PUBLIC = "is no public address and not named in source.allow"
ADVICE = "if a redirect leads there, name that address"
# No valid host has these characters, and programs interpret them differently.
ODD_CHARACTERS = re.compile(r"[\\\x00-\x20\x7f]")
NAMED = 5


@dataclass(frozen=True)
class Place:
    """The parts of a uri."""

    scheme: str  # Lower case; `file` for local paths.
    authority: str  # Bucket, or host and port.
    path: str  # Absolute. Keys of object stores are literal, paths of the web without escapes.

    @classmethod
    def of(cls, uri: str) -> Place:
        """Parse a uri; ValueError if it is ambiguous."""
        if (path := local_path(uri)) is not None:
            return cls("file", "", posixpath.normpath(f"/{path.lstrip('/')}"))
        scheme, _, rest = uri.partition("://")
        if "::" in scheme:
            raise ValueError(f"a chain through {scheme.partition('::')[0]!r}")
        scheme = ALIASES.get(scheme.lower(), scheme.lower())
        authority, slash, path = rest.partition("/")
        if ODD_CHARACTERS.search(authority):
            raise ValueError("unusual characters in the host")
        path = slash + path
        if scheme not in OBJECT_STORES:
            parts = urlsplit(uri)
            path = unquote(parts.path)
            host, port = (parts.hostname or "").rstrip("."), parts.port or PORTS.get(scheme)
            authority = f"{host}:{port}" if host and port else host
        if ".." in re.split(r"[/\\]", path):
            raise ValueError("'..' in the path")
        if scheme == "hf":
            found = HF_REVISION.match(f"{authority}{path}")
            path = path if found is None else path.replace(f"@{found[0].rpartition('@')[2]}", "", 1)
        return cls(scheme, authority, path or "/")

    @classmethod
    def read_at(cls, uri: str) -> Place:
        """Return the place that is read; ValueError for chains that do more than unpack."""
        *wrappers, last = uri.split("::") if is_chain(uri) else [uri]
        for name in (link.partition("://")[0] for link in wrappers):
            if name not in WRAPPERS:
                raise ValueError(f"a chain through {name!r}")
        place = cls.of(last)
        if place.scheme in WRAPPERS:
            raise ValueError(f"{place.scheme} without the archive it is in")
        return place

    def is_prefix_of(self, other: Place, *, of_any_host: bool = False) -> bool:
        """Return True if a place lies below this one. With `of_any_host`, an empty authority stands
        for every host."""
        is_any = of_any_host and not self.authority
        if self.scheme != other.scheme or not (is_any or self.authority == other.authority):
            return False
        root = self.path.rstrip("/")
        return other.path == root or other.path.startswith(f"{root}/")

    def before_tls(self) -> tuple[Place, ...]:
        """Return the place, and for the default port of TLS also the place without TLS."""
        if self.scheme != "https" or not self.authority.endswith(":443"):
            return (self,)
        return self, Place("http", f"{self.host}:80", self.path)

    @property
    def host(self) -> str:
        return self.authority.rpartition(":")[0] if self.scheme in PORTS else self.authority

    @property
    def store(self) -> str:
        """Return the bucket or host, as a prefix."""
        return f"{self.scheme}://{self.authority}/"


# True while this task sends a request to a place that the job has named.
_is_named: ContextVar[bool] = ContextVar("is_named", default=False)


@dataclass(frozen=True)
class CheckedClient:
    """Opens aiohttp sessions that check every hop; for `get_client` of fsspec. Web addresses that
    the job names need not be public."""

    named: tuple[Place, ...]

    async def __call__(self, **options: Any) -> Any:
        import aiohttp

        connector = aiohttp.TCPConnector(socket_factory=_checked_socket)
        return aiohttp.ClientSession(connector=connector, middlewares=(self._checked,), **options)

    async def _checked(self, request: Any, send: Any) -> Any:
        """Send a request, the first or a redirected one, if its address is allowed."""
        try:
            place = Place.of(str(request.url.with_query(None)))
        except ValueError as error:
            raise OutsideError(f"{request.url}: expected a plain address, got {error}") from error
        named = any(root.is_prefix_of(one) for root in self.named for one in place.before_tls())
        if not named:
            loop = asyncio.get_running_loop()
            if not await loop.run_in_executor(None, is_public, place.host):
                raise OutsideError(f"{request.url}: {place.host} {NOT_PUBLIC}; {ADVICE}")
        token = _is_named.set(named)
        try:
            return await send(request)
        finally:
            _is_named.reset(token)


def _is_global(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(found, "ipv4_mapped", None)
    return bool((inner or found).is_global) and not found.is_multicast


def _checked_socket(address_info: Any) -> socket.socket:
    """Make a socket for a public address, or for the place of a request that the job names."""
    family, kind, protocol, _, address = address_info
    if not _is_named.get() and not _is_global(str(address[0])):
        raise OutsideError(f"{address[0]} {NOT_PUBLIC}; {ADVICE}")
    return socket.socket(family, kind, protocol)


@lru_cache(maxsize=4096)
def is_public(host: str) -> bool:
    """Return True if every address of a host is public, or if it has no address."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True  # the connection will fail, or be judged by its address
    return all(_is_global(str(address[0])) for *_, address in found)


class Confinement:
    """The places that a source may read.

    Args:
        own: The folder in which relative uris must stay, then other places of the source itself.
        allow: Prefixes that the job names; an empty authority stands for every host.
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
        """Raise OutsideError unless the uri may be read; a relative uri must stay in its folder."""
        try:
            place = Place.read_at(uri)
        except ValueError as error:
            raise OutsideError(f"{uri}: expected a plain uri, got {error}") from error
        own = self._own[: 1 if relative else None]
        found = [root for root in own if root.is_prefix_of(place)]
        found += [root for root in self._allow if root.is_prefix_of(place, of_any_host=True)]
        if not found:
            raise OutsideError(f"{uri}: lies outside of what the source may read (source.allow)")
        is_on_network = place.scheme != "file" and place.scheme not in OBJECT_STORES
        is_named = any(root.authority for root in found)
        if is_on_network and not is_named and not is_public(place.host):
            raise OutsideError(f"{uri}: {place.host} {NOT_PUBLIC}")

    def options(self, uri: str) -> dict[str, Any]:
        """Return fsspec options for a uri; raise OutsideError unless it may be read."""
        self.check(uri)
        place, store = Place.read_at(uri), self._store
        if place.scheme == "file":
            return {}
        options: dict[str, Any] = {}
        if store is not None and store.scheme == place.scheme:
            # Buckets of one service share endpoint and keys, if the job names them.
            buckets = [root for root in self._allow if root.authority]
            is_named = any(root.is_prefix_of(place) for root in buckets)
            if store.authority == place.authority or (place.scheme in OBJECT_STORES and is_named):
                options = dict(self._options)
        if place.scheme in PORTS:
            # The client checks redirects, and names whose address changes, when it connects.
            options.setdefault("get_client", self._client)
        if options and is_chain(uri):
            # The last link of the chain gets them, by the name of its protocol.
            return {uri.rpartition("::")[2].partition("://")[0]: options}
        return options


def allow_hint(uris: Iterable[str]) -> str:
    """Return the `source.allow` that would allow uris: stores, and a folder of local files."""
    places = []
    for uri in uris:
        with suppress(ValueError):
            places.append(Place.read_at(uri))
    folders = {posixpath.dirname(place.path) for place in places if place.scheme == "file"}
    stores = {f"{p.scheme}://{redact(p.authority)}/" for p in places if p.scheme != "file"}
    wanted = [posixpath.commonpath(folders)] if folders else []
    wanted += sorted(stores)[:NAMED]
    return f"; if that is meant, set source.allow: [{', '.join(wanted)}]" if wanted else ""
