"""The filesystem behind a uri, and what to install where its package is missing.

S3, HTTP and the Hub come with earmill. Google's and Microsoft's stores are extras: their clients
bring thirty packages that most jobs have no use for.
"""

from __future__ import annotations

import inspect
import os
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import fsspec

from earmill.pipeline.common.errors import MissingPackageError
from earmill.pipeline.storage.store_errors import is_store_error

if TYPE_CHECKING:
    import asyncio

EXTRAS = {
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("abfs", "abfss", "az"), "azure"),
}
CONNECT_S = 30.0
# Without a byte for so long an answer is given up; it is then asked for again.
HTTP_STALL_S = 60.0
# gcsfs asks another service for the kind of bucket before every call unless told not to; that needs
# a right more, and costs a minute a call where the service cannot be reached.
GCSFS_KINDS_OF_BUCKET = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"
# A larger file is worth a request for its size, to fetch it in parts side by side.
ONE_REQUEST_BYTES = 16 * 2**20
_ONE_AT_ONCE = {"max_concurrency": 1}


def filesystem_of(uri: str, **options: Any) -> tuple[Any, str]:
    """An fsspec filesystem and the path in it; touches nothing yet.

    Raises:
        MissingPackageError: Its package is not installed here.
        ValueError: No package is known for the scheme, or an option does not fit.
    """
    os.environ.setdefault(GCSFS_KINDS_OF_BUCKET, "false")
    if uri.startswith(("http://", "https://")):
        options.setdefault("client_kwargs", {"timeout": _http_timeout()})
    try:
        fs, path = fsspec.core.url_to_fs(uri, **options)
    except ImportError as error:
        raise MissingPackageError(_install(uri, error)) from error
    if getattr(fs, "async_impl", False) or "::" in uri:
        from fsspec.asyn import get_loop

        get_loop().set_exception_handler(_tell_defects)
    return fs, str(path)


def _tell_defects(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say what a task of a client died of, unless its connection went: the request says that, and
    is made again; asyncio would print a traceback beside it."""
    error = context.get("exception")
    if error is None or not is_store_error(error):
        loop.default_exception_handler(context)


def in_one_request(fs: Any, nbytes: int | None) -> dict[str, Any]:
    """What `cat_file` of this filesystem is to be told about a file of so many bytes, None for
    unknown and few: s3fs would ask for the size of every file before it asks for the file."""
    return _ONE_AT_ONCE if (nbytes or 0) <= ONE_REQUEST_BYTES and _takes_parts(fs.__class__) else {}


@lru_cache
def _takes_parts(kind: Any) -> bool:
    method = getattr(kind, "_cat_file", None)
    return method is not None and "max_concurrency" in inspect.signature(method).parameters


def _http_timeout() -> Any:
    """aiohttp ends any answer after five minutes, however fast it comes; here a stall ends it."""
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=HTTP_STALL_S)


def _install(uri: str, error: ImportError) -> str:
    scheme = uri.rpartition("::")[2].partition("://")[0].lower()
    extra = EXTRAS.get(scheme)
    advice = str(error) if extra is None else f"run: pip install 'earmill[{extra}]'"
    return f"{uri}: {scheme}:// needs a package that is not installed here; {advice}"
