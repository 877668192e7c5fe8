"""URIs without a backend of their own, through fsspec, and the filesystem behind a URI. Also
replaces `object_store` where obstore cannot be used: with options that only an fsspec client knows,
and in forked processes."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import fsspec

from earmill.pipeline.common.errors import MissingPackageError, OutputError, http_status, store_code
from earmill.pipeline.common.redact import redact
from earmill.pipeline.storage.backend import (
    Backend,
    Entry,
    ObjectStoreError,
    is_chain,
    is_web,
    local_path,
)
from earmill.pipeline.storage.retrying import is_store_error

if TYPE_CHECKING:
    import asyncio

# Characters that fsspec takes for a pattern in a path.
MAGIC_CHARACTERS = re.compile(r"[*?\[]")
# The extra of earmill that brings the client of a scheme.
EXTRAS = {
    **{"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "hf": "hf"},
    **{"abfs": "azure", "abfss": "azure", "az": "azure"},
}
CONNECT_S = 30.0
# After this time without a byte an answer is given up, and asked for again.
HTTP_STALL_S = 60.0
# gcsfs asks another service for the kind of bucket before every call unless told not to. That needs
# one more right, and costs a minute a call where the service cannot be reached.
GCSFS_KINDS_OF_BUCKET = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"
# Parts of an upload, and how many of them are sent at once: memory is bounded by the product.
# A multiple of 256 KiB, as Google asks; S3's limit of 10,000 parts is reached at 160 GiB.
PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
# Clients that turn `mode="create"` into a condition that their store checks.
CREATES = frozenset({"s3", "gs", "abfs"})
# adlfs also raises FileExistsError for a container that is being deleted; s3fs and gcsfs have no
# code.
TAKEN = (None, "BlobAlreadyExists", "PreconditionFailed")
# Keys under which filesystems say when a file was written.
TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_memory_lock = threading.Lock()


def filesystem_of(uri: str, **options: Any) -> tuple[Any, str]:
    """Return the fsspec filesystem of a URI and the path in it; raises as `Backend.open`."""
    os.environ.setdefault(GCSFS_KINDS_OF_BUCKET, "false")
    if (path := local_path(uri)) is not None:
        return fsspec.filesystem("file", **options), path
    if is_web(uri):
        import aiohttp

        # aiohttp ends any answer after five minutes, however fast it comes; here a stall ends it.
        stall = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=HTTP_STALL_S)
        options.setdefault("client_kwargs", {"timeout": stall})
    double_colon = "::"
    if not is_chain(uri):  # fsspec takes every `::` for a chain
        double_colon = "double-colon"
        while double_colon in uri:
            double_colon += "-"
    try:
        fs, path = fsspec.core.url_to_fs(uri.replace("::", double_colon), **options)
    except ImportError as error:
        raise missing_package(uri, error) from error
    if getattr(fs, "async_impl", False) or is_chain(uri):
        from fsspec.asyn import get_loop

        def tell(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            # The request reports a lost connection and is made again; asyncio would print a
            # traceback too.
            error = context.get("exception")
            if error is None or not is_store_error(error):
                loop.default_exception_handler(context)

        get_loop().set_exception_handler(tell)
    return fs, str(path).replace(double_colon, "::")


def asks_for_another(fs: Any, path: str, uri: str, *, versions: bool = True) -> bool:
    """Return True if a client would ask its store for another object than a URI, which is no chain,
    names: s3fs cuts at `?versionId=` (allowed with `versions`), adlfs at a tab, others at `#`."""
    if is_web(uri):
        return "#" in uri
    behind_bucket = uri.split("/", 3)[3:]
    if behind_bucket and not path.endswith(behind_bucket[0]):
        return True
    if not hasattr(fs, "split_path"):
        return False
    bucket, key, *version = fs.split_path(path)
    return f"{bucket}/{key}" != path and not (versions and any(version))


def missing_package(uri: str, error: ImportError | None = None) -> MissingPackageError:
    """Return the error for a URI whose package is not installed."""
    last = uri.rpartition("::")[2] if is_chain(uri) else uri
    scheme = last.partition("://")[0].lower()
    extra = EXTRAS.get(scheme)
    advice = str(error) if extra is None else f"run: pip install 'earmill[{extra}]'"
    return MissingPackageError(
        f"{uri}: {scheme}:// needs a package that is not installed here; {advice}"
    )


@dataclass(frozen=True)
class FsspecBackend(Backend):
    """A filesystem of fsspec, with its credentials."""

    fs: Any

    @classmethod
    def open(cls, uri: str, options: Mapping[str, Any]) -> tuple[FsspecBackend, str]:
        # A cached listing would hide commits that other processes make meanwhile.
        fs, path = filesystem_of(uri, **{"use_listings_cache": False, **options})
        special = FsspecBackend(fs).protocols & SPECIAL.keys()
        return (SPECIAL[min(special)] if special else cls)(fs), path.rstrip("/")

    @property
    def protocols(self) -> frozenset[str]:
        names = self.fs.protocol
        return frozenset({names} if isinstance(names, str) else names)

    def url(self, path: str) -> str:
        return redact(str(self.fs.unstrip_protocol(path)))

    def size(self, path: str) -> int:
        return int(self.fs.size(path))

    def read(self, path: str) -> bytes:
        return bytes(self.fs.cat_file(path))

    def read_range(self, path: str, start: int, length: int) -> Any:
        # s3fs would ask for an empty range, and be given the whole file.
        return self.fs.cat_file(path, start=start, end=start + length) if length else b""

    def write(self, path: str, data: bytes) -> None:
        self.fs.pipe_file(path, data)

    def create(self, path: str, data: bytes) -> bool:
        if not self.protocols & CREATES:
            raise OutputError(
                f"{min(self.protocols)}:// has no atomic create-if-absent, so commits would not be "
                "exactly once; write to a local folder, s3://, gs:// or abfs://"
            )
        try:
            self.fs.pipe_file(path, data, mode="create")
        except FileExistsError as error:
            code = store_code(error)
            if code not in TAKEN:
                raise ObjectStoreError(f"{path}: status 409 {code}", 409, code) from error
            return False
        except Exception as error:  # the class depends on the client: the status decides
            if http_status(error) != 412:
                raise
            return False
        return True

    def replace(self, path: str, seen: bytes, data: bytes) -> bool:
        """Compare, then write: a writer that is frozen between the two requests goes unnoticed."""
        try:
            if self.read(path) != seen:
                return False
        except FileNotFoundError:
            return False
        self.write(path, data)
        return True

    def list(self, path: str) -> dict[str, Entry]:
        found = self.fs.find(path, withdirs=False, detail=True)
        if not isinstance(found, dict):  # adlfs, of a path that is a file
            found = {name: self.fs.info(name) for name in found}
        return {
            str(info["name"]): Entry(int(info["size"] or 0), _modified(info))
            for info in found.values()
        }

    def delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            if not MAGIC_CHARACTERS.search(path):
                self.fs.rm(path, recursive=True)
                return
            # `fs.rm` would take the path for a pattern, and remove other files.
            for name in self.fs.find(path):
                self.fs.rm_file(name)

    def upload(self, local: str, path: str) -> None:
        # gcsfs sends one part after the other; adlfs has parts of 4 MiB.
        size = {"chunksize": PART_BYTES} if self.protocols & {"s3", "gs"} else {}
        at_once = {"max_concurrency": PARTS_AT_ONCE} if self.protocols & {"s3", "abfs"} else {}
        self.fs.put_file(local, path, **size, **at_once)


class MemoryBackend(FsspecBackend):
    """fsspec's memory filesystem: it looks, then writes, so that one process needs one lock."""

    def create(self, path: str, data: bytes) -> bool:
        with _memory_lock:
            is_new = not self.exists(path)
            if is_new:
                self.write(path, data)
            return is_new

    def replace(self, path: str, seen: bytes, data: bytes) -> bool:
        with _memory_lock:
            return super().replace(path, seen, data)

    def remove(self, path: str, seen: bytes) -> bool:
        with _memory_lock:
            return super().remove(path, seen)


class S3fsBackend(FsspecBackend):
    """S3 through s3fs, which knows a condition for replacing as well."""

    def replace(self, path: str, seen: bytes, data: bytes) -> bool:
        try:
            # Before the content: where the content is newer than the tag, the condition fails.
            tag = self.fs.info(path, refresh=True)["ETag"]
            if self.read(path) != seen:
                return False
            self.fs.pipe_file(path, data, IfMatch=tag)
        except FileNotFoundError:
            return False
        except Exception as error:  # botocore is no OSError
            status = http_status(error)
            if status not in (412, 501):
                raise
            # 501: this store knows no such condition.
            return status == 501 and super().replace(path, seen, data)
        return True


def _modified(info: Mapping[str, Any]) -> float | None:
    """Return the time of a file's last change, in seconds since 1970, or None."""
    for time in map(info.get, TIMES):
        if isinstance(time, str):
            with suppress(ValueError):
                time = datetime.fromisoformat(time)
        if isinstance(time, datetime | int | float):
            return time.timestamp() if isinstance(time, datetime) else float(time)
    return None


SPECIAL: Mapping[str, type[FsspecBackend]] = {"memory": MemoryBackend, "s3": S3fsBackend}
