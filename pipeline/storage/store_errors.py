"""What a filesystem or store raises, as one line with what to do.

Each fsspec backend has its own roots (botocore's and aiohttp's are no OSError), so a fault of the
place is told by where its class comes from. A defect of this program is none: it passes through.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from earmill.pipeline.common.errors import EarmillError, OutputError, StorageError, http_status
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
