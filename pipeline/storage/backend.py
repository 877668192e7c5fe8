"""The contract of a store: objects by name, read, written, listed and removed. Kinds of URIs.

A new kind of store is one subclass of `Backend`. It is listed in `layout.BACKENDS`, or comes with a
package of its own, whose entry point in the group `earmill.stores` has the scheme of its URIs for
its name. `tests/pipeline/test_backends.py` tests the contract, with an example of such a package.

    uri    = path | scheme://rest | chain
    chain  = wrapper://inner::uri | wrapper::uri      zip://a.wav::s3://bucket/a.zip

Names are literal: a path or a key may hold `::`, `#`, `?` or `://`. Only a wrapper in front makes a
chain of a URI.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

# The schemes in front of a URI. No path of this machine begins so: `//` is `/` there.
SCHEMES = re.compile(r"(?P<first>[A-Za-z][A-Za-z0-9+.-]*)(?:::[A-Za-z][A-Za-z0-9+.-]*)*://")
LOCAL_SCHEMES = frozenset({"file", "local"})
# fsspec protocols that read what the rest of a chain names.
WRAPPERS = frozenset(
    "blockcache cached dir filecache libarchive reference simplecache tar zip".split()
)


def is_local(uri: str) -> bool:
    """Return True for a plain path of this machine, with any characters in it."""
    return SCHEMES.match(uri) is None


def is_web(uri: str) -> bool:
    """Return True for the address of a web server."""
    return uri.startswith(("http://", "https://"))


def is_chain(uri: str) -> bool:
    """Return True for a URI that reads one file through others: `zip://a.wav::/data/a.zip`."""
    schemes = SCHEMES.match(uri)
    return schemes is not None and "::" in uri and schemes["first"].lower() in WRAPPERS


def local_path(uri: str) -> str | None:
    """Return the absolute path that a path or a `file:` URI names; None for other URIs."""
    path = uri
    if not is_local(uri):
        scheme, _, path = uri.partition("://")
        if scheme.lower() not in LOCAL_SCHEMES:
            return None
    path = os.path.expanduser(path) if path.startswith("~") else path.removeprefix("./")
    if not path.startswith("/"):
        path = os.getcwd() if path in ("", ".") else f"{os.getcwd()}/{path}"
    return path.rstrip("/") or "/"


class ObjectStoreError(OSError):
    """An answer of a store that refuses a request. The HTTP status is None where the answer could
    not be understood. The error code is the store's own word, such as `SlowDown`, if it has one."""

    def __init__(self, message: str, status: int | None, error_code: str | None) -> None:
        super().__init__(message)
        self.status, self.error_code = status, error_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status, self.error_code)


class Entry(NamedTuple):
    """One file of a listing."""

    nbytes: int
    modified: float | None  # Time of the last change, seconds since 1970, if the store has one.
    is_file: bool = True  # False for a pipe, a device, a socket or a broken link of a local folder.


class Backend(ABC):
    """Access to one store. Paths are full: a bucket and a key, or a path of this machine.

    Every method raises FileNotFoundError where the file or its bucket is missing. Other errors are
    the backend's own; `common.errors.classify` classifies them. No method waits or tries again.
    A backend can be pickled, compared and referenced weakly.
    """

    is_local: ClassVar[bool] = False  # True where plain os calls reach the same files.

    @classmethod
    @abstractmethod
    def open(cls, uri: str, options: Mapping[str, Any]) -> tuple[Backend, str] | None:
        """Return the backend of a URI and the path in it; None where the class has none for it.

        Asks the store nothing yet.

        Raises:
            MissingPackageError: The package of its client is not installed here.
            ValueError, TypeError: No package is known for the scheme, or an option does not fit.
        """

    def here(self) -> Backend:
        """Return the backend to use in this process, see `ObjectBackend.here`."""
        return self

    def inside(self, root: str, path: str) -> str:
        """Return `path`; raise OutputError where links lead from it out of `root`."""
        return path

    @abstractmethod
    def url(self, path: str) -> str:
        """Return the full address of a path, without credentials."""

    def exists(self, path: str) -> bool:
        """Return True if a file is there; locally also for a folder."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the bytes of a file."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the whole content of a file."""

    @abstractmethod
    def read_range(self, path: str, start: int, length: int) -> Any:
        """Return bytes [start, start + length) as a buffer, fewer where the file ends before."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file; a reader sees the old content or the new, never a mix."""

    @abstractmethod
    def create(self, path: str, data: bytes) -> bool:
        """Create a file with its whole content; return False where the name is taken.

        Raises:
            OutputError: The store has no atomic create.
        """

    @abstractmethod
    def replace(self, path: str, seen: bytes, data: bytes) -> bool:
        """Replace a file that holds `seen`; return False, and change nothing, where it does not."""

    @abstractmethod
    def list(self, path: str) -> dict[str, Entry]:
        """Return every file below a folder, or the file itself; empty where there is none."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file, or a folder with everything in it; fine where it is already gone. A path
        is a name, never a pattern."""

    def remove(self, path: str, seen: bytes) -> bool:
        """Remove a file that holds `seen`; return False, and change nothing, where it does not.
        Stores take no condition with a removal, so the file is compared just before."""
        try:
            if self.read(path) != seen:
                return False
        except FileNotFoundError:
            return False
        self.delete(path)
        return True

    @abstractmethod
    def upload(self, local: str, path: str) -> None:
        """Publish a file of this machine, in parts where it is large. It may be moved."""

    def settle(self, paths: Sequence[str]) -> None:
        """Make files that were uploaded outlive a power cut; stores do so at once."""
        return
