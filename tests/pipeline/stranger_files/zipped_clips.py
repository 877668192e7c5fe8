"""Clips in a zip archive, as a kind of source."""

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from earmill import sources
from earmill.sources import Blob, Columns, Item, SourceKind, SourceSection


class ZippedSection(SourceSection):
    """Clips in a zip archive.

    Args:
        kind: zipped.
        uri: The archive; a local path or any fsspec URI.
    """

    kind: Literal["zipped"]
    uri: str


class ZippedSource:
    def __init__(self, section: ZippedSection) -> None:
        self._section = section

    @contextmanager
    def _archive(self) -> Iterator[zipfile.ZipFile]:
        fs, path = sources.filesystem(self._section.uri)
        with fs.open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            yield archive

    def items(self) -> Iterator[Item]:
        with sources.source_errors(self._section.uri), self._archive() as archive:
            for position, member in enumerate(archive.infolist()):
                name, size = member.filename, member.file_size
                yield Item(name, f"{self._section.uri}#{name}", size=size, position=position)

    def fetch(self, items: Sequence[Item]) -> Iterator[sources.Fetched]:
        return sources.fetch_all(items, lambda uri: {}, self._load)

    def _load(self, item: Item, options: Mapping[str, Any], touch: Callable[[], None]) -> Blob:
        with self._archive() as archive:
            if item.row_id not in archive.namelist():
                raise sources.AbsentError(f"{item.uri}: not in the archive any more")
            return Blob(data=archive.read(item.row_id))

    def columns(self) -> Columns:
        return Columns()

    def skipped(self) -> dict[str, int]:
        return {}

    def describe(self) -> dict[str, Any]:
        return self._section.model_dump(include={"kind", "uri"})


ZIPPED = SourceKind(ZippedSection, ZippedSource)
