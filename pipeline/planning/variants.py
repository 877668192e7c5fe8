"""Variants of every row of a source, planned beside the clean row; see `spec.variants`.

Each listing reads, hashes and decodes every file of noise and every impulse response once. So a bad
file ends a job before its work, and the plan names the bytes that each variant needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

from earmill.pipeline.audio.decode import BlockReader, Blocks
from earmill.pipeline.audio.decoder_pool import DecoderPool
from earmill.pipeline.audio.variants import Recording, generator
from earmill.pipeline.common.byte_streams import digest_of
from earmill.pipeline.common.errors import NotAudioError, RowError, SourceError
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.sources.base import Variant, listing
from earmill.pipeline.spec.source import FilesSpec
from earmill.pipeline.spec.variants import VariantsSpec


class File(NamedTuple):
    uri: str | None = None
    sha256: str | None = None


def with_variants(
    items: Iterator[Item], variants: VariantsSpec, *, ears: int, in_child: bool
) -> Iterator[Item]:
    """Yield the rows of a listing, each with its variants behind it. `ears` are the most channels
    of an impulse response; `in_child` decodes recordings in a child process."""
    with closing(DecoderPool()) as children:
        opened: Callable[..., Blocks] = children.open if in_child else BlockReader
        files = []
        for variant in variants.of:
            noise = None if variant.noise is None else variant.noise.uri
            room, name = variant.impulse_response, variant.name
            noises = _checked(f"noise.uri of {name!r}", noise, opened, "mean", 1)
            rooms = _checked(f"impulse_response of {name!r}", room, opened, "each", ears)
            files.append((noises, rooms))
    for item in items:
        yield item
        for variant, (noises, rooms) in zip(variants.of, files, strict=True):
            random = generator(variants.seed, item.row_id, variant.name)
            first, second, _ = random.random(3)
            drawn = (*_drawn(noises, float(first)), *_drawn(rooms, float(second)))
            yield replace(
                item,
                row_id=f"{item.row_id}@{variant.name}",
                seconds=None if item.seconds is None else item.seconds / (variant.speed or 1),
                variant=Variant(variant.name, item.row_id, *drawn),
            )


def _checked(
    where: str, uri: str | None, opened: Callable[..., Blocks], channels: str, most: int
) -> list[File]:
    """Return the recordings at a place in the order of their names; SourceError if a recording is
    missing, silent or no audio, or if it has more than `most` channels."""
    found = list[File]()
    if uri is None:
        return found
    try:
        source = open_source(FilesSpec(kind="files", uri=uri, storage_options={}))
        for item, stream in source.fetch(list(listing(source))):
            if isinstance(stream, RowError):
                raise stream
            sha256 = digest_of(stream)
            got = len(Recording.read(opened, stream, item.uri, channels).samples)
            if got > most:
                raise NotAudioError(
                    f"{item.uri}: expected one channel, or two with channels: binaural, got {got}"
                )
            found.append(File(item.uri, sha256))
    except (SourceError, RowError) as error:
        why = str(error)
        if isinstance(error.__cause__, FileNotFoundError):
            why = f"{uri}: expected a file or a folder of audio, there is none"
        raise SourceError(f"audio.variants, {where}: {why}") from error
    return found


def _drawn(files: list[File], choice: float) -> File:
    """Return one of the files, or an empty name; `choice` is from 0 to 1."""
    return files[int(choice * len(files))] if files else File()
