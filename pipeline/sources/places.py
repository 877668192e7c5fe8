"""Places that uris name, and HTTP connections that check where they lead.

A web server may redirect a request to any address, so each hop is checked. Public hosts are
allowed, because files are often moved to content networks. Other hosts must be named by the job,
with their path. The address is checked again when the socket is made, so that a name cannot change
its address in between.
"""

from __future__ import annotations

import asyncio
import ipaddress
import posixpath
import re
import socket
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

from earmill.pipeline.common.errors import OutsideError
from earmill.pipeline.storage.backend import local_path

# The authority of these uris is a bucket or container; options of the store set the host.
OBJECT_STORES = frozenset({"s3", "gs", "abfs", "az", "adl", "hf", "oss", "oci", "memory"})
ALIASES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs"}
PORTS = {"http": 80, "https": 443}
HF_REVISION = re.compile(r"^(/?datasets/[^/@]+/[^/@]+)@[^/]+")
NOT_PUBLIC = "is no public address and not named in source.allow"
ADVICE = "if a redirect leads there, name that address"
# No valid host has these characters, and programs interpret them differently.
ODD_CHARACTERS = re.compile(r"[\\\x00-\x20\x7f]")


@dataclass(frozen=True)
class Place:
    """The parts of a uri. In a prefix, an empty authority stands for every host.

    Args:
        scheme: Lower case; `file` for local paths.
        authority: Bucket, or host and port.
        path: Absolute. Keys of object stores are literal, paths of the web without escapes.
    """

    scheme: str
    authority: str
    path: str

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

    def is_prefix_of(self, other: Place) -> bool:
        if self.scheme != other.scheme or self.authority not in ("", other.authority):
            return False
        root = self.path.rstrip("/")
        return other.path == root or other.path.startswith(f"{root}/")

    def before_tls(self) -> tuple[Place, ...]:
        """Return the place, and for the default port of TLS also the place without TLS."""
        host, _, port = self.authority.rpartition(":")
        if self.scheme != "https" or port != "443":
            return (self,)
        return self, Place("http", f"{host}:80", self.path)

    @property
    def host(self) -> str:
        return self.authority.rpartition(":")[0] if self.scheme in PORTS else self.authority


# True while this task sends a request to a place that the job has named.
_is_named: ContextVar[bool] = ContextVar("is_named", default=False)


@dataclass(frozen=True)
class CheckedClient:
    """Opens aiohttp sessions that check every hop; for `get_client` of fsspec.

    Args:
        named: Places of the web that the job names; their addresses need not be public.
    """

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


def _is_global(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(found, "ipv4_mapped", None)
    return bool((inner or found).is_global) and not found.is_multicast
