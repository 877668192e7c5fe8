"""A folder, a bucket prefix or a glob of audio files, local or behind any fsspec URI.

One recursive listing, filtered by glob and extension, sorted by path. The row id is the path below
the source root, so a corpus that moves keeps its ids. Durations come from local headers, or from
sizes where a header would cost a request.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from pipeline.errors import SourceError
from pipeline.source_spec import FilesSpec
from pipeline.sources.base import (
    Fetched,
    Item,
    filesystem,
    public_uri,
    source_errors,
    stat_fields,
)
from pipeline.sources.durations import guess_seconds, header_seconds
from pipeline.sources.fetch import fetch_all

MAGIC_CHARACTERS = re.compile(r"[*?\[]")


class FilesSource:
    """Audio files below one root.

    Args:
        spec: The `source` section of a job.
    """

    def __init__(self, spec: FilesSpec) -> None:
        self._spec = spec
        with source_errors(spec.uri):
            self._fs, path = filesystem(spec.uri, spec.storage_options)
            self._root, self._glob = self._split(path)

    def _split(self, path: str) -> tuple[str, str]:
        """Root folder and glob below it; SourceError when there is no such root."""
        path = path.rstrip("/") or "/"
        if self._fs.exists(path):
            if self._fs.isfile(path):
                folder, name = posixpath.split(path)
                return folder, _literal(name)
            return path, self._spec.glob
        parts = path.split("/")
        magic = [index for index, part in enumerate(parts) if MAGIC_CHARACTERS.search(part)]
        if magic:
            root = "/".join(parts[: magic[0]]) or "/"
            if self._fs.exists(root):
                return root, "/".join(parts[magic[0] :])
        raise FileNotFoundError(path)

    def items(self) -> Iterator[Item]:
        with source_errors(self._spec.uri):
            found = self._matching(self._listing())
        for position, (name, info) in enumerate(found):
            yield self._item(position, name, info)

    def _listing(self) -> list[tuple[str, dict[str, Any]]]:
        self._fs.invalidate_cache(self._root)
        prefix = self._root.rstrip("/") + "/"
        # Left to itself, the local walk leaves out folders it may not read.
        options = {"on_error": "raise"} if isinstance(self._fs, LocalFileSystem) else {}
        listing: dict[str, dict[str, Any]] = self._fs.find(self._root, detail=True, **options)
        return [(path.removeprefix(prefix), info) for path, info in listing.items()]

    def _matching(
        self, listing: list[tuple[str, dict[str, Any]]]
    ) -> list[tuple[str, dict[str, Any]]]:
        pattern = re.compile(glob_translate(self._glob))
        matched = [entry for entry in listing if pattern.match(entry[0])]
        audio = [entry for entry in matched if self._has_extension(entry[0])]
        if not audio:
            raise SourceError(
                f"source {self._spec.uri}: no audio files: {len(listing)} found, {len(matched)} "
                f"match {self._glob!r}, none ends in {', '.join(self._spec.extensions)}"
            )
        return sorted(audio, key=lambda entry: entry[0])

    def _has_extension(self, name: str) -> bool:
        return PurePosixPath(name).suffix.lower().lstrip(".") in self._spec.extensions

    def _item(self, position: int, name: str, info: dict[str, Any]) -> Item:
        path = f"{self._root.rstrip('/')}/{name}"
        stat = stat_fields(info)
        size = stat["size"] or 0
        seconds = None
        if isinstance(self._fs, LocalFileSystem):
            seconds = header_seconds(path, size)
        return Item(
            row_id=name,
            uri=public_uri(self._fs, path),
            seconds=seconds if seconds is not None else guess_seconds(name, size),
            position=position,
            **stat,
        )

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        return fetch_all(items, lambda uri: self._spec.storage_options)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "files",
            "uri": self._spec.uri,
            "root": public_uri(self._fs, self._root),
            "glob": self._glob,
            "extensions": list(self._spec.extensions),
        }


def _literal(name: str) -> str:
    """A glob that matches exactly `name`."""
    return MAGIC_CHARACTERS.sub(lambda match: f"[{match[0]}]", name)
