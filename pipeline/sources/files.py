"""A folder, a bucket prefix or a glob of audio files, local or behind any fsspec URI.

Rows are sorted by path. The row id is the path below the root, so a corpus that moves keeps its
ids. Durations come from local headers, or from sizes if a header would cost a request.

`walk` lists every file below a local folder once. It follows links to folders, which fsspec does
not, after the real folders, so a row has its real path as its name if it has one. A link to a
folder that holds the root is not followed: it would lead back, and to everything outside.
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import glob_translate

from earmill.pipeline.common.errors import RowError, SourceError
from earmill.pipeline.sources import base
from earmill.pipeline.sources.base import Fetched, Item, Source
from earmill.pipeline.sources.durations import guess_seconds, header_seconds, suffix_of
from earmill.pipeline.sources.fetch import fetch_rows, open_ranged
from earmill.pipeline.spec.source import FilesSpec
from earmill.pipeline.storage.fsspec_store import MAGIC_CHARACTERS

HIDDEN = "hidden"
NO_EXTENSION = "no extension"
BLANK_ROW = "blank row"  # A blank row of a table, counted like a skipped file.
# Clients of some stores cut names at these characters, see `asks_for_another`.
CUT_CHARACTERS = re.compile(r"[\x00-\x1f?#]|/$")
UNREACHABLE = "unreachable name"

Entry = tuple[str, dict[str, Any]]


def walk(root: str, *, hidden: bool = False) -> tuple[list[Entry], int]:
    """Return the files below a local folder, and the number of hidden files and folders that were
    left out, unless `hidden`."""
    entries = list[Entry]()
    left_out = 0
    seen = set(map(_identity, Path(root).resolve().parents))
    links = [(root, "")]

    def is_kept(name: str) -> bool:
        nonlocal left_out
        is_shown = hidden or not name.startswith(".")
        left_out += not is_shown
        return is_shown

    def fail(error: OSError) -> None:
        raise error

    while links:
        links.sort(reverse=True)
        top, prefix = links.pop()
        for folder, folders, files in os.walk(top, onerror=fail):
            if (identity := _identity(folder)) in seen:
                folders.clear()
                continue
            seen.add(identity)
            below = prefix + f"{folder}/".removeprefix(top).lstrip("/")
            folders[:] = filter(is_kept, folders)
            for name in folders:
                if os.path.islink(path := os.path.join(folder, name)):
                    links.append((path, f"{below}{name}/"))
            for name in filter(is_kept, files):
                entries.append((below + name, file_info(os.path.join(folder, name))))
    return entries, left_out


def _identity(path: str | Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


def file_info(path: str) -> dict[str, Any]:
    """Return size and time of a regular file; empty for others, and for broken links."""
    try:
        found = os.stat(path)
    except OSError:
        return {}
    return {"size": found.st_size, "mtime": found.st_mtime} if stat.S_ISREG(found.st_mode) else {}


def is_hidden(name: str) -> bool:
    """Return True if a part of a path below the root begins with a dot."""
    return any(part.startswith(".") for part in name.split("/"))


def by_extension(names: Iterable[str]) -> Counter[str]:
    return Counter(PurePosixPath(name).suffix.lower() or NO_EXTENSION for name in names)


class FilesSource(Source):
    """Audio files below one root."""

    def __init__(self, spec: FilesSpec) -> None:
        self._spec = spec
        with base.source_errors(spec.uri):
            self._fs, path = base.filesystem(spec.uri, spec.storage_options)
            self._single: Entry | None = None
            self._root, self._glob = base.retry_listing(lambda: self._split(path))
        self._found, self._skipped = 1, Counter[str]()

    def _split(self, path: str) -> tuple[str, str]:
        """Return the root folder and the glob below it."""
        path = path.rstrip("/") or "/"
        self._fs.invalidate_cache()
        if self._fs.exists(path):
            if self._fs.isfile(path):
                folder, _, name = path.rpartition("/")
                if isinstance(self._fs, LocalFileSystem):
                    folder, info = folder.rstrip("/"), file_info(path)
                else:
                    info = dict(self._fs.info(path))
                self._single = name, info
                # A glob that matches only this name.
                literal = MAGIC_CHARACTERS.sub(lambda match: f"[{match[0]}]", name)
                return folder or "/", literal
            return path, self._spec.glob
        parts = path.split("/")
        magic = [index for index, part in enumerate(parts) if MAGIC_CHARACTERS.search(part)]
        if magic:
            root = "/".join(parts[: magic[0]]) or "/"
            if self._fs.exists(root):
                return root, "/".join(parts[magic[0] :])
        raise FileNotFoundError(path)

    def items(self) -> Iterator[Item]:
        return self._listed(measured=isinstance(self._fs, LocalFileSystem))

    def listing(self) -> Iterator[Item]:
        """Yield the rows with durations estimated from sizes; no file is opened."""
        return self._listed(measured=False)

    def _listed(self, *, measured: bool) -> Iterator[Item]:
        with base.source_errors(self._spec.uri):
            found = self._matching(base.retry_listing(self._listing))
        row_ids = base.row_names([name for name, _ in found])
        # The folder of a single key may end in `/`: `a//b.wav`.
        is_key = self._single is not None and self._root != "/"
        folder = self._root if is_key else self._root.rstrip("/")
        for position, (row_id, (name, info)) in enumerate(zip(row_ids, found, strict=True)):
            path, stat = f"{folder}/{name}", base.stat_fields(info)
            size = stat["size"] or 0
            seconds = header_seconds(path, size) if measured else None
            yield Item(
                row_id=row_id,
                uri=base.public_uri(self._fs, path),
                seconds=guess_seconds(name, size) if seconds is None else seconds,
                estimated=seconds is None,
                position=position,
                **stat,
            )

    def skipped(self) -> dict[str, int]:
        """Return the files of the last listing that are no rows: counts by reason."""
        return dict(+self._skipped)

    def _listing(self) -> list[Entry]:
        """Return the entries that match the glob; hidden files only if the glob names them."""
        pattern = re.compile(glob_translate(self._glob))
        hidden = is_hidden(self._glob)
        if self._single is not None:
            return [self._single]
        if isinstance(self._fs, LocalFileSystem):
            listing, left_out = walk(self._root, hidden=hidden)
            self._skipped = Counter({HIDDEN: left_out})
        else:
            listing = self._remote_listing(hidden)
        self._found = len(listing)
        # Globs match a key without its empty parts: `a//b` as `a/b`.
        plain = ("/".join(filter(None, name.split("/"))) for name, _ in listing)
        return [entry for entry, name in zip(listing, plain, strict=True) if pattern.match(name)]

    def _remote_listing(self, hidden: bool) -> list[Entry]:
        self._fs.invalidate_cache(self._root)
        self._skipped = Counter()
        prefix = self._root.rstrip("/") + "/"
        listing: dict[str, dict[str, Any]] = self._fs.find(self._root, detail=True)
        shown = []
        for path, info in listing.items():
            name = path.removeprefix(prefix)
            if name.endswith("/") and not info.get("size"):
                continue  # the mark of an empty folder
            if is_hidden(name) and not hidden:
                self._skipped[HIDDEN] += 1
            elif not self._is_reachable(path):
                self._skipped[UNREACHABLE] += 1
            else:
                shown.append((name, info))
        return shown

    def _is_reachable(self, path: str) -> bool:
        """Return True if a worker can ask for an object of the store by its uri."""
        if CUT_CHARACTERS.search(path) is None:
            return True
        try:
            uri = base.public_uri(self._fs, path)
            return base.object_of(uri, self._spec.storage_options, versions=False)[1] == path
        except RowError:
            return False

    def _matching(self, matched: list[Entry]) -> list[Entry]:
        audio, others = [], list[str]()
        for entry in matched:
            if suffix_of(entry[0]) in self._spec.extensions:
                audio.append(entry)
            else:
                others.append(entry[0])
        if not audio:
            raise SourceError(
                f"source {self._spec.uri}: no audio files: {self._found} found, {len(matched)} "
                f"match {self._glob!r}, none ends in {', '.join(self._spec.extensions)}"
            )
        self._skipped += by_extension(others)
        return sorted(audio, key=lambda entry: entry[0])

    def fetch(self, items: Sequence[Item]) -> Iterator[Fetched]:
        return fetch_rows(items, lambda uri: self._spec.storage_options)

    def open_ranged(self, item: Item) -> BinaryIO | None:
        return open_ranged(item, self._spec.storage_options)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "files",
            "uri": self._spec.uri,
            "root": base.public_uri(self._fs, self._root),
            "glob": self._glob,
            "extensions": list(self._spec.extensions),
        }
