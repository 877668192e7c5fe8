"""The interface of sources, the uris of their items, and the retry policy of all of them. A source
lists items and opens their bytes as seekable streams, which the caller closes. If the bytes of a
row cannot be read, the source returns a `RowError` in place of the stream."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, NamedTuple, Protocol
from urllib.parse import unquote_to_bytes

from fsspec.implementations.local import LocalFileSystem

from earmill.pipeline.common import errors
from earmill.pipeline.common.arrow_types import Columns
from earmill.pipeline.common.errors import ErrorKind, chain, classify, http_status, is_outage
from earmill.pipeline.common.retries import RetryPolicy, T, Waits
from earmill.pipeline.common.text import named_line
from earmill.pipeline.sources.confinement import CheckedClient, Place
from earmill.pipeline.storage.backend import is_chain, is_local, is_web, local_path
from earmill.pipeline.storage.fsspec_store import asks_for_another, filesystem_of

FILE = "file://"
LOCAL_FILES = LocalFileSystem()  # fsspec takes 15 us to find its one object.
# Python's characters for bytes of a file name that are not UTF-8.
UNDECODED = re.compile("[\udc80-\udcff]")

Scalar = str | int | float | bool | None

LISTING_RETRIES = RetryPolicy(budget_s=75.0, what="source")
# After this time for reading an object, the driver tries the whole shard again later.
FETCH_RETRIES = RetryPolicy(budget_s=45.0, what="source")

# Waits of the readers of rows for the source.
waits = Waits()


class EqualRow(NamedTuple):
    """A row of the same plan that had the same bytes, of this sha256, when both were planned."""

    shard: str
    row_id: str
    sha256: str


class Variant(NamedTuple):
    """A variant of a row (`planning.variants`), and the recordings that were drawn for it."""

    name: str
    clean_id: str  # Id of the row without changes, which the source knows.
    noise_uri: str | None = None
    noise_sha256: str | None = None
    response_uri: str | None = None
    response_sha256: str | None = None


class Reference(NamedTuple):
    """The file of a row's reference recording, with the facts that `Item` has of the row's file."""

    uri: str
    etag: str | None = None
    size: int | None = None
    mtime: float | None = None


@dataclass(frozen=True, slots=True)
class Item:
    """A row of a corpus, before it is read.

    Args:
        row_id: Unique and stable name of the row.
        uri: Place of its bytes, without secrets, because it is stored and published. A source whose
            uris hold secrets looks them up again when it fetches.
        start_s: Start of the span in seconds; None for the beginning.
        end_s: End of the span in seconds; None for the end.
        etag: Content tag of the store, if it has one.
        size: Bytes, if known.
        mtime: Modification time in seconds since the epoch, if known.
        seconds: Expected duration; for planning only.
        estimated: True if `seconds` was estimated from bytes, not read from a header or a table.
        extra: Columns carried through to the output.
        position: Row number in the source.
        block: Number of the piece that holds the row and is fetched whole; its rows should share a
            shard. Known while planning only.
        part_of: For a part of a long row (`planning.spans`), start and end of the long row.
        equal_to: The row that this row copies, in a job that computes equal files once.
        variant: The variant that this row is of another row with the same audio.
        reference: Reference recording of the row (`source.reference_column`), or None.
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
    variant: Variant | None = None
    reference: Reference | None = None

    @property
    def clean_id(self) -> str:
        """The row id in the source."""
        return self.row_id if self.variant is None else self.variant.clean_id


def reference_item(item: Item) -> Item | None:
    """Return the reference recording of a row as a row with the same span; None without one."""
    if item.reference is None:
        return None
    return replace(item, **item.reference._asdict(), extra={}, reference=None)


Fetched = tuple[Item, BinaryIO | errors.RowError]


class Source(Protocol):
    """The interface of a corpus. A class that derives from it need not say what it leaves out."""

    def items(self) -> Iterator[Item]:
        """Yield every row in a stable order; SourceError if there is none."""

    def columns(self) -> Columns:
        """Return types and names of the columns in `Item.extra`.

        Types are known when `items` yields its first row, everything else when it has ended.
        """
        return Columns()

    def skipped(self) -> Mapping[str, int]:
        """Return the counts of files that `items` left out, by kind; complete when `items` ends."""
        return {}

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        """Yield the items in order, each with a seekable stream or its RowError. Items may be
        reference recordings (`reference_item`), unless the source has an attribute `references`:
        another source, which fetches them."""

    def describe(self) -> dict[str, Any]:
        """Return the origin of the rows for provenance, without credentials."""


def listing(source: Source) -> Iterator[Item]:
    """Yield the source's rows, without durations if it can, because durations open every file."""
    yield from getattr(source, "listing", source.items)()


class ChangedRows:
    """A source whose listings go through `change`; everything else is the source's own."""

    def __init__(self, source: Source, change: Callable[[Iterator[Item]], Iterator[Item]]) -> None:
        self._source, self._change = source, change

    def items(self) -> Iterator[Item]:
        return self._change(self._source.items())

    def listing(self) -> Iterator[Item]:
        return self._change(listing(self._source))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


def fetch(source: Source, items: Sequence[Item]) -> Iterator[Fetched]:
    """Yield `source.fetch` of all items. For a variant, the source gets the clean row."""
    asked = [
        item if item.variant is None else replace(item, row_id=item.clean_id, variant=None)
        for item in items
    ]
    for item, (_, stream) in zip(items, source.fetch(asked), strict=True):
        yield item, stream


def filesystem(uri: str, storage_options: Mapping[str, Any] | None = None) -> tuple[Any, str]:
    """Return the filesystem of a uri and the path in it, a literal name. Local places get no
    options, because the options of a table belong to its store."""
    path, odd = local_path(uri), _odd_path(uri)
    if path is not None:
        return LOCAL_FILES, path if odd is None or os.path.lexists(path) else odd
    options = dict(storage_options or {})
    if is_web(uri):
        # A redirect must not lead to other hosts of a private network.
        host = Place.of("/".join(uri.split("/", 3)[:3]))
        options.setdefault("get_client", CheckedClient((host,)))
    return filesystem_of(uri, **options)


def object_of(
    uri: str, storage_options: Mapping[str, Any] | None = None, *, versions: bool = True
) -> tuple[Any, str]:
    """Return `filesystem` of a uri that names one object; UnreadableError if the store's client
    would ask for another object. Without `versions`, `?versionId=` is a part of a listed name."""
    odd = _odd_path(uri)
    if odd is not None:
        return LOCAL_FILES, odd
    fs, path = filesystem(uri, storage_options)
    is_here = isinstance(fs, LocalFileSystem)
    if not (is_here or is_chain(uri)) and asks_for_another(fs, path, uri, versions=versions):
        raise errors.UnreadableError(
            f"{uri}: the client of this store cannot ask for an object of that name; rename it, or "
            "in a web address write # as %23"
        )
    return fs, path


def public_uri(fs: Any, path: str) -> str:
    """Return a uri that other processes can open: absolute, and a plain path for local files.

    A local name that is not UTF-8 becomes a `file:` uri with escaped bytes.
    """
    if not isinstance(fs, LocalFileSystem):
        return str(fs.unstrip_protocol(path))
    text = as_text(path)
    return path if text == path else FILE + text


def as_text(name: str) -> str:
    """Return a file name as text: bytes that are not UTF-8 become %XX, and then % becomes %25."""
    if not UNDECODED.search(name):
        return name
    return UNDECODED.sub(lambda match: f"%{ord(match[0]) - 0xDC00:02X}", name.replace("%", "%25"))


def row_names(names: Sequence[str]) -> list[str]:
    """Return the row id of each path below the root of a source. A name that is not UTF-8 is
    escaped. If another file has the escaped name, it gets `./` in front, which no path has."""
    texts = [as_text(name) for name in names]
    known = set(names)
    return [
        f"./{text}" if text != name and text in known else text
        for name, text in zip(names, texts, strict=True)
    ]


def is_relative(uri: str) -> bool:
    """Return True if a uri is a path below the folder of the table."""
    return is_local(uri) and not uri.startswith("/")


def joined(folder: str, path: str) -> str:
    """Join two paths and resolve dots. Empty parts stay, because keys of a bucket may have them."""
    if folder.startswith("/"):
        return posixpath.normpath(posixpath.join(folder, path))
    if is_web(folder):
        path = path.replace("#", "%23")  # clients do not send what follows #
    parts = folder.split("/")
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def resolved(uri: str, fs: Any, folder: str) -> str:
    """Return a uri of a table for other processes; a relative uri lies in the folder, a path of the
    filesystem `fs`, or a uri if `fs` is None."""
    if not is_relative(uri):
        path = local_path(uri)
        return uri if path is None else posixpath.normpath(path)
    path = joined(folder, uri)
    return path if fs is None else public_uri(fs, path)


def _odd_path(uri: str) -> str | None:
    """Return the path in a uri that `public_uri` escaped; None for other uris."""
    if uri.startswith(FILE):
        raw = unquote_to_bytes(uri.removeprefix(FILE))
        try:
            raw.decode()
        except UnicodeDecodeError:
            return os.fsdecode(raw)
    return None


@contextmanager
def source_errors(uri: str) -> Iterator[None]:
    """Turn every exception of a filesystem, of whatever class, into a SourceError of one line."""
    try:
        yield
    except errors.EarmillError:
        raise
    except FileNotFoundError as error:
        raise errors.SourceError(f"source {uri}: not found; check source.uri") from error
    except Exception as error:
        kind = errors.SourceOutage if is_outage(error) else errors.SourceError
        raise kind(f"source {uri}: cannot be read: {named_line(error)}") from error


def retry_listing(work: Callable[[], T]) -> T:
    """Return the value of `work`, which asks a store while a corpus is listed; retry an outage."""
    return LISTING_RETRIES.run(work, is_outage, is_known=False)


def retry_read(
    work: Callable[[], T], worth_it: Callable[[Exception], bool] = lambda error: not is_final(error)
) -> T:
    """Return the value of `work`, which reads an object while the reader of rows waits."""
    with waits.waiting():
        return FETCH_RETRIES.run(work, worth_it)


def is_final(error: Exception) -> bool:
    """Return True if the store refused the name, or the object is at fault: do not retry."""
    return row_error_of("", error) is not None or classify(error) is ErrorKind.REFUSED


def is_away(error: Exception) -> bool:
    """Return True if the files of a dataset cannot be had; False if their content is at fault."""
    if isinstance(error, ValueError | IndexError | KeyError) and http_status(error) is None:
        return False  # a damaged or shorter file
    return classify(error) in (ErrorKind.REFUSED, ErrorKind.OUTAGE)


def damaged_row(uri: str, error: Exception) -> errors.RowError:
    """Return the row error of a file of a dataset; raise SourceOutage if the file is away.

    An error on bytes that arrived costs one row. If bytes do not arrive, no row is at fault.
    """
    if isinstance(error, errors.RowError):
        return error
    if is_away(error):
        raise errors.SourceOutage(f"{uri}: cannot be read: {named_line(error)}") from error
    return unreadable(uri, error)


def unreadable(uri: str, error: Exception) -> errors.UnreadableError:
    return errors.UnreadableError(f"{uri}: cannot be read: {named_line(error)}")


def row_error(uri: str, error: Exception) -> errors.RowError:
    """Return the row error of a refusal or a defect; raise SourceOutage for all other errors."""
    if (found := row_error_of(uri, error)) is not None:
        return found
    if classify(error) is ErrorKind.REFUSED:
        return errors.AbsentError(f"{uri}: cannot be fetched: {named_line(error)}")
    raise errors.SourceOutage(f"{uri}: cannot be fetched: {named_line(error)}") from error


def row_error_of(uri: str, error: Exception) -> errors.RowError | None:
    """Return the row error of an exception that the object itself causes; None for others."""
    for each in chain(error):
        if isinstance(each, errors.RowError):
            return each
    if classify(error) is not ErrorKind.DEFECT:
        return None
    return errors.UnreadableError(f"{uri}: cannot be read: {named_line(error, where=True)}")


def stat_fields(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return etag, size and mtime of an fsspec info mapping of any backend."""
    etag = info.get("ETag") or info.get("etag")
    modified: Any = info.get("mtime") or info.get("LastModified") or info.get("updated")
    if hasattr(modified, "timestamp"):
        modified = modified.timestamp()
    size = info.get("size")
    return {
        "etag": str(etag).strip('"') if etag else None,
        "size": int(size) if size is not None else None,
        "mtime": float(modified) if isinstance(modified, int | float) else None,
    }


def stat_now(fs: Any, path: str) -> dict[str, Any]:
    """Return `stat_fields` of an object from its store, not from the store's client."""
    fs.invalidate_cache(path)
    return stat_fields(fs.info(path))
