"""WebDataset: tar files of samples, on local disks or behind any fsspec URI.

Planning reads the headers of each tar and its small members. The uri of a row names the tar and the
range of its audio member, and a worker reads only this range. The range begins at the header of the
member, which shows whether the tar has changed since planning.

Neighbouring members that share a name up to the first dot are one sample, as in WebDataset:
`spk1/utt7.flac` and `spk1/utt7.json` are sample `spk1/utt7`. Nothing is unpacked to a path, so the
name of a member cannot lead elsewhere. Links are no samples.
"""

from __future__ import annotations

import posixpath
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal
from urllib.parse import parse_qs, urlencode

from braceexpand import braceexpand
from fsspec.implementations.local import LocalFileSystem
from pydantic import field_validator

from earmill.pipeline.common.byte_streams import open_regular
from earmill.pipeline.common.errors import RowError, SourceError, UnreadableError
from earmill.pipeline.common.text import one_line
from earmill.pipeline.common.untrusted import MAX_HELD_BYTES, MEMBER, loads_json, tar_members
from earmill.pipeline.sources import base, fetch
from earmill.pipeline.sources.base import Fetched, Item, Source
from earmill.pipeline.sources.durations import early_seconds, guess_seconds, header_seconds
from earmill.pipeline.sources.fetch import Blob, RangedFile
from earmill.pipeline.sources.files import HIDDEN, by_extension, is_hidden
from earmill.pipeline.sources.tables import INTEGER, public_value, scalar
from earmill.pipeline.spec import Options, PlainUri
from earmill.pipeline.spec.source import (
    AUDIO_EXTENSIONS,
    SourceKind,
    SourceSection,
    normal_extensions,
)
from earmill.pipeline.storage.fsspec_store import MAGIC_CHARACTERS

METADATA = re.compile(r"__[^/]*__($|/)")
COLUMN_MEMBERS = ("json", "cls", "txt")
NO_SAMPLE = "no sample"
MAX_TARS = 1_000_000
LISTING_THREADS = 16
# A block of a remote tar while planning: headers of a sample, its columns, some of its audio.
BLOCK_BYTES = 9 << 10
EARLY_BYTES = 1 << 10
COPY_BYTES = MAX_HELD_BYTES
PATTERN = "{*?["

# Returns the duration by the header of an audio member, from its stream and bytes; None if unknown.
Seconds = Callable[[BinaryIO, int], float | None]
# The rows of a tar without their positions, and what was skipped.
TarListing = tuple[list[Item], Counter[str]]


@dataclass(slots=True)
class Sample:
    """A sample as the headers describe it; `raw_key` is the common name of its members in the tar.
    The duration `seconds` of the first audio member may be estimated from its bytes."""

    raw_key: str
    columns: dict[str, Any] = field(default_factory=dict)
    audio: dict[str, tarfile.TarInfo] = field(default_factory=dict)  # Headers by suffix.
    seconds: float | None = None
    estimated: bool = False
    problem: str | None = None  # Why the sample cannot be processed.
    suffixes: set[str] = field(default_factory=set)  # Suffixes of all members.

    @property
    def key(self) -> str:
        return base.as_text(self.raw_key)

    def chosen(self, suffix: str | None) -> tarfile.TarInfo | None:
        """Return the audio member of a suffix, or the only one; None sets `problem`."""
        found = [info for name, info in self.audio.items() if suffix in (None, name)]
        if self.problem is None and len(found) != 1:
            wanted = "one audio member" if suffix is None else f"an audio member .{suffix}"
            hint = "; choose one by source.audio" if found else ""
            got = ", ".join(sorted(self.audio if found else self.suffixes)) or "none"
            self.problem = f"expected {wanted}, got {got}{hint}"
        return None if self.problem is not None else found[0]


class Samples:
    """The samples of one tar; iterate once. A damaged tar or a repeated key is a SourceError.
    `skipped` counts members that are neither audio nor columns, by suffix."""

    def __init__(
        self, stream: BinaryIO, name: str, extensions: Collection[str], seconds: Seconds
    ) -> None:
        self._stream, self._name, self._extensions = stream, name, extensions
        self._seconds = seconds
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Sample]:
        seen: set[str] = set()
        for key, members in groupby(self._members(), key=itemgetter(0)):
            if key in seen:
                raise SourceError(
                    f"source {self._name}: the members of {base.as_text(key)!r} do not follow each "
                    "other, or two samples have this name; sort the tar by name or rename one"
                )
            seen.add(key)
            sample = Sample(key)
            for _, suffix, tar, member in members:
                self._add(sample, suffix, tar, member)
            yield sample

    def _members(self) -> Iterator[tuple[str, str, tarfile.TarFile, tarfile.TarInfo]]:
        """Yield the members of samples with their keys and suffixes."""
        try:
            for tar, member in tar_members(self._stream):
                found = MEMBER.fullmatch(member.name.removeprefix("./"))
                # The bytes of a sparse member do not lie unchanged in the tar.
                is_plain = member.isreg() and not member.issparse()
                if found is None or METADATA.match(member.name) or not is_plain:
                    self.skipped[NO_SAMPLE] += not member.isdir()
                else:
                    yield found[1], base.as_text(found[2].lower()), tar, member
        except tarfile.TarError as error:
            raise SourceError(
                f"source {self._name}: expected a whole, uncompressed tar: {error}"
            ) from error

    def _add(
        self, sample: Sample, suffix: str, tar: tarfile.TarFile, member: tarfile.TarInfo
    ) -> None:
        if suffix in sample.suffixes:
            raise SourceError(
                f"source {self._name}: {sample.key!r} has two members .{suffix}; rename one of them"
            )
        sample.suffixes.add(suffix)
        if suffix.rpartition(".")[2] in self._extensions:
            if not sample.audio:
                with _content(tar, member) as stream, suppress(tarfile.ReadError):
                    exact = self._seconds(stream, member.size)
                    guessed = guess_seconds(f"x.{PurePosixPath(suffix).name}", member.size)
                    sample.seconds = guessed if exact is None else exact
                    sample.estimated = exact is None
            sample.audio[suffix] = member
        elif suffix not in COLUMN_MEMBERS:
            self.skipped[PurePosixPath(f".{suffix}").suffix or f".{suffix}"] += 1
        elif member.size > MAX_HELD_BYTES:
            sample.problem = f"expected .{suffix} of at most 1 MB, got {member.size:,} bytes"
        else:
            with _content(tar, member) as stream:
                content = stream.read()
            try:
                # A JSON mapping has several columns, other members one named by their suffix.
                text = content.decode("utf-8")
                cell = loads_json(text) if suffix == "json" else text
                if suffix == "cls":
                    cell = int(text) if INTEGER.fullmatch(text.strip()) else text.strip()
                cells = cell if isinstance(cell, dict) else {suffix: cell}
                columns = {public_value(k): public_value(scalar(v)) for k, v in cells.items()}
            except ValueError as error:
                sample.problem = f"its .{suffix} cannot be read: {one_line(error)}"
                return
            if twice := sorted(columns.keys() & sample.columns.keys()):
                sample.problem = (
                    f"two of its members have a column {twice[0]!r}; rename one of them"
                )
            sample.columns |= columns


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> BinaryIO:
    stream: Any = tar.extractfile(member)
    return stream


class WebDatasetSection(SourceSection):
    """WebDataset tar files: members that share a name up to the first dot are one row.

    Args:
        kind: Kind of the source.
        uri: A tar, a folder of them, a glob, or a brace pattern (`train-{000..146}.tar`); a local
            path or any fsspec URI.
        audio: Suffix of the audio member, as `wav` or `mic1.flac`; the only audio member when null.
        extensions: Suffixes that count as audio. Members `json`, `cls` and `txt` become columns.
        storage_options: Passed to fsspec; never stored.
    """

    kind: Literal["webdataset"]
    uri: PlainUri
    audio: str | None = None
    extensions: tuple[str, ...] = AUDIO_EXTENSIONS
    storage_options: Options

    check_extensions = field_validator("extensions")(normal_extensions)

    @field_validator("audio")
    @classmethod
    def _normal_suffix(cls, value: str | None) -> str | None:
        return None if value is None else value.lower().lstrip(".")


@dataclass(frozen=True)
class Place:
    """The tar of a row, and the range of its audio member with the header. The range ends at 0 if
    there is no readable audio member."""

    tar: str
    key: str
    start: int = 0
    end: int = 0

    def uri(self) -> str:
        span = {"start": self.start, "end": self.end} if self.end else {}
        return f"{self.tar}#{urlencode({'sample': self.key, **span}, safe='/')}"

    @classmethod
    def of(cls, uri: str) -> Place:
        tar, _, query = uri.rpartition("#")
        parts = {name: values[0] for name, values in parse_qs(query).items()}
        try:
            return cls(tar, parts["sample"], int(parts.get("start", 0)), int(parts.get("end", 0)))
        except (KeyError, ValueError):
            raise UnreadableError(f"{uri}: expected a uri ending in #sample=...") from None


class WebDatasetSource(Source):
    """The samples of some tars."""

    def __init__(self, section: WebDatasetSection) -> None:
        self._section = section
        self._beside: Counter[str] = Counter()
        with base.source_errors(section.uri):
            self._fs, self._path = base.filesystem(section.uri, section.storage_options)
            self._tars, self._root = base.retry_listing(self._find)
        below = [tar.removeprefix(self._root).removeprefix("/") for tar in self._tars]
        self._names = dict(zip(self._tars, base.row_names(below), strict=True))
        if not self._tars:
            raise SourceError(f"source {section.uri}: no tar files")
        self._skipped = Counter(self._beside)

    def _find(self) -> tuple[list[str], str]:
        """Return the tars in the order of the pattern, and the folder to which row ids relate."""
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
            is_glob = MAGIC_CHARACTERS.search(pattern)
            matched = sorted(self._fs.glob(pattern)) if is_glob else [pattern]
            found_tars |= dict.fromkeys(map(str, matched))
        return list(found_tars), literal.rpartition("/")[0]

    def items(self) -> Iterator[Item]:
        return self._listed(self._header_seconds)

    def listing(self) -> Iterator[Item]:
        """Yield the rows with durations estimated from sizes."""
        return self._listed(_unread)

    def _listed(self, seconds: Seconds) -> Iterator[Item]:
        self._skipped = Counter(self._beside)
        position = 0
        listed = fetch.ahead(lambda tar: self._rows(tar, seconds), self._tars, LISTING_THREADS)
        for rows, skipped in listed:
            self._skipped += skipped
            yield from (replace(row, position=at) for at, row in enumerate(rows, position))
            position += len(rows)
        if not position:
            raise SourceError(f"source {self._section.uri}: no samples in {len(self._tars)} tars")

    def _rows(self, tar: str, seconds: Seconds) -> TarListing:
        uri, name = base.public_uri(self._fs, tar), self._names[tar]

        def read() -> TarListing:
            stat = base.stat_fields(self._fs.info(tar))
            with _opened(*base.object_of(uri, self._section.storage_options)) as stream:
                samples = Samples(stream, uri, self._section.extensions, seconds)
                found = [(sample, sample.chosen(self._section.audio)) for sample in samples]
            names = base.row_names([sample.raw_key for sample, _ in found])
            rows = []
            for row_name, (sample, member) in zip(names, found, strict=True):
                place, size = Place(uri, sample.key), None
                if member is not None:
                    size = member.size
                    place = Place(uri, sample.key, member.offset, member.offset_data + size)
                rows.append(
                    Item(
                        row_id=f"{name}/{row_name}",
                        uri=place.uri(),
                        seconds=sample.seconds,
                        estimated=sample.estimated,
                        extra=sample.columns,
                        **{**stat, "size": size},
                    )
                )
            return rows, samples.skipped

        with base.source_errors(uri):
            try:
                return base.retry_listing(read)
            except RowError as error:
                raise SourceError(f"source {error}") from error

    def _header_seconds(self, stream: BinaryIO, nbytes: int) -> float | None:
        if isinstance(self._fs, LocalFileSystem):
            return header_seconds(stream, nbytes)
        return early_seconds(stream.read(min(nbytes, EARLY_BYTES)), nbytes)

    def skipped(self) -> dict[str, int]:
        return dict(+self._skipped)

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        return fetch.fetch_all(items, lambda uri: self._section.storage_options, self._load)

    def _load(self, item: Item, options: Mapping[str, Any], touch: Callable[[], None]) -> Blob:
        place = Place.of(item.uri)
        fs, path = base.object_of(place.tar, options)
        if place.end:
            # A remote member of up to `MEMORY_BYTES` is one request.
            with _opened(fs, path, place.end, fetch.MEMORY_BYTES) as stream:
                stream.seek(place.start)
                return _audio(stream, item, place, self._section.audio, touch)
        # The row has no audio member: its tar is read again, to say why.
        with _opened(fs, path) as stream:
            samples = Samples(stream, place.tar, self._section.extensions, _unread)
            found = next((sample for sample in samples if sample.key == place.key), None)
        problem = "changed since it was planned"
        if found is not None and found.chosen(self._section.audio) is None:
            problem = str(found.problem)
        raise UnreadableError(f"{item.uri}: {problem}")

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "webdataset",
            "uri": self._section.uri,
            "root": base.public_uri(self._fs, self._root or "/"),
            "tars": len(self._tars),
            "audio": self._section.audio,
            "extensions": list(self._section.extensions),
        }


def _unread(stream: BinaryIO, nbytes: int) -> None:
    """Leave a header unread."""


def _opened(
    fs: Any, path: str, size: int | None = None, block_bytes: int = BLOCK_BYTES
) -> BinaryIO:
    """Open a tar of `size` bytes, or its beginning; a remote tar is read in blocks."""
    if isinstance(fs, LocalFileSystem):
        return open_regular(path)
    size = int(fs.size(path)) if size is None else size
    return RangedFile(fs, path, size, block_bytes)  # type: ignore[return-value]


def _audio(
    stream: BinaryIO, item: Item, place: Place, suffix: str | None, touch: Callable[[], None]
) -> Blob:
    """Return the bytes of the member whose header begins here. The sample may have other members of
    this size, so a chosen `suffix` is compared too."""
    name = ""

    def pieces(content: BinaryIO) -> Iterator[bytes]:
        while piece := content.read(COPY_BYTES):
            yield piece
            touch()

    try:
        for tar, member in tar_members(stream):
            name = base.as_text(member.name.removeprefix("./"))
            key, found = name[: len(place.key) + 1], name[len(place.key) + 1 :].lower()
            if member.size != item.size or key != f"{place.key}." or suffix not in (None, found):
                break
            return fetch.blob_of(pieces(_content(tar, member)), member.size)
    except tarfile.TarError as error:
        raise UnreadableError(f"{item.uri}: changed since it was planned: {error}") from error
    raise UnreadableError(f"{item.uri}: changed since it was planned: {name!r} is there")


WEBDATASET = SourceKind(WebDatasetSection, WebDatasetSource)
