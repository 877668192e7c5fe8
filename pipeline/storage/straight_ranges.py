"""Objects in S3 and ranges of them over plain HTTP, straight into the memory where they are wanted.

s3fs is made for many requests at once in one thread: a request costs it 1.6 ms of Python, and what
arrives goes through its event loop in small pieces that are joined at the end. Here it shows how
URLs are signed (`storage/signed_urls.py`); the bytes come by `http.client`, in 0.2 ms.

It is a way past s3fs and never in its place: whatever does not go smoothly, be it a refusal, a
redirect, an outage or a signature past its time, is left to s3fs, which is asked as ever. For a
while it is then the only one asked, so that a store in trouble is not asked twice. That an object
is missing is no trouble: s3fs says so too, and the way stays open.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.storage.signed_urls import SignedUrls

Bytes = NDArray[np.uint8]
T = TypeVar("T")
# What is made of an answer; None where it is not what was asked for.
Take = Callable[[HTTPConnection, HTTPResponse], T | None]

Address = tuple[str, str]
# Process, time of last use, address, connection.
Idle = tuple[int, float, Address, HTTPConnection]
# As botocore has it, where nothing else is set.
STALL_S = 60.0
# An idle connection may have been closed by the store; those that wait longer are not tried.
IDLE_S, MAX_IDLE = 4.0, 32
# For so long after something went wrong only s3fs is asked.
REST_S = 30.0
# What may be set of s3fs without a change to how an object is asked for.
_PLAIN_CLIENT = frozenset(
    {
        "endpoint_url",
        "region_name",
        "use_ssl",
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
    }
)
_PLAIN_CONFIG = frozenset(
    {
        "signature_version",
        "region_name",
        "s3",
        "retries",
        "connect_timeout",
        "read_timeout",
        "max_pool_connections",
    }
)


def read_straight(fs: Any, path: str, start: int, into: Bytes) -> bool:
    """Fill memory with the bytes of an object from `start` on; False where that cannot be or went
    wrong, and the filesystem is to be asked. What `into` then holds is undefined.

    Args:
        fs: fsspec filesystem. path: Of the object, as `fs` spells it.
    """
    return can_go_straight(fs) and _way(fs).read(path, start, into)


def whole_straight(fs: Any, path: str, most: int) -> bytes | None:
    """All of an object; None where that cannot be, went wrong, or is more than `most` bytes, and
    the filesystem is to be asked. Arguments as of `read_straight`."""
    return _way(fs).whole(path, most) if can_go_straight(fs) else None


def _way(fs: Any) -> _Way:
    if fs not in _ways:
        stall_s = fs.config_kwargs.get("read_timeout") or STALL_S
        certificates = fs.session.get_config_variable("ca_bundle")
        _ways[fs] = _Way(SignedUrls(fs), stall_s, certificates)
    return _ways[fs]


def can_go_straight(fs: Any) -> bool:
    """Whether a signed URL is all that a request of this filesystem has: an s3fs without proxies,
    certificates, headers or sessions of the caller's. What is not known here cannot."""
    kind = type(fs)
    if (kind.__module__, kind.__name__) != ("s3fs.core", "S3FileSystem"):
        return False
    own = fs.req_kw or fs.s3_additional_kwargs or fs.version_aware or fs.asynchronous
    options = {*fs.client_kwargs} - _PLAIN_CLIENT or {*fs.config_kwargs} - _PLAIN_CONFIG
    # There from the first request on.
    if own or options or {*fs.kwargs} - {"profile"} or fs.session is None:
        return False
    return getattr(fs, "_session_is_owned", False) and not getproxies()


class Urls(Protocol):
    """URLs of objects, see `SignedUrls`."""

    def url(self, path: str) -> str: ...

    def forget(self) -> None: ...


class _OthersAnswer(Exception):
    """The filesystem is to answer, although nothing is wrong here."""


class _Way:
    """To the objects of one filesystem; safe in several threads, and in a process that was forked
    off: without locks, as one held during a fork would never open again.

    Args:
        urls: Of its objects.
        stall_s: Without a byte for so long an answer is given up.
        certificates: File of those to trust; None for botocore's.
    """

    def __init__(
        self, urls: Urls, stall_s: float = STALL_S, certificates: str | None = None
    ) -> None:
        self._urls, self._stall_s, self._certificates = urls, stall_s, certificates
        self._idle: deque[Idle] = deque()
        self._rests_until = 0.0
        weakref.finalize(self, _close, self._idle)

    def read(self, path: str, start: int, into: Bytes) -> bool:
        """See `read_straight`."""
        wanted = f"{start}-{start + len(into) - 1}"

        def take(connection: HTTPConnection, response: HTTPResponse) -> bool | None:
            done = _is_answer(response, wanted, len(into)) and _fill(connection, response, into)
            return done or None

        return bool(self._taken(path, {"Range": f"bytes={wanted}"}, take))

    def whole(self, path: str, most: int) -> bytes | None:
        """See `whole_straight`."""
        return self._taken(path, {}, partial(_body, most))

    def _taken(self, path: str, headers: Mapping[str, str], take: Take[T]) -> T | None:
        if time.monotonic() < self._rests_until:
            return None
        found = None
        try:
            url = urlsplit(self._urls.url(path))
            address, target = (url.scheme, url.netloc), f"{url.path}?{url.query}"
            found = self._asked(address, target, headers, take)
        except _OthersAnswer:
            return None
        # The filesystem is asked again, and tells what is wrong: stores raise their own roots.
        except Exception:
            pass
        if found is None:
            self._urls.forget()
            self._rests_until = time.monotonic() + REST_S
        return found

    def _asked(
        self, address: Address, target: str, headers: Mapping[str, str], take: Take[T]
    ) -> T | None:
        connection = self._waiting(address)
        if connection is not None:
            try:
                return self._answered(address, connection, target, headers, take)
            # The store closes what waits for long.
            except (HTTPException, ConnectionError):
                pass
        connection = _connection(*address, self._stall_s, self._certificates)
        return self._answered(address, connection, target, headers, take)

    def _answered(
        self,
        address: Address,
        connection: HTTPConnection,
        target: str,
        headers: Mapping[str, str],
        take: Take[T],
    ) -> T | None:
        found, keeps = None, False
        try:
            connection.request("GET", target, headers=headers)
            response = connection.getresponse()
            keeps = not response.will_close
            if response.status == HTTPStatus.NOT_FOUND:
                raise _OthersAnswer
            found = take(connection, response)
        finally:
            if found is not None and keeps:
                self._idle.append((os.getpid(), time.monotonic(), address, connection))
            else:
                connection.close()
        while len(self._idle) > MAX_IDLE:
            with suppress(IndexError):  # another thread took the last
                self._idle.popleft()[-1].close()
        return found

    def _waiting(self, address: Address) -> HTTPConnection | None:
        """A connection of this process that was used a moment ago."""
        while self._idle:
            try:
                process, used_s, where, connection = self._idle.pop()
            except IndexError:  # another thread took the last
                return None
            fresh = time.monotonic() - used_s < IDLE_S
            if fresh and where == address and process == os.getpid():
                return connection
            connection.close()
        return None


def _close(idle: deque[Idle]) -> None:
    while idle:
        idle.pop()[-1].close()


def _connection(
    scheme: str, netloc: str, stall_s: float, certificates: str | None
) -> HTTPConnection:
    if scheme == "https":
        return HTTPSConnection(netloc, timeout=stall_s, context=_trust(certificates))
    return HTTPConnection(netloc, timeout=stall_s)


@lru_cache
def _trust(certificates: str | None) -> ssl.SSLContext:
    from botocore.httpsession import get_cert_path

    return ssl.create_default_context(cafile=certificates or get_cert_path(True))


def _is_answer(response: HTTPResponse, wanted: str, nbytes: int) -> bool:
    """Whether the body is exactly what was asked for."""
    told = response.headers.get("Content-Range", "")
    partial = response.status == HTTPStatus.PARTIAL_CONTENT
    return partial and told.startswith(f"bytes {wanted}/") and response.length == nbytes


def _body(most: int, _: HTTPConnection, response: HTTPResponse) -> bytes | None:
    """All of an object; None where that is not what this is."""
    if response.status != HTTPStatus.OK:
        return None
    if response.length is None or response.length > most:
        raise _OthersAnswer
    # Raises where it ends too early.
    return response.read()


def _fill(connection: HTTPConnection, response: HTTPResponse, into: Bytes) -> bool:
    """The body into memory; False where it ends too early."""
    view, sock = into.data, connection.sock
    # What came with the headers lies in the response's own memory.
    done = response.fp.readinto1(view)
    rest = _receive_at_once if type(sock) is socket.socket else _receive
    whole = bool(done) and rest(sock, view[done:])
    response.close()
    return whole


def _receive_at_once(sock: socket.socket, view: memoryview) -> bool:
    """Fill `view` in as few calls as the kernel allows: after each, a thread waits for the
    interpreter anew, behind all others."""
    stall_s = sock.gettimeout() or STALL_S
    # With a time-out of Python's the kernel would give what is there; this one is the kernel's own.
    sock.settimeout(None)
    stall = struct.pack("ll", int(stall_s), int(1e6 * (stall_s % 1)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
    try:
        return _receive(sock, view, socket.MSG_WAITALL)
    finally:
        sock.settimeout(stall_s)


def _receive(sock: socket.socket, view: memoryview, flags: int = 0) -> bool:
    done = 0
    while done < len(view):
        count = sock.recv_into(view[done:], 0, flags)
        if not count:
            return False
        done += count
    return True


_ways: weakref.WeakKeyDictionary[Any, _Way] = weakref.WeakKeyDictionary()
