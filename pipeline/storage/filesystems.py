"""The filesystem behind a uri, and what to install where its package is missing.

S3, HTTP and the Hub come with earmill. Google's and Microsoft's stores are extras: their clients
bring thirty packages that most jobs have no use for.
"""

from __future__ import annotations

import os
from typing import Any

import fsspec

from earmill.pipeline.common.errors import MissingPackageError

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
    return fs, str(path)


def _http_timeout() -> Any:
    """aiohttp ends any answer after five minutes, however fast it comes; here a stall ends it."""
    import aiohttp

    return aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=HTTP_STALL_S)


def _install(uri: str, error: ImportError) -> str:
    scheme = uri.rpartition("::")[2].partition("://")[0].lower()
    extra = EXTRAS.get(scheme)
    advice = str(error) if extra is None else f"run: pip install 'earmill[{extra}]'"
    return f"{uri}: {scheme}:// needs a package that is not installed here; {advice}"
