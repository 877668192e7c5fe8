"""WebDataset: tar files of samples, on local disks or behind any fsspec URI.

To plan, the headers of each tar are read, and its small members; on a remote store by ranges, which
skip what lies between. A row's uri names the tar and the range of its audio member, so that a
worker reads that range and no more. The range begins at the member's header, which tells
whether the tar is still the one that was planned.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal
from urllib.parse import parse_qs, urlencode

from braceexpand import braceexpand
from fsspec.implementations.local import LocalFileSystem
from pydantic import field_validator

from earmill.pipeline.common.arrow_types import Columns
from earmill.pipeline.common.errors import RowError, SourceError, UnreadableError
from earmill.pipeline.common.untrusted import MAX_HELD_BYTES, BoundedReads
from earmill.pipeline.sources.base import (
    Fetched,
    Item,
    answered,
    as_text,
    filesystem,
    object_of,
    public_uri,
    row_names,
    source_errors,
    stat_fields,
)
from earmill.pipeline.sources.durations import early_seconds, guess_seconds, header_seconds
from earmill.pipeline.sources.fetch import (
    MEMORY_BYTES,
    Blob,
    fetch_all,
    temporary_file,
)
from earmill.pipeline.sources.listing_cache import Kept, NothingKept, name_of, packed, unpacked
from earmill.pipeline.sources.ranges import Range, RangedFile, ahead, read_range
from earmill.pipeline.sources.tar_samples import Sample, Samples, Seconds
from earmill.pipeline.sources.walk import HIDDEN, by_extension, is_hidden
from earmill.pipeline.spec.section import Options, plain_uri
from earmill.pipeline.spec.source import (
    AUDIO_EXTENSIONS,
    SourceKind,
    SourceSection,
    normal_extensions,
)
from earmill.pipeline.storage.filesystems import MAGIC_CHARACTERS
from earmill.pipeline.storage.regular import open_regular

MAX_TARS = 1_000_000
LISTING_THREADS = 16
# Of what is kept of a listing.
LISTING_VERSION = 1
# Of a remote tar at a time, while its headers are looked for: those of a sample with its columns,
# the header of its audio, and what tarfile reads of that at once.
BLOCK_BYTES = 9 << 10
EARLY_BYTES = 1 << 10
COPY_BYTES = MAX_HELD_BYTES
PATTERN = "{*?["


class WebDatasetSection(SourceSection):
    """WebDataset tar files: members that share a name up to the first dot are one row.

    Args:
        kind: webdataset.
        uri: A tar, a folder of them, a glob, or a brace pattern (`train-{000..146}.tar`); a local
            path or any fsspec URI.
        audio: Suffix of the audio member, as `wav` or `mic1.flac`; the only audio member when null.
        extensions: Suffixes that count as audio. Members `json`, `cls` and `txt` become columns.
        storage_options: Passed to fsspec; never stored.
    """

    kind: Literal["webdataset"]
    uri: str
    audio: str | None = None
    extensions: tuple[str, ...] = AUDIO_EXTENSIONS
    storage_options: Options

    check_uri = field_validator("uri")(plain_uri)
    check_extensions = field_validator("extensions")(normal_extensions)

    @field_validator("audio")
    @classmethod
    def _normal_suffix(cls, value: str | None) -> str | None:
        return None if value is None else value.lower().lstrip(".")


@dataclass(frozen=True)
class Place:
    """Where a row is: in which tar, and the bytes of its audio member, header included.

    Args:
        end: 0 where the row has no audio member that could be read.
    """

    tar: str
    key: str
    start: int = 0
    end: int = 0

    def uri(self) -> str:
        """As `of` reads it."""
        parts: dict[str, object] = {"sample": self.key}
        if self.end:
            parts |= {"start": self.start, "end": self.end}
        return f"{self.tar}#{urlencode(parts, safe='/')}"

    @classmethod
    def of(cls, uri: str) -> Place:
        tar, _, query = uri.rpartition("#")
        parts = {name: values[0] for name, values in parse_qs(query).items()}
        try:
            return cls(tar, parts["sample"], int(parts.get("start", 0)), int(parts.get("end", 0)))
        except (KeyError, ValueError):
            raise UnreadableError(f"{uri}: expected a uri ending in #sample=...") from None


class WebDatasetSource:
    """The samples of some tars.

    Args:
        section: The `source` section of a job.
    """

    def __init__(self, section: WebDatasetSection) -> None:
        self._section = section
        self._beside: Counter[str] = Counter()
        with source_errors(section.uri):
            self._fs, self._path = filesystem(section.uri, section.storage_options)
            self._tars, self._root = answered(self._find)
        below = [tar.removeprefix(self._root).removeprefix("/") for tar in self._tars]
        self._names = dict(zip(self._tars, row_names(below), strict=True))
        if not self._tars:
            raise SourceError(f"source {section.uri}: no tar files")
        self._skipped = Counter(self._beside)
        self._kept: Kept = NothingKept()

    def keep(self, kept: Kept) -> None:
        """From now on, remember what the headers of each remote tar said."""
        self._kept = kept

    def _find(self) -> tuple[list[str], str]:
        """The tars in the order of the pattern, and the folder that row ids start from."""
        path = self._path.rstrip("/") or "/"
        self._fs.invalidate_cache()
        if self._fs.isfile(path):
            return [path], posixpath.dirname(path)
        if self._fs.isdir(path):
            below = len(path.rstrip("/")) + 1
            names = [str(name)[below:] for name in self._fs.find(path)]
            shown = [name for name in names if not is_hidden(name)]
            tars = [name for name in shown if name.endswith(".tar")]
            self._beside = by_extension(name for name in shown if not name.endswith(".tar"))
            self._beside[HIDDEN] = len(names) - len(shown)
            return sorted(path.rstrip("/") + "/" + tar for tar in tars), path
        literal = path[: min((i for c in PATTERN if (i := path.find(c)) >= 0), default=0)]
        if not literal:
            raise FileNotFoundError(path)
        found_tars: dict[str, None] = {}
        for pattern in islice(braceexpand(path), MAX_TARS):
            matched = (
                sorted(self._fs.glob(pattern)) if MAGIC_CHARACTERS.search(pattern) else [pattern]
            )
            found_tars |= dict.fromkeys(map(str, matched))
        return list(found_tars), literal.rpartition("/")[0]

    def items(self) -> Iterator[Item]:
        return self._listed(self._header_seconds)

    def listing(self) -> Iterator[Item]:
        """The same rows with durations guessed from sizes."""
        return self._listed(_guessed)

    def _listed(self, seconds: Seconds) -> Iterator[Item]:
        self._skipped = Counter(self._beside)
        position = 0
        for rows, skipped in ahead(
            lambda tar: self._rows(tar, seconds), self._tars, LISTING_THREADS
        ):
            self._skipped += skipped
            for item in rows:
                yield Item(**item, position=position)
                position += 1
        if not position:
            raise SourceError(f"source {self._section.uri}: no samples in {len(self._tars)} tars")

    def _rows(self, tar: str, seconds: Seconds) -> tuple[list[dict[str, Any]], Counter[str]]:
        """The fields of every row of a tar."""
        public, name = public_uri(self._fs, tar), self._names[tar]

        def read() -> tuple[list[dict[str, Any]], Counter[str]]:
            stat = stat_fields(self._fs.info(tar))
            known = self._known(public, name, stat, seconds)
            if known is not None:
                return known
            with _readable_tar(public, self._section.storage_options) as stream:
                samples = Samples(stream, public, self._section.extensions, seconds)
                raw_keys, rows = [], []
                for sample in samples:
                    raw_keys.append(sample.raw_key)
                    rows.append(self._row(sample, public))
            for row, row_name in zip(rows, row_names(raw_keys), strict=True):
                row["row_id"] = f"{name}/{row_name}"
            kept = {"etag": stat["etag"], "mtime": stat["mtime"]}
            rows = [{**row, **kept} for row in rows]
            if (key := self._key(public, name, stat, seconds)) is not None:
                self._kept.put(key, packed([rows, samples.skipped]))
            return rows, samples.skipped

        with source_errors(public):
            return answered(read)

    def _key(self, tar: str, name: str, stat: Mapping[str, Any], seconds: Seconds) -> str | None:
        """What the listing of a tar is kept under; None for a local one, which is read as fast."""
        if isinstance(self._fs, LocalFileSystem):
            return None
        section = self._section
        how = (name, section.audio, section.extensions, seconds is _guessed)
        return name_of(tar, stat, LISTING_VERSION, *how)

    def _known(
        self, tar: str, name: str, stat: Mapping[str, Any], seconds: Seconds
    ) -> tuple[list[dict[str, Any]], Counter[str]] | None:
        """What an earlier listing has found out of a tar that has not changed since."""
        key = self._key(tar, name, stat, seconds)
        data = None if key is None else self._kept.get(key)
        found = None if data is None else unpacked(data)
        return None if found is None else (found[0], Counter(found[1]))

    def _row(self, sample: Sample, tar: str) -> dict[str, Any]:
        member = sample.chosen(self._section.audio)
        place = Place(tar, sample.key)
        if member is not None:
            place = Place(tar, sample.key, member.offset, member.offset_data + member.size)
        return {
            "uri": place.uri(),
            "size": None if member is None else member.size,
            "seconds": sample.seconds,
            "estimated": sample.estimated,
            "extra": sample.columns,
        }

    def _header_seconds(self, suffix: str, stream: BinaryIO, nbytes: int) -> tuple[float, bool]:
        if isinstance(self._fs, LocalFileSystem):
            exact = header_seconds(stream, nbytes)
        else:
            exact = early_seconds(stream.read(min(nbytes, EARLY_BYTES)), nbytes)
        return _guessed(suffix, stream, nbytes) if exact is None else (exact, False)

    def columns(self) -> Columns:
        return Columns()

    def skipped(self) -> dict[str, int]:
        """Members that are neither audio nor columns, and files beside the tars, by reason."""
        found = (entry for entry in self._skipped.items() if entry[1])
        return dict(sorted(found, key=lambda entry: (-entry[1], entry[0])))

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        return fetch_all(items, lambda uri: self._section.storage_options, self._load)

    def _load(self, item: Item, options: Mapping[str, Any], touch: Callable[[], None]) -> Blob:
        place = Place.of(item.uri)
        fs, path = object_of(place.tar, options)
        if not place.end:
            raise UnreadableError(f"{item.uri}: {self._problem(fs, path, place)}")
        with _range(fs, path, place) as stream:
            return _audio(stream, item, place, touch)

    def _problem(self, fs: Any, path: str, place: Place) -> str:
        """What was wrong with a row that has no audio member; its tar is looked through again."""
        with _opened(fs, path) as stream:
            samples = Samples(stream, place.tar, self._section.extensions, _guessed)
            found = next((sample for sample in samples if sample.key == place.key), None)
        if found is not None and found.chosen(self._section.audio) is None:
            return str(found.problem)
        return "changed since it was planned"

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "webdataset",
            "uri": self._section.uri,
            "root": public_uri(self._fs, self._root or "/"),
            "tars": len(self._tars),
            "audio": self._section.audio,
            "extensions": list(self._section.extensions),
        }


def _guessed(suffix: str, stream: BinaryIO, nbytes: int) -> tuple[float, bool]:
    return guess_seconds(f"x.{PurePosixPath(suffix).name}", nbytes), True


@contextmanager
def _readable_tar(uri: str, options: Mapping[str, Any]) -> Iterator[BinaryIO]:
    """A tar while its headers are looked for; SourceError where it cannot be read as a file."""
    try:
        fs, path = object_of(uri, options)
        with _opened(fs, path) as stream:
            yield stream
    except RowError as error:
        raise SourceError(f"source {error}") from error


def _opened(fs: Any, path: str) -> AbstractContextManager[BinaryIO]:
    """A tar to look for headers in."""
    if isinstance(fs, LocalFileSystem):
        return open_regular(path)
    found: Any = RangedFile(fs, path, int(fs.size(path)), BLOCK_BYTES)
    return closing(found)


def _range(fs: Any, path: str, place: Place) -> AbstractContextManager[BinaryIO]:
    """A stream whose position is the member's header."""
    stream: Any
    if isinstance(fs, LocalFileSystem):
        stream = open_regular(path)
    elif place.end - place.start <= MEMORY_BYTES:
        return BytesIO(read_range(fs, path, Range(place.start, place.end)))
    else:
        stream = RangedFile(fs, path, place.end, COPY_BYTES)
    stream.seek(place.start)
    return closing(stream)


def _audio(stream: BinaryIO, item: Item, place: Place, touch: Callable[[], None]) -> Blob:
    """The bytes of the member that begins here, in memory or, where they are many, in a file."""
    try:
        bounded: Any = BoundedReads(stream)
        with tarfile.open(fileobj=bounded, mode="r:", errors="surrogateescape") as tar:
            member = tar.next()
            name = "" if member is None else as_text(member.name.removeprefix("./"))
            if member is None or member.size != item.size or not name.startswith(f"{place.key}."):
                raise UnreadableError(
                    f"{item.uri}: changed since it was planned: {name!r} is there"
                )
            content: Any = tar.extractfile(member)
            pieces = iter(lambda: content.read(COPY_BYTES), b"")
            if member.size <= MEMORY_BYTES:
                return Blob(data=b"".join(pieces))
            return _copied(pieces, touch)
    except tarfile.TarError as error:
        raise UnreadableError(f"{item.uri}: changed since it was planned: {error}") from error


def _copied(pieces: Iterator[bytes], touch: Callable[[], None]) -> Blob:
    name = temporary_file()
    blob = Blob(path=name, temporary=True)
    with open(name, "wb") as file:
        for piece in pieces:
            file.write(piece)
            touch()
    return blob


WEBDATASET = SourceKind(WebDatasetSection, WebDatasetSource)
