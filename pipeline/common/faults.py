"""Faults of disks, networks and stores: no such thing, ask again later, or a defect.

Backends raise classes of their own (botocore, aiohttp, httpx, errno in many dresses), and this is
the one place that knows them. Four answers, looked for along the chain of causes:

- REFUSED: the store answered and said no to this name: missing, forbidden, no such form of name. It
  is a property of the object only while others can be had.
- OUTAGE: nobody answered, or the answer was "not now", or this machine ran out of something. It is
  never a property of the object.
- DEFECT: a program failed over this very name or content. Asking again gives the same, so a row is
  lost and no outage is waited for.
- UNKNOWN: none of them; the caller decides.
"""

from __future__ import annotations

import errno
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum


class Fault(Enum):
    """See the module."""

    REFUSED = "refused"
    OUTAGE = "outage"
    DEFECT = "defect"
    UNKNOWN = "unknown"


DEFECT_CLASSES = (
    # Programs raise these over a name or value that they were not written for.
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(NotImplementedError, RecursionError, TypeError),
    # An archive that is damaged.
    *(lzma.LZMAError, struct.error, tarfile.TarError, zipfile.BadZipFile, zlib.error),
)
# What the system says of a name. Every other number is about a device, a network or this process.
REFUSED_ERRNOS = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EACCES,
        errno.EPERM,
        errno.EINVAL,
        errno.EEXIST,
    }
)
# Stores answer 400 and 403 for credentials that ran out as well as for a bad name; codes tell.
OUTAGE_CODES = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "AuthenticationFailed",  # of Azure, for signatures and tokens past their time
        "InternalError",
        "InvalidToken",
        "RequestExpired",
        "RequestLimitExceeded",
        "RequestTimeTooSkewed",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TokenRefreshRequired",
        "TooManyRequestsException",
        "500",
        "502",
        "503",
        "504",
    }
)
OUTAGE_STATUS = frozenset({408, 425, 429})
# By name, because their packages are imported only where they are used.
REFUSED_CLASSES = frozenset({"ParamValidationError", "InvalidURL", "EntryNotFoundError"})
OUTAGE_CLASSES = frozenset(
    {
        "BotoCoreError",  # endpoint, DNS, TLS, time-out, no credentials; not an answer of the store
        "ChunkedEncodingError",
        "ClientConnectionError",
        "ClientPayloadError",
        "ChecksumError",  # gcsfs: what arrived is not what was sent
        "ConnectTimeout",
        "ConnectionError",  # that of requests is not Python's
        "FSTimeoutError",
        "HTTPClientError",
        "GoogleAuthError",
        "IncompleteRead",
        "IncompleteReadError",
        "ProxyError",  # gcsfs makes it of 502
        "ServerDisconnectedError",
        "ServiceRequestError",  # Azure: no connection
        "ServiceResponseError",  # Azure: no whole answer
        "Timeout",
        "TimeoutException",
        "TransportError",
        "gaierror",
    }
)


def fault_of(error: BaseException) -> Fault:
    """What the exception says."""
    # An answer of the store says more than the class a wrapper made of it.
    for one in chain(error):
        code, status = _code(one), _status(one)
        if code in OUTAGE_CODES:
            return Fault.OUTAGE
        if status is not None:
            return _by_status(status)
    for one in chain(error):
        found = _by_class(one)
        if found is not Fault.UNKNOWN:
            return found
    # Last: clients that meet an outage may fail over it.
    is_defect = any(isinstance(one, DEFECT_CLASSES) for one in chain(error))
    return Fault.DEFECT if is_defect else Fault.UNKNOWN


def http_status(error: BaseException) -> int | None:
    """The HTTP status inside a store's error, wherever the backend keeps it."""
    return next((found for one in chain(error) if (found := _status(one)) is not None), None)


def store_code(error: BaseException) -> str | None:
    """The store's own word for what is wrong, where it has one."""
    return next((found for one in chain(error) if (found := _code(one)) is not None), None)


def retry_after_s(error: BaseException) -> float:
    """Seconds that a store asks to be left alone (the header Retry-After); 0 if it does not."""
    for one in chain(error):
        asked = _header(one, "retry-after")
        if asked is not None:
            return _seconds(asked)
    return 0.0


def is_machine_fault(error: BaseException) -> bool:
    """Whether a system call failed for this machine's sake: a device, memory, open files, space."""
    return any(
        isinstance(one, OSError) and one.errno is not None and one.errno not in REFUSED_ERRNOS
        for one in chain(error)
    )


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and what it was raised from or while handling; each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _code(error: BaseException) -> str | None:
    """A store's own error code, as botocore and Azure's client keep it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code = response.get("Error", {}).get("Code")
    else:
        code = getattr(error, "error_code", None)
        code = getattr(code, "value", code)
    return None if code is None else str(code)


def _header(error: BaseException, name: str) -> str | None:
    """botocore: a dictionary in lower case; aiohttp: `headers`; the others: those of a response."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
    found = headers.get(name) if isinstance(headers, Mapping) else None
    return None if found is None else str(found)


def _seconds(header: str) -> float:
    """Of `120` or of a date; 0 for nonsense."""
    try:
        return max(0.0, float(header)) if header.strip().isdigit() else _until(header)
    except (ValueError, TypeError):
        return 0.0


def _until(date: str) -> float:
    when = parsedate_to_datetime(date)
    return max(0.0, (when - datetime.now(when.tzinfo or UTC)).total_seconds())


def _status(error: BaseException) -> int | None:
    """botocore: a dictionary; requests and httpx: an object; aiohttp: `status`; gcsfs: `code`."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", None)
        for name in ("status", "code"):
            found = getattr(error, name, None) if found is None else found
    try:
        status = int(found) if isinstance(found, int | str) else 0
    except ValueError:
        return None
    return status if 100 <= status < 600 else None


def _by_status(status: int) -> Fault:
    # 501 and 505 are of no use to anybody, but say nothing of the object either.
    return Fault.OUTAGE if status >= 500 or status in OUTAGE_STATUS else Fault.REFUSED


def _by_class(error: BaseException) -> Fault:
    for kind in type(error).__mro__:
        if kind.__name__ in REFUSED_CLASSES:
            return Fault.REFUSED
        if kind.__name__ in OUTAGE_CLASSES:
            return Fault.OUTAGE
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return Fault.REFUSED
    # gcsfs makes a plain OSError of a 403.
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden: "):
        return Fault.REFUSED
    if isinstance(error, ConnectionError | TimeoutError | MemoryError | EOFError | ImportError):
        return Fault.OUTAGE
    if isinstance(error, OSError) and error.errno is not None:
        return Fault.REFUSED if error.errno in REFUSED_ERRNOS else Fault.OUTAGE
    return Fault.REFUSED if isinstance(error, ValueError) else Fault.UNKNOWN
