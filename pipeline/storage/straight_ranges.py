"""Objects in S3 and ranges of them over plain HTTP, straight into the memory where they are wanted.

s3fs is made for many requests at once in one thread: a request costs it 1.6 ms of Python, and what
arrives goes through its event loop in small pieces that are joined at the end. Here it shows how
URLs are signed (`storage/signed_urls.py`); a request is a few lines of text, and the bytes come in
0.1 ms.

It is a way past s3fs and never in its place: whatever does not go smoothly, be it a refusal, a
redirect, an outage or a signature past its time, is left to s3fs, which is asked as ever. For a
while it is then the only one asked, so that a store in trouble is not asked twice. That an object
is missing is no trouble: s3fs says so too, and the way stays open.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.storage.http_get import STALL_S, Answer, ask, connect
from earmill.pipeline.storage.signed_urls import SignedUrls

Bytes = NDArray[np.uint8]
T = TypeVar("T")
# Gives what is made of an answer, and returns whether that was what was asked for.
Took = Generator[T, None, bool]
Take = Callable[[Answer], Took[T]]
Address = tuple[str, str]
# Process, time of last use, address, connection.
Idle = tuple[int, float, Address, HTTPConnection]
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


def parts_straight(
    fs: Any, path: str, start: int, sizes: Sequence[int], memory: Bytes
) -> Iterator[Bytes]:
    """The bytes of an object from `start` on in parts of these sizes, by one request; fewer where
    that cannot be or goes wrong, and the filesystem is to be asked for the others.

    Args:
        fs: fsspec filesystem. path: Of the object, as `fs` spells it.
        memory: Where each of them lies until the next is asked for.
    """
    way = _way(fs)
    return way.parts(path, start, sizes, memory) if way else iter(())


def whole_straight(fs: Any, path: str, most: int) -> bytes | None:
    """All of an object; None where that cannot be, went wrong, or is more than `most` bytes, and
    the filesystem is to be asked. Arguments as of `parts_straight`."""
    way = _way(fs)
    return way.whole(path, most) if way else None


def _way(fs: Any) -> _Way | None:
    """Looked for until there is one: a client keeps the proxies and options it was made with."""
    if fs not in _ways:
        if not can_go_straight(fs):
            return None
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

    def parts(self, path: str, start: int, sizes: Sequence[int], memory: Bytes) -> Iterator[Bytes]:
        """See `parts_straight`."""
        nbytes = sum(sizes)
        wanted = f"{start}-{start + nbytes - 1}"

        def take(answer: Answer) -> Took[Bytes]:
            if not answer.is_range(wanted, nbytes):
                return False
            with answer.receiving() as fill:
                for size in sizes:
                    if not fill(memory[:size].data):
                        return False
                    yield memory[:size]
            return True

        return self._taken(path, {"Range": f"bytes={wanted}"}, take)

    def whole(self, path: str, most: int) -> bytes | None:
        """See `whole_straight`."""
        # To the end, as the connection is free only then.
        found = [*self._taken(path, {}, partial(_body, most))]
        return found[0] if found else None

    def _taken(self, path: str, headers: Mapping[str, str], take: Take[T]) -> Iterator[T]:
        if time.monotonic() < self._rests_until:
            return
        smooth = False
        try:
            url = urlsplit(self._urls.url(path))
            address, target = (url.scheme, url.netloc), f"{url.path}?{url.query}"
            smooth = yield from self._answered(address, target, headers, take)
        except _OthersAnswer:
            return
        # The filesystem is asked again, and tells what is wrong: stores raise their own roots.
        except Exception:
            pass
        if not smooth:
            self._urls.forget()
            self._rests_until = time.monotonic() + REST_S

    def _answered(
        self, address: Address, target: str, headers: Mapping[str, str], take: Take[T]
    ) -> Took[T]:
        connection, answer = self._asked(address, target, headers)
        smooth, keeps = False, not answer.will_close
        try:
            if answer.status == HTTPStatus.NOT_FOUND:
                raise _OthersAnswer
            smooth = yield from take(answer)
        finally:
            if smooth and keeps:
                self._idle.append((os.getpid(), time.monotonic(), address, connection))
            else:
                connection.close()
        while len(self._idle) > MAX_IDLE:
            with suppress(IndexError):  # another thread took the last
                self._idle.popleft()[-1].close()
        return smooth

    def _asked(
        self, address: Address, target: str, headers: Mapping[str, str]
    ) -> tuple[HTTPConnection, Answer]:
        connection = self._waiting(address)
        if connection is not None:
            # The store closes what waits for long.
            with suppress(ConnectionError):
                return connection, ask(connection, address[1], target, headers)
        connection = connect(*address, self._stall_s, self._certificates)
        return connection, ask(connection, address[1], target, headers)

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


def _body(most: int, answer: Answer) -> Took[bytes]:
    """All of an object."""
    if answer.status != HTTPStatus.OK:
        return False
    if answer.length is None or answer.length > most:
        raise _OthersAnswer
    found = bytearray(answer.length)
    with answer.receiving() as fill:
        if not fill(memoryview(found)):
            return False
    yield bytes(found)
    return True


_ways: weakref.WeakKeyDictionary[Any, _Way] = weakref.WeakKeyDictionary()
