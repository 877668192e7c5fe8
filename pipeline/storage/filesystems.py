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
    try:
        fs, path = fsspec.core.url_to_fs(uri, **options)
    except ImportError as error:
        raise MissingPackageError(_install(uri, error)) from error
    return fs, str(path)


def _install(uri: str, error: ImportError) -> str:
    scheme = uri.rpartition("::")[2].partition("://")[0].lower()
    extra = EXTRAS.get(scheme)
    advice = str(error) if extra is None else f"run: pip install 'earmill[{extra}]'"
    return f"{uri}: {scheme}:// needs a package that is not installed here; {advice}"
