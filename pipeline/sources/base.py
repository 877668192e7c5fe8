"""What every source is: a list of items, and a way to open their bytes. Nothing else.

A source never decodes and never decides; it names rows, says what is known about them before
reading, and hands out seekable byte streams. A row whose bytes cannot be had is handed out as a
`RowError` in its place, so that one missing object costs one row. Whoever takes a stream closes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, Protocol
from urllib.parse import unquote_to_bytes

from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common.arrow_types import Columns
from earmill.pipeline.common.counts import SOURCE
from earmill.pipeline.common.errors import (
    EarmillError,
    ErrorKind,
    RowError,
    SourceError,
    SourceOutage,
    UnreadableError,
    classify,
    http_status,
)
from earmill.pipeline.common.retries import RetryPolicy, T
from earmill.pipeline.common.text import named_line
from earmill.pipeline.sources.places import CheckedClient, Place
from earmill.pipeline.storage.fsspec_store import (
    asks_for_another,
    filesystem_of,
    is_chain,
    is_local,
    is_web,
    local_path,
)

__all__ = ["is_local", "local_path"]

FILE = "file://"
# How Python writes the bytes of a file name that are not UTF-8.
UNDECODED = re.compile("[\udc80-\udcff]")

Scalar = str | int | float | bool | None

# While listing: a store that answers "not now" is asked for so long, a silent one so often. The
# latter is more likely a wrong address.
OPEN_RETRIES = RetryPolicy(budget_s=75.0, what=SOURCE)
SILENT_TRIES = 4


class EqualRow(NamedTuple):
    """A row of the same plan that has the same bytes.

    Args:
        shard, row_id: The row. sha256: Of the bytes of both, when they were planned.
    """

    shard: str
    row_id: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Item:
    """One row of a corpus, before anything of it was read.

    Args:
        row_id: Unique and stable name of the row.
        uri: Where its bytes are, without secrets: it is stored, printed and published. A source
            whose uris hold secrets looks them up again when it fetches.
        start_s: Start of the span in seconds; the beginning when None.
        end_s: End of the span in seconds; the end when None.
        etag: The store's own content tag, if it has one.
        size: Bytes, if known.
        mtime: Modification time as seconds since the epoch, if known.
        seconds: Expected duration; for planning only.
        estimated: Whether that was estimated from bytes, as against read in a header or a table.
            Extraction finds the true one.
        extra: Columns carried through to the output.
        position: Row number inside the source.
        block: Rows of one number lie in one piece that is fetched whole, and should be one shard's.
            Known while planning only.
        part_of: Where this is a part of a long row (`planning.spans`): start and end of that row.
        equal_to: The row that it copies, in a job that computes equal files once.
    """

    row_id: str
    uri: str
    start_s: float | None = None
    end_s: float | None = None
    etag: str | None = None
    size: int | None = None
    mtime: float | None = None
    seconds: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    position: int = 0
    estimated: bool = False
    block: int | None = field(default=None, compare=False)
    part_of: tuple[float, float | None] | None = None
    equal_to: EqualRow | None = field(default=None, compare=False)


Fetched = tuple[Item, BinaryIO | RowError]


class Source(Protocol):
    """A corpus."""

    def items(self) -> Iterator[Item]:
        """Every row, in a stable order; SourceError when there is none."""

    def columns(self) -> Columns:
        """What is known of the columns in `Item.extra`.

        The types by the time `items` gives its first row, all else after it ended.
        """

    def skipped(self) -> Mapping[str, int]:
        """What `items` came across and left out, by kind; complete after it ended."""

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        """The items in their order, each with a seekable stream or its RowError."""

    def describe(self) -> dict[str, Any]:
        """Where the rows come from, for provenance; holds no credentials."""


def filesystem(uri: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return the filesystem of a uri and the path inside it; names are taken literally.

    Local places take no options: a table's options belong to its store.
    """
    path, odd = local_path(uri), _odd_path(uri)
    if path is not None:
        return LocalFileSystem(), path if odd is None or os.path.lexists(path) else odd
    options = dict(storage_options or {})
    if is_web(uri):
        # A redirect must not lead to other hosts of a private network.
        host = Place.of("/".join(uri.split("/", 3)[:3]))
        options.setdefault("get_client", CheckedClient((host,)))
    return filesystem_of(uri, **options)


def object_of(
    uri: str, storage_options: Mapping[str, Any] | None = None, *, versions: bool = True
) -> tuple[Any, str]:
    """Return `filesystem` of a uri that names one object.

    Args:
        uri: The object, maybe with a version of its store.
        storage_options: For the store.
        versions: False for a name that was listed, whose `?versionId=` is a part of it.
    Raises:
        UnreadableError: The store's client would ask for another object.
    """
    odd = _odd_path(uri)
    if odd is not None:
        return LocalFileSystem(), odd
    fs, path = filesystem(uri, storage_options)
    is_here = isinstance(fs, LocalFileSystem)
    if not (is_here or is_chain(uri)) and asks_for_another(fs, path, uri, versions=versions):
        raise UnreadableError(
            f"{uri}: the client of this store cannot ask for an object of that name; rename it, or "
            "in a web address write # as %23"
        )
    return fs, path


def public_uri(fs: Any, path: str) -> str:
    """The uri other processes can open: absolute, and a plain path for local files.

    A local name that is not UTF-8 becomes a `file:` uri with its bytes escaped.
    """
    if not isinstance(fs, LocalFileSystem):
        return str(fs.unstrip_protocol(path))
    text = as_text(path)
    return path if text == path else FILE + text


def as_text(name: str) -> str:
    """A file name as text: bytes that are not UTF-8 become %XX, and then % itself %25."""
    if not UNDECODED.search(name):
        return name
    return UNDECODED.sub(lambda match: f"%{ord(match[0]) - 0xDC00:02X}", name.replace("%", "%25"))


def row_names(names: Sequence[str]) -> list[str]:
    """Return the row id of each path below the root of a source: unique text.

    A name that is not UTF-8 is escaped. It gets `./` in front where another file has the escaped
    name: no path below a root begins with `./`.
    """
    texts = [as_text(name) for name in names]
    known = set(names)
    return [
        f"./{text}" if text != name and text in known else text
        for name, text in zip(names, texts, strict=True)
    ]


def _odd_path(uri: str) -> str | None:
    """The path in a uri that `public_uri` had to escape; None for all others."""
    if not uri.startswith(FILE):
        return None
    raw = unquote_to_bytes(uri.removeprefix(FILE))
    try:
        raw.decode()
    except UnicodeDecodeError:
        return os.fsdecode(raw)
    return None


@contextmanager
def source_errors(uri: str) -> Iterator[None]:
    """Turn whatever a filesystem raises into one SourceError line.

    fsspec backends raise their own classes (botocore, aiohttp, asyncio), so all of them are caught.
    """
    try:
        yield
    except EarmillError:
        raise
    except FileNotFoundError as error:
        raise SourceError(f"source {uri}: not found; check source.uri") from error
    except Exception as error:
        kind = SourceOutage if classify(error) is ErrorKind.OUTAGE else SourceError
        raise kind(f"source {uri}: cannot be read: {named_line(error)}") from error


def answered(work: Callable[[], T]) -> T:
    """The value of `work`, a question to a store, asked again within bounds while it is away."""
    silent = 0

    def worth_it(error: Exception) -> bool:
        nonlocal silent
        silent += http_status(error) is None
        return classify(error) is ErrorKind.OUTAGE and silent < SILENT_TRIES

    return OPEN_RETRIES.run(work, worth_it)


def stat_fields(info: Mapping[str, Any]) -> dict[str, Any]:
    """etag, size and mtime out of an fsspec info mapping, whichever backend wrote it."""
    etag = info.get("ETag") or info.get("etag")
    modified = info.get("mtime") or info.get("LastModified") or info.get("updated")
    size = info.get("size")
    return {
        "etag": str(etag).strip('"') if etag else None,
        "size": int(size) if size is not None else None,
        "mtime": _timestamp(modified),
    }


def _timestamp(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    as_seconds = getattr(value, "timestamp", None)
    return float(as_seconds()) if as_seconds is not None else None
