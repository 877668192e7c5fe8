"""The interface of a format of data files, the installed formats, and a commit's claims of a file.

A format is registered in the entry points of `earmill.formats`. It writes a shard into a private
local folder; equal rows give equal bytes, so a file has no time, host or random value. It reads its
own file back as a `ShardDigest`, which must equal the digest of the rows. It also gives random
access to the frames of a published file. Anybody may have made a dataset, so a reader compares the
sizes, types and codecs of a file with its `Promise` before it takes memory or runs a decoder.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.byte_streams import sha256_of
from earmill.pipeline.common.errors import (
    CommitError,
    ExtensionError,
    MissingPackageError,
    SpecError,
)
from earmill.pipeline.common.extension_points import FORMATS
from earmill.pipeline.common.missing_modules import missing_package
from earmill.pipeline.common.text import alternatives, named_line
from earmill.pipeline.formats.block_cache import BlockCache, ShardReader
from earmill.pipeline.formats.digest import ShardDigest, differences
from earmill.pipeline.formats.rows import FeatureRow, OutFile
from earmill.pipeline.formats.stream_layout import SCALED, StreamLayout, layout_of
from earmill.pipeline.formats.values import as_stored
from earmill.pipeline.storage.layout import Layout, StoredFile
from earmill.pipeline.storage.paths import is_suffix


@dataclass(frozen=True)
class Promise:
    """The contents of a data file as its commit and dataset.json state them.

    Args:
        rows: Good rows of the shard.
        frames: Stream name to frames in the shard.
        columns: Stream name to (width, dtype name) on disk.
        files: Every file of the shard by its path.
        said: The shard's rows in the dataset's index, None if there is no index. They are used
            only where they are proved to be what was committed.
    """

    rows: int
    frames: Mapping[str, int]
    columns: Mapping[str, tuple[int, str]]
    files: Mapping[str, OutFile]
    said: pa.Table | None = field(default=None, compare=False)

    def file(self, layout: Layout, rel: str) -> StoredFile:
        """Return a committed file of the shard; a CommitError if the commit does not name it."""
        named = self.files.get(rel)
        if named is None:
            raise CommitError(f"{layout.url(rel)} is missing from the commit; run `earmill verify`")
        return StoredFile(layout, rel, named.bytes, named.sha256)


@contextmanager
def explain_damage(
    where: str, file: str, is_whole: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Turn errors of decoders on damaged bytes into one line that names row and file. Errors of the
    system (no right, no network) pass unchanged, except a missing file. If `is_whole` returns True,
    the file holds the committed bytes, and a program is at fault."""
    try:
        yield
    except (CommitError, MissingPackageError) as err:
        raise type(err)(f"{where}: {err}") from err
    except ImportError as err:
        raise missing_package(err, where) from err
    except MemoryError:
        raise
    # Decoders have classes of their own for damaged bytes.
    except Exception as err:
        is_system_error = isinstance(err, OSError) and err.errno is not None
        if is_system_error and not isinstance(err, FileNotFoundError):
            raise
        if is_whole():
            raise CommitError(
                f"{where}: {file} holds what was committed, yet it cannot be read here "
                f"({named_line(err)}); this is a fault of a program, not of the file: run `earmill "
                "doctor`, and report it"
            ) from err
        raise CommitError(
            f"{where}: {file} is missing or damaged although it is committed "
            f"({named_line(err)}); run `earmill verify`"
        ) from err


def is_as_committed(layout: Layout, rel: str, promise: Promise) -> bool:
    """Return True if the files of a shard in one format hold the committed bytes."""
    named = [file for path, file in promise.files.items() if f"{path}/".startswith(f"{rel}/")]
    try:
        for file in named:
            with layout.open_file(file.path) as stream:
                if sha256_of(stream) != file.sha256:
                    return False
    except (OSError, ValueError):
        return False
    return bool(named)


def refused(place: str, why: str) -> CommitError:
    return CommitError(
        f"{place}: {why}; the file is damaged or not what was committed: run `earmill verify`"
    )


OTHER_PARTS = ("rows", "quarantine")  # Parts of a shard other than its data.
# Encodings of a cell in a Parquet file, see `formats.parquet.format`.
BINARY, NESTED = "binary", "nested"
_NAME = re.compile(r"[a-z][a-z0-9_-]*")


@dataclass(frozen=True)
class Encoding:
    """Settings for the files of one dataset.

    Args:
        dtype: Dtype of the job and of `rows`: float16, float32 or int8. Events are int32.
        row_group_profile: For formats of row groups; random (small ones) or scan (large ones).
        extra_types: Carried-through column to its type, see `common.arrow_types`. Give it for the
            whole plan, or a column that is empty in one shard changes its type in the next.
        attrs: Stored in every file; must be the same for every attempt of a shard.
        parquet_form: Form of a stream's cell in Parquet: binary, or nested lists.
    """

    dtype: str = "float16"
    row_group_profile: str = "random"
    extra_types: Mapping[str, Any] | None = None
    attrs: Mapping[str, Any] | None = None
    parquet_form: str = BINARY


class Format(ABC):
    """One way to store the shards of a dataset; its entry point leads to an instance.

    Attributes:
        suffix: End of a shard's file or folder, with its dot; no other format of a dataset has it.
        media_type: For croissant.json.
        summary: Description and purpose, one line.
        integrity: Checks that detect a changed byte when a row is read, one line.
        is_folder: A shard is a folder of files, not one file.
        reads_parts: Frames of a row are read without reading the whole row; such a format is the
            first choice of a reader.
        is_table: A file is a table that Croissant and `datasets.load_dataset` read, with the
            streams as columns.
        has_scales: Readers other than ours multiply what a file holds by its `scale_factor`. A
            format without scales stores the values of scaled streams, see `layout_of`.
    """

    suffix: ClassVar[str]
    media_type: ClassVar[str] = "application/octet-stream"
    summary: ClassVar[str]
    integrity: ClassVar[str]
    is_folder: ClassVar[bool] = False
    reads_parts: ClassVar[bool] = False
    is_table: ClassVar[bool] = False
    has_scales: ClassVar[bool] = True

    def layout_of(self, info: StreamInfo | Mapping[str, Any]) -> StreamLayout:
        """Return the layout of a stream in files of this format."""
        layout = layout_of(info)
        return layout if self.has_scales else layout.in_values()

    @abstractmethod
    def write(
        self,
        path: Path,
        rows: Sequence[FeatureRow],
        streams: Sequence[StreamInfo],
        encoding: Encoding,
    ) -> None:
        """Write the rows as a new file or folder; its parent is there.

        Raises:
            CommitError: The rows cannot be stored so.
        """

    @abstractmethod
    def digest(self, path: Path, streams: Sequence[StreamInfo]) -> ShardDigest:
        """Read back a file that `write` made, and return the digest of its contents."""

    def problems(
        self,
        path: Path,
        rows: Sequence[FeatureRow],
        streams: Sequence[StreamInfo],
        expected: ShardDigest,
    ) -> list[str]:
        """Return the differences of a file, which `write` made, to its rows, a line each.

        Overwrite it where values can be compared without hashing them once more.

        Args:
            expected: The digest of the rows.
        """
        return differences(expected, self.digest(path, streams))

    @abstractmethod
    def open(self, layout: Layout, rel: str, promise: Promise, cache: BlockCache) -> ShardReader:
        """Open a published shard for random access.

        Args:
            rel: Its file or folder in the dataset, which may be remote.
            promise: The contents that were committed, which it is checked against.
            cache: For decoded blocks, by keys that begin with `rel`.
        Raises:
            CommitError: It is not what was promised. Any other error counts as damage.
        """

    def objects(
        self, stored_rows: Mapping[str, int], streams: Sequence[StreamInfo], dtype: str
    ) -> int:
        """Return the number of files of one shard, for `earmill plan`.

        Args:
            stored_rows: Stream name to frames or events in the shard.
            dtype: Dtype of the job.
        """
        return 1

    def reading(self, paths: Sequence[str]) -> Sequence[str]:
        """Return Python code for the card that reads these shards without earmill, or nothing."""
        return ()


def format_name(name: str) -> str:
    """Return the name of a format, installed here or not; a ValueError for any other text."""
    if not _NAME.fullmatch(name) or name in OTHER_PARTS:
        raise ValueError(f"expected the name of a format, as zarr, got {name!r}")
    return name


def format_of(name: str) -> Format:
    """Return the format of a name; an ExtensionError if no `Format` is installed under it."""
    found = FORMATS.load(name)
    if not isinstance(found, Format):
        raise ExtensionError(
            f"format {name!r} of {FORMATS.owner(name)}: expected its entry point to lead to a "
            f"Format, got {type(found).__name__}"
        )
    suffix = getattr(found, "suffix", None)
    if not (isinstance(suffix, str) and is_suffix(suffix)):
        raise ExtensionError(
            f"format {name!r} of {FORMATS.owner(name)}: expected a suffix like '.tar', got "
            f"{suffix!r}"
        )
    return found


def installed(names: Iterable[str]) -> dict[str, Format]:
    found = {}
    for name in names:
        with suppress(ExtensionError):
            found[name] = format_of(name)
    return found


def chosen(names: Sequence[str], wanted: str | None, writers: Mapping[str, str]) -> str:
    """Choose the format in which a dataset is read: the wanted one, else the best that works here.

    ValueError if the dataset is not stored in the wanted format, ExtensionError if nothing here
    reads it. `writers` names the distributions that wrote formats, if known.
    """
    if wanted is not None and wanted not in names:
        raise ValueError(
            f"this feature set is stored as {list(names)}, got format={wanted!r}; "
            "leave it out to choose"
        )
    usable = installed(names)
    if wanted is None and usable:
        return max(usable, key=lambda name: usable[name].reads_parts)
    name = names[0] if wanted is None else wanted
    try:
        format_of(name)
    except ExtensionError as error:
        wrote = writers.get(name, f"the distribution that registers it in {FORMATS.group!r}")
        others = f", or read it as {alternatives([*usable])}" if usable else ""
        raise ExtensionError(
            f"this feature set is stored as {name!r}, which cannot be read here: install "
            f"{wrote}{others} ({error})"
        ) from error
    return name


def check_formats(names: Sequence[str]) -> None:
    """Refuse unusable formats (ExtensionError), and two that write the same file (SpecError)."""
    owners: dict[str, str] = {}
    for name in names:
        suffix = format_of(name).suffix
        try:
            format_name(name)
        except ValueError as error:
            raise ExtensionError(f"{FORMATS.owner(name)}: {error}") from error
        if suffix in owners:
            raise SpecError(
                f"output.formats: {owners[suffix]} and {name} both write {suffix} files; choose one"
            )
        owners[suffix] = name


def stored_streams(
    streams: Iterable[StreamInfo], dtype: str, formats: Iterable[str]
) -> list[StreamInfo]:
    """Return the streams as stored: streams with a scale are `scaled` if a format has no scales."""
    known = as_stored(streams, dtype)
    if all(format_of(name).has_scales for name in formats):
        return known
    return [replace(info, layout=SCALED) if info.scale_factor != 1.0 else info for info in known]
