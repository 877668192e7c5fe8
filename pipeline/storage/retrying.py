"""What every call of `Layout` to its store has in common: patience with a store, and one error.

A bucket that answers "slow down" or 500 is asked again within bounds, one that has never answered
only briefly: it is more likely a wrong address. A local disk is not asked twice. What remains is a
`StorageError` that says what, where and why. That a file is missing, or there already, is an answer
and passes as it is.

What a filesystem or store raises, as one line with what to do.

Each fsspec backend has its own roots (botocore's and aiohttp's are no OSError), so a fault of the
place is told by where its class comes from. A defect of this program is none: it passes through.
"""

from __future__ import annotations

import errno
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from earmill.pipeline.common.counts import OUTPUT
from earmill.pipeline.common.errors import (
    EarmillError,
    ErrorKind,
    OutputError,
    StorageError,
    chain,
    classify,
    http_status,
)
from earmill.pipeline.common.retries import RetryPolicy
from earmill.pipeline.common.text import named_line

STORE_PACKAGES = frozenset(
    "adlfs aiobotocore aiohttp azure boto3 botocore fsspec gcsfs google httpcore httpx "
    "huggingface_hub ossfs paramiko pyarrow requests s3fs urllib3".split()
)
CREDENTIALS = (
    "set them in the environment of this process (AWS_*, GOOGLE_APPLICATION_CREDENTIALS, "
    "AZURE_STORAGE_*) or in storage_options"
)


def is_store_error(error: BaseException) -> bool:
    """Whether the place is at fault: an OSError, or an error of a package that talks to stores."""
    return any(
        isinstance(link, OSError) or type(link).__module__.partition(".")[0] in STORE_PACKAGES
        for link in _chain(error)
    )


def store_line(error: BaseException) -> str:
    """One line: what is wrong with the place, the error itself, what to do."""
    problem, advice = _diagnosis(error)
    return f"{problem} ({named_line(error)}); {advice}"


@contextmanager
def store_errors(uri: str) -> Iterator[None]:
    """Turn whatever a filesystem raises while a dataset is read into one OutputError line."""
    try:
        yield
    except StorageError as error:
        raise OutputError(f"{uri}: {store_line(error.__cause__ or error)}") from error
    except (EarmillError, BrokenPipeError):
        raise
    except Exception as error:
        if not is_store_error(error):
            raise
        raise OutputError(f"{uri}: {store_line(error)}") from error


def _diagnosis(error: BaseException) -> tuple[str, str]:
    links = list(_chain(error))
    names = {name for link in links for name in (c.__name__ for c in type(link).__mro__)}
    status = http_status(error)
    if "CredentialsError" in " ".join(names) or status == 401:
        return "no credentials", CREDENTIALS
    if "NotRegularError" in names:
        return "one of its files is no regular file", "put it back from a copy"
    if status == 403 or "PermissionError" in names:
        return "access is refused", "check the permissions there and the credentials"
    if names & {"NotADirectoryError", "IsADirectoryError", "FileExistsError"}:
        return "expected the folder of a dataset, got a file or a part of one", "check the address"
    if status == 404 or "FileNotFoundError" in names:
        return "not found", "check the address"
    if status is not None and (status >= 500 or status == 429):
        return f"the store answers {status}", "try again later"
    if any(isinstance(link, OSError) and link.errno == errno.ENOSPC for link in links):
        return "no space is left there", "free some and run again"
    if "ArrowException" in names:
        return "a file is damaged", "run `earmill verify` on it"
    if _is_connection(names, links):
        return "cannot be reached", "check the address, the endpoint and the network"
    return "cannot be read", "check the address and the credentials"


def _is_connection(names: set[str], links: list[BaseException]) -> bool:
    words = ("Connection", "Connector", "Timeout", "gaierror", "HTTPClientError", "DNSError")
    return any(word in name for name in names for word in words)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    for _ in range(20):
        if seen is None:
            return
        yield seen
        seen = seen.__cause__


P = ParamSpec("P")
R = TypeVar("R")

# For a job, which has hours to lose, and for a command that somebody waits for.
RETRIES = RetryPolicy(budget_s=75.0, what=OUTPUT)
BRIEF = RetryPolicy(budget_s=2.0, what=OUTPUT)
SILENT_TRIES = 4
REASONS = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the filesystem is read-only",
    errno.EACCES: "permission denied",
    errno.EIO: "the device failed (input/output error)",
    errno.ESTALE: "the mount is stale",
}
# Stores that have answered; those that went silent for good are taken out again.
_answered: weakref.WeakSet[Any] = weakref.WeakSet()
_jobs: list[object] = []
# When each call that is under way began.
_under_way: dict[object, float] = {}


def longest_call_s() -> float:
    """For how long a call of this process has been under way, tries again included, s."""
    began = min(_under_way.copy().values(), default=None)
    return 0.0 if began is None else time.monotonic() - began


@contextmanager
def patient() -> Iterator[None]:
    """Calls in this process belong to a job."""
    me = object()
    _jobs.append(me)
    try:
        yield
    finally:
        _jobs.remove(me)


class Store(Protocol):
    """What is needed of a layout here."""

    @property
    def fs(self) -> Any: ...

    @property
    def is_local(self) -> bool: ...

    def url(self, rel: str = "") -> str: ...


S = TypeVar("S", bound=Store)
Method = Callable[Concatenate[S, P], R]


def store_call(doing: str, path_at: int | None = 0) -> Callable[[Method[S, P, R]], Method[S, P, R]]:
    """A method of a layout with the manners of this module.

    Args:
        doing: What cannot be done to the file when it fails: read, written, listed, removed.
        path_at: Which positional argument is the path; None where it is the root.
    """

    def decorate(method: Method[S, P, R]) -> Method[S, P, R]:
        @wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
            me = object()
            _under_way[me] = time.monotonic()
            try:
                return _asked(self, lambda: method(self, *args, **kwargs))
            except (EarmillError, FileNotFoundError, FileExistsError):
                raise
            # Stores raise their own roots (botocore is no OSError).
            except Exception as error:
                if not _is_storage(error):
                    raise
                where = self.url() if path_at is None else self.url(str(args[path_at]))
                raise storage_error(f"{where} cannot be {doing}", error) from error
            finally:
                del _under_way[me]

        return call

    return decorate


def storage_error(what: str, error: BaseException) -> StorageError:
    """The error in our words, with the number of the system's."""
    number = next((e.errno for e in chain(error) if isinstance(e, OSError) and e.errno), None)
    # s3fs gives out numbers of its own making for answers of the store.
    said = REASONS.get(number or 0) if http_status(error) is None else None
    return StorageError(
        f"{what}: {said or store_line(error)}",
        transient=classify(error) is ErrorKind.OUTAGE,
        errno=number if http_status(error) is None else None,
    )


def _asked(store: Store, work: Callable[[], R]) -> R:
    if store.is_local:
        return work()
    silent = 0

    def worth_it(error: Exception) -> bool:
        nonlocal silent
        silent += http_status(error) is None and store.fs not in _answered
        return classify(error) is ErrorKind.OUTAGE and silent < SILENT_TRIES

    try:
        found = (RETRIES if _jobs else BRIEF).run(work, worth_it)
    except Exception as error:
        if classify(error) is ErrorKind.OUTAGE:
            _answered.discard(store.fs)
        else:
            _answered.add(store.fs)
        raise
    _answered.add(store.fs)
    return found


def _is_storage(error: Exception) -> bool:
    if isinstance(error, OSError) or http_status(error) is not None:
        return True
    return classify(error) is ErrorKind.OUTAGE and not isinstance(error, MemoryError | ImportError)
