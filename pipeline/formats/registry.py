"""The formats that are installed, by name: the entry points of `earmill.formats`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from earmill.pipeline.common.errors import ExtensionError, SpecError
from earmill.pipeline.common.extension_points import FORMATS
from earmill.pipeline.common.text import alternatives
from earmill.pipeline.formats.digest import ShardDigest
from earmill.pipeline.formats.dtypes import as_stored
from earmill.pipeline.formats.format import Encoding, Format, format_name
from earmill.pipeline.formats.row_table import row_table, write_table
from earmill.pipeline.formats.stream_layout import SCALED
from earmill.pipeline.storage.paths import is_suffix

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo

__all__ = [
    "Encoding",
    "Format",
    "check_formats",
    "chosen",
    "format_of",
    "installed",
    "read_back",
    "row_table",
    "stored_streams",
    "write_table",
]


def format_of(name: str) -> Format:
    """Return the format of a name.

    Raises:
        ExtensionError: None is installed under it, or it is not what the group's entry points
            lead to.
    """
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
    """Return the formats that can be loaded here."""
    found = {}
    for name in names:
        try:
            found[name] = format_of(name)
        except ExtensionError:
            continue
    return found


def chosen(names: Sequence[str], wanted: str | None, writers: Mapping[str, str]) -> str:
    """Choose the format in which a dataset is read: the wanted one, else the best that works here.

    Args:
        names: In which the dataset is stored.
        writers: Format to the distribution that wrote it, as far as that is known.
    Raises:
        ValueError: The dataset is not stored so. ExtensionError: It is, but nothing here reads it.
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
    """Refuse formats that one dataset cannot have, before any work.

    Raises:
        ExtensionError: One of them is not usable. SpecError: Two would write the same file.
    """
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
    """Return the descriptions of streams as a new dataset stores them.

    Args:
        streams: As models describe them.
        dtype: Type of the job.
        formats: Of the job. Where one of them has no scales, streams with a scale have the layout
            `scaled`, which releases that do not know it refuse.
    """
    known = as_stored(streams, dtype)
    if all(format_of(name).has_scales for name in formats):
        return known
    return [replace(info, layout=SCALED) if info.scale_factor != 1.0 else info for info in known]


def read_back(fmt: str, path: Path, streams: Sequence[StreamInfo]) -> ShardDigest:
    """Read an encoded shard back and return the digest of its contents."""
    return format_of(fmt).digest(path, streams)
