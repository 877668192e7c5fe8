"""Samples in a tar: members that follow each other and share a name up to the first dot.

That is WebDataset's rule (`webdataset.tariterators`): `spk1/utt7.flac`, `spk1/utt7.json` are sample
`spk1/utt7`. Nothing is ever unpacked to a path, so a member's name is a name and no more; links and
devices are no samples.
"""

from __future__ import annotations

import re
import tarfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.common.text import one_line
from earmill.pipeline.common.untrusted import MAX_HELD_BYTES, MEMBER, loads_json, tar_members
from earmill.pipeline.sources.base import Scalar, as_text
from earmill.pipeline.sources.scalars import INTEGER, public_value, scalar

METADATA = re.compile(r"__[^/]*__($|/)")
COLUMN_MEMBERS = ("json", "cls", "txt")
NO_SAMPLE = "no sample"

Seconds = Callable[[str, BinaryIO, int], tuple[float, bool]]


@dataclass(slots=True)
class Sample:
    """One sample as the headers describe it.

    Args:
        raw_key: The name its members share, as the tar has it.
        key: The same as text.
        columns: What its `json`, `cls` and `txt` members say.
        audio: Suffix of each audio member to its header.
        seconds: Expected duration of the first of these. estimated: From its bytes alone.
        problem: Why it cannot be processed; None where it can.
    """

    raw_key: str
    columns: dict[str, Any] = field(default_factory=dict)
    audio: dict[str, tarfile.TarInfo] = field(default_factory=dict)
    seconds: float | None = None
    estimated: bool = False
    problem: str | None = None
    suffixes: set[str] = field(default_factory=set)

    @property
    def key(self) -> str:
        return as_text(self.raw_key)

    def chosen(self, suffix: str | None) -> tarfile.TarInfo | None:
        """The audio member of this suffix, or the only one; None, with a problem, without it."""
        found = (
            self.audio if suffix is None else {k: v for k, v in self.audio.items() if k == suffix}
        )
        if self.problem is None and len(found) != 1:
            wanted = "one audio member" if suffix is None else f"an audio member .{suffix}"
            hint = "; choose one by source.audio" if found else ""
            got = ", ".join(sorted(self.audio if found else self.suffixes)) or "none"
            self.problem = f"expected {wanted}, got {got}{hint}"
        return None if self.problem is not None else next(iter(found.values()))


class Samples:
    """The samples of one tar; iterate once.

    Args:
        stream: The tar, seekable.
        name: How messages call it.
        extensions: Which suffixes are audio.
        seconds: Of an audio member by suffix, stream and bytes; and whether that is estimated.
    Attributes:
        skipped: Members that belong to no sample's audio or columns, by suffix.
    Raises:
        SourceError: The tar is damaged, or a key comes twice; while iterating.
    """

    def __init__(
        self, stream: BinaryIO, name: str, extensions: Collection[str], seconds: Seconds
    ) -> None:
        self._stream, self._name, self._extensions = stream, name, extensions
        self._seconds = seconds
        self.skipped: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Sample]:
        seen: set[str] = set()
        current: Sample | None = None
        for tar, member in self._members():
            found = MEMBER.fullmatch(member.name.removeprefix("./"))
            if found is None or METADATA.match(member.name) or not _is_plain(member):
                self.skipped[NO_SAMPLE] += not member.isdir()
                continue
            key, suffix = found[1], as_text(found[2].lower())
            if current is None or key != current.raw_key:
                if current is not None:
                    yield current
                if key in seen:
                    raise self._refused(
                        f"the members of {as_text(key)!r} do not follow each other, or two samples "
                        "are called so; sort the tar by name or rename one"
                    )
                seen.add(key)
                current = Sample(key)
            self._add(current, suffix, tar, member)
        if current is not None:
            yield current

    def _members(self) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
        try:
            yield from tar_members(self._stream)
        except tarfile.TarError as error:
            raise self._refused(f"expected a whole, uncompressed tar: {error}") from error

    def _add(
        self, sample: Sample, suffix: str, tar: tarfile.TarFile, member: tarfile.TarInfo
    ) -> None:
        if suffix in sample.suffixes:
            raise self._refused(f"{sample.key!r} has two members .{suffix}; rename one of them")
        sample.suffixes.add(suffix)
        if suffix.rpartition(".")[2] in self._extensions:
            if not sample.audio:
                with _content(tar, member) as stream, suppress(tarfile.ReadError):
                    found = self._seconds(suffix, stream, member.size)
                    sample.seconds, sample.estimated = found
            sample.audio[suffix] = member
        elif suffix in COLUMN_MEMBERS:
            self._add_columns(sample, suffix, tar, member)
        else:
            self.skipped[PurePosixPath(f".{suffix}").suffix or f".{suffix}"] += 1

    def _add_columns(
        self, sample: Sample, suffix: str, tar: tarfile.TarFile, member: tarfile.TarInfo
    ) -> None:
        if member.size > MAX_HELD_BYTES:
            sample.problem = f"expected .{suffix} of at most 1 MB, got {member.size:,} bytes"
            return
        with _content(tar, member) as stream:
            content = stream.read()
        try:
            columns = _columns(suffix, content.decode("utf-8"))
        except ValueError as error:
            sample.problem = f"its .{suffix} cannot be read: {one_line(error)}"
            return
        twice = sorted(columns.keys() & sample.columns.keys())
        if twice:
            sample.problem = f"two of its members have a column {twice[0]!r}; rename one of them"
        sample.columns |= columns

    def _refused(self, why: str) -> SourceError:
        return SourceError(f"source {self._name}: {why}")


def _columns(suffix: str, text: str) -> dict[str, Scalar]:
    """The columns of one member: a JSON mapping's own, else one of the member's suffix."""
    if suffix == "json":
        found = loads_json(text)
        cells = found if isinstance(found, dict) else {suffix: found}
    elif suffix == "cls" and INTEGER.fullmatch(text.strip()):
        cells = {suffix: int(text)}
    else:
        cells = {suffix: text.strip() if suffix == "cls" else text}
    return {public_value(name): public_value(scalar(cell)) for name, cell in cells.items()}


def key_of(member: tarfile.TarInfo) -> str | None:
    """The key of the sample that a member belongs to."""
    found = MEMBER.fullmatch(member.name.removeprefix("./"))
    return None if found is None else as_text(found[1])


def _is_plain(member: tarfile.TarInfo) -> bool:
    """Whether a member's bytes lie in the tar as they are."""
    return member.isreg() and not member.issparse()


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> BinaryIO:
    stream: Any = tar.extractfile(member)
    return stream
