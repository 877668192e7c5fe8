"""Calls of `Layout` to its store: one retry policy, and one error for a call that fails.

A store that answers "slow down" or 500 is asked again until the budget is spent; a local disk is
asked once. A call that still fails raises a `StorageError` of one line. FileNotFoundError and
FileExistsError are answers and pass as they are. Clients raise their own root classes, so a failure
of the store is recognised by the package of its class; errors of this program pass.
"""

from __future__ import annotations

import errno
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from earmill.pipeline.common import errors
from earmill.pipeline.common.errors import chain, http_status, is_outage
from earmill.pipeline.common.retries import RetryPolicy, Waits, in_a_job
from earmill.pipeline.common.text import named_line

P = ParamSpec("P")
R = TypeVar("R")

STORE_PACKAGES = frozenset(
    "adlfs aiobotocore aiohttp azure boto3 botocore fsspec gcsfs google httpcore httpx "
    "huggingface_hub obstore ossfs paramiko pyarrow requests s3fs urllib3".split()
)
CREDENTIALS = (
    "set them in the environment of this process (AWS_*, GOOGLE_APPLICATION_CREDENTIALS, "
    "AZURE_STORAGE_*) or in storage_options"
)
# For a job, unless `run.retry_s` says otherwise, and for a command or a training run, which waits
# as long as the clients of fsspec do by themselves. Backends do not wait.
RETRIES = RetryPolicy(budget_s=75.0, what="output")
BRIEF = RetryPolicy(budget_s=30.0, what="output")
REASONS = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the filesystem is read-only",
    errno.EACCES: "permission denied",
    errno.EIO: "the device failed (input/output error)",
    errno.ESTALE: "the mount is stale",
}
# Backends whose store has answered and did not go silent for good afterwards.
_answered: weakref.WeakSet[Any] = weakref.WeakSet()
# Calls that are under way, retries included.
calls = Waits()

Method = Callable[Concatenate[Any, P], R]


def store_call(doing: str, path_at: int | None = 0) -> Callable[[Method[P, R]], Method[P, R]]:
    """Give a method of a layout retries and its error: `<path> cannot be <doing>`. The path is the
    positional argument `path_at`; None stands for the root."""

    def decorate(method: Method[P, R]) -> Method[P, R]:
        @wraps(method)
        def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            def worth_it(error: Exception) -> bool:
                # 409: two writers use one name; the other one needs milliseconds.
                return http_status(error) == 409 or is_outage(error)

            try:
                with calls.waiting():
                    if self.is_local:
                        return method(self, *args, **kwargs)
                    policy, known = RETRIES if in_a_job() else BRIEF, self.backend in _answered
                    found = policy.run(
                        lambda: method(self, *args, **kwargs), worth_it, is_known=known
                    )
                _answered.add(self.backend)
                return found
            except Exception as error:
                is_away = is_outage(error)
                if not self.is_local:
                    (_answered.discard if is_away else _answered.add)(self.backend)
                if isinstance(error, errors.EarmillError | FileNotFoundError | FileExistsError):
                    raise
                is_away = is_away and not isinstance(error, MemoryError | ImportError)
                if not (isinstance(error, OSError) or http_status(error) is not None or is_away):
                    raise
                where = self.url() if path_at is None else self.url(str(args[path_at]))
                raise storage_error(f"{where} cannot be {doing}", error) from error

        return call

    return decorate


def storage_error(what: str, error: BaseException) -> errors.StorageError:
    """Return the error of a failed call, with the number of the system's error if there is one."""
    number = next((e.errno for e in chain(error) if isinstance(e, OSError) and e.errno), None)
    if http_status(error) is not None:
        number = None  # s3fs gives numbers of its own making to answers of the store
    return errors.StorageError(
        f"{what}: {REASONS.get(number or 0) or store_line(error)}",
        transient=is_outage(error),
        errno=number,
    )


@contextmanager
def store_errors(uri: str) -> Iterator[None]:
    """Turn whatever a filesystem raises while a dataset is read into an OutputError of one line."""
    try:
        yield
    except errors.StorageError as error:
        raise errors.OutputError(f"{uri}: {store_line(error.__cause__ or error)}") from error
    except (errors.EarmillError, BrokenPipeError):
        raise
    except Exception as error:
        if not is_store_error(error):
            raise
        raise errors.OutputError(f"{uri}: {store_line(error)}") from error


def is_store_error(error: BaseException) -> bool:
    """Return True for an OSError, or an error of a package that talks to stores."""
    return any(
        isinstance(link, OSError) or type(link).__module__.partition(".")[0] in STORE_PACKAGES
        for link in _causes(error)
    )


def store_line(error: BaseException) -> str:
    """Return the problem of a store, its error and what to do, as one line."""
    problem, advice = _diagnosis(error)
    return f"{problem} ({named_line(error)}); {advice}"


def _diagnosis(error: BaseException) -> tuple[str, str]:
    links = list(_causes(error))
    names = {kind.__name__ for link in links for kind in type(link).__mro__}
    status = http_status(error)
    if "CredentialsError" in " ".join(names) or status == 401:
        return "no credentials", CREDENTIALS
    if status == 409:
        return "another process writes it, the store says 409 Conflict", "run again with --resume"
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
    words = ("Connection", "Connector", "Timeout", "gaierror", "HTTPClientError", "DNSError")
    if any(word in name for name in names for word in words):
        return "cannot be reached", "check the address, the endpoint and the network"
    return "cannot be read", "check the address and the credentials"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__
