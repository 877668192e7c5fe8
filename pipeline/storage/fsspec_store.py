"""The filesystem behind a uri and the path in it. Names are literal.

    uri    = path | scheme://rest | chain
    chain  = wrapper://inner::uri | wrapper::uri      zip://a.wav::s3://bucket/a.zip

A path or a key may hold `::`, `#`, `?` or `://`: only a wrapper in front makes a chain of a uri.
S3, HTTP and the Hub come with earmill. Google's and Microsoft's stores are extras: their clients
bring thirty packages that most jobs have no use for.
"""

from __future__ import annotations

import inspect
import os
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import fsspec

from earmill.pipeline.common.errors import MissingPackageError
from earmill.pipeline.storage.retrying import is_store_error

if TYPE_CHECKING:
    import asyncio

# The schemes in front of a uri. No path of this machine begins so: `//` is `/` there.
SCHEMES = re.compile(r"(?P<first>[A-Za-z][A-Za-z0-9+.-]*)(?:::[A-Za-z][A-Za-z0-9+.-]*)*://")
# What fsspec takes for a pattern in a path.
MAGIC_CHARACTERS = re.compile(r"[*?\[]")
LOCAL_SCHEMES = frozenset({"file", "local"})
# fsspec protocols that read what the rest of a chain names.
WRAPPERS = frozenset(
    "blockcache cached dir filecache libarchive reference simplecache tar zip".split()
)
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


def is_local(uri: str) -> bool:
    """Return True for a plain path of this machine, with any characters in it."""
    return SCHEMES.match(uri) is None


def is_web(uri: str) -> bool:
    """Return True for the address of a web server."""
    return uri.startswith(("http://", "https://"))


def is_chain(uri: str) -> bool:
    """Return True for a uri that reads one file through others: `zip://a.wav::/data/a.zip`."""
    schemes = SCHEMES.match(uri)
    return schemes is not None and "::" in uri and schemes["first"].lower() in WRAPPERS


def local_path(uri: str) -> str | None:
    """Return the absolute path that a path or a `file:` uri names; None for other uris."""
    path = uri
    if not is_local(uri):
        scheme, _, path = uri.partition("://")
        if scheme.lower() not in LOCAL_SCHEMES:
            return None
    path = os.path.expanduser(path) if path.startswith("~") else path.removeprefix("./")
    if not path.startswith("/"):
        path = os.getcwd() if path in ("", ".") else f"{os.getcwd()}/{path}"
    return path.rstrip("/") or "/"


def filesystem_of(uri: str, **options: Any) -> tuple[Any, str]:
    """Return the fsspec filesystem of a uri and the path in it; touches nothing yet.

    Raises:
        MissingPackageError: Its package is not installed here.
        ValueError: No package is known for the scheme, or an option does not fit.
    """
    os.environ.setdefault(GCSFS_KINDS_OF_BUCKET, "false")
    if (path := local_path(uri)) is not None:
        return fsspec.filesystem("file", **options), path
    if is_web(uri):
        options.setdefault("client_kwargs", {"timeout": _http_timeout()})
    # fsspec takes every `::` for a chain.
    double_colon = "::" if is_chain(uri) else _unused_in(uri)
    try:
        fs, path = fsspec.core.url_to_fs(uri.replace("::", double_colon), **options)
    except ImportError as error:
        raise MissingPackageError(_install(uri, error)) from error
    if getattr(fs, "async_impl", False) or is_chain(uri):
        from fsspec.asyn import get_loop

        get_loop().set_exception_handler(_tell_defects)
    return fs, str(path).replace(double_colon, "::")


def _unused_in(uri: str) -> str:
    """Return letters that a uri does not contain."""
    letters = "double-colon"
    while letters in uri:
        letters += "-"
    return letters


def asks_for_another(fs: Any, path: str, uri: str, *, versions: bool = True) -> bool:
    """Return True if a client would ask its store for another object than a uri names.

    Some clients cut names: s3fs at `?versionId=`, adlfs at a tab, a web client at `#`.

    Args:
        fs: The filesystem of the uri, see `filesystem_of`.
        path: The path in it.
        uri: One object, no chain.
        versions: The end of a uri may name a version of the object.
    """
    if is_web(uri):
        return "#" in uri
    behind_bucket = uri.split("/", 3)[3:]
    if behind_bucket and not path.endswith(behind_bucket[0]):
        return True
    if not hasattr(fs, "split_path"):
        return False
    bucket, key, *version = fs.split_path(path)
    return f"{bucket}/{key}" != path and not (versions and any(version))


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
    last = uri.rpartition("::")[2] if is_chain(uri) else uri
    scheme = last.partition("://")[0].lower()
    extra = EXTRAS.get(scheme)
    advice = str(error) if extra is None else f"run: pip install 'earmill[{extra}]'"
    return f"{uri}: {scheme}:// needs a package that is not installed here; {advice}"
