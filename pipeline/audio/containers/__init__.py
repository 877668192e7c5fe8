"""Bookkeeping of containers, which their decoders do not report.

libsndfile shortens most cut files silently. It believes sizes that cannot be right, and reads only
the first link of a chained Ogg. It guesses the length of an MP3 that has no frame count; for
variable bit rates the guess may be off by any factor, and the rest of the file is lost. `probe`
reads the container's own bookkeeping, one module for each family, and never decodes a sample. It
may import nothing of the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

from earmill.pipeline.audio.containers.base import MAX_PARTS, Probe, open_window, read_at, skip_tags
from earmill.pipeline.audio.containers.boxes import (
    ASF,
    EBML,
    is_mp4,
    probe_asf,
    probe_matroska,
    probe_mp4,
)
from earmill.pipeline.audio.containers.frames import ADTS, is_amr, probe_ac3, probe_amr
from earmill.pipeline.audio.containers.lossless import (
    FLAC,
    TTA,
    WAVPACK,
    probe_flac,
    probe_tta,
    probe_wavpack,
)
from earmill.pipeline.audio.containers.mpeg import probe_mpeg
from earmill.pipeline.audio.containers.ogg import OGG, probe_ogg
from earmill.pipeline.audio.containers.pcm import (
    W64_RIFF,
    is_aiff,
    is_riff,
    probe_aiff,
    probe_au,
    probe_caf,
    probe_nist,
    probe_riff,
    probe_w64,
)

__all__ = ["Probe", "probe", "probe_header"]

HEAD_BYTES = 16

Walk = Callable[..., Any]


def _moved(found: Probe, by: int) -> Probe:
    return replace(
        found,
        start=found.start + by,
        stop=None if found.stop is None else found.stop + by,
        parts=tuple(_moved(part, by) for part in found.parts),
    )


def _in_a_row(walk: Walk, stream: BinaryIO, nbytes: int) -> Probe:
    """Probe joined files of one kind: each file ends where the next one begins."""
    parts: list[Probe] = []
    start = 0
    while start < nbytes and len(parts) < MAX_PARTS:
        found = walk(open_window(stream, start), nbytes - start)
        parts.append(_moved(found, start))
        start = parts[-1].stop or nbytes
    if len(parts) == 1:
        return parts[0]
    damage = next((part.damage for part in parts if part.damage), None)
    return Probe(parts[0].kind, damage=damage, parts=tuple(parts))


# Containers whose header states a size. It is compared with the bytes that are there.
SIZED: tuple[tuple[Callable[[bytes], bool], Walk], ...] = (
    (is_riff, probe_riff),
    (lambda head: head == W64_RIFF, probe_w64),
    (is_aiff, probe_aiff),
    (lambda head: head[:4] == b"caff", probe_caf),
    (lambda head: head[:4] in (b".snd", b"dns."), probe_au),
    (lambda head: head[:8] == b"NIST_1A\n", probe_nist),
)
# Containers that need a walk over the file, by kind.
WALKED: tuple[tuple[str, Callable[[bytes], bool], Walk], ...] = (
    ("flac", lambda head: head[:4] == FLAC, probe_flac),
    ("tta", lambda head: head[:4] == TTA, probe_tta),
    ("asf", lambda head: head == ASF, partial(_in_a_row, probe_asf)),
    ("matroska", lambda head: head[:4] == EBML, partial(_in_a_row, probe_matroska)),
    ("mp4", is_mp4, partial(_in_a_row, probe_mp4)),
    ("ogg", lambda head: head[:4] == OGG, probe_ogg),
    ("wavpack", lambda head: head[:4] == WAVPACK, probe_wavpack),
    ("amr", is_amr, probe_amr),
)


def probe(stream: BinaryIO, nbytes: int) -> Probe:
    """Read the container's whole bookkeeping; the stream position is lost."""
    return _behind_tags(stream, nbytes, _probe)


def probe_header(stream: BinaryIO, nbytes: int, *, behind: bool = True) -> Probe:
    """Read the container's header, and nothing that needs a walk over the file.

    Args:
        stream: Seekable bytes.
        nbytes: Size of the file.
        behind: Look at the bytes behind the samples as well.
    """
    return _behind_tags(stream, nbytes, partial(_probe_header, behind=behind))


def _behind_tags(stream: BinaryIO, nbytes: int, walk: Callable[[BinaryIO, int], Probe]) -> Probe:
    """Probe the bytes behind the tags in front; positions count from the start of the stream."""
    start = skip_tags(stream)
    if start >= nbytes:
        damage = f"tags of {start} bytes before the audio, in a file of {nbytes}" if start else None
        return Probe("other", damage=damage)
    return _moved(walk(open_window(stream, start), nbytes - start), start)


def _probe(stream: BinaryIO, nbytes: int) -> Probe:
    head = read_at(stream, 0, HEAD_BYTES)
    if (sized := _sized(stream, head, nbytes)) is not None:
        return sized
    for _, is_one, walk in WALKED:
        if is_one(head):
            return walk(stream, nbytes)
    frames = ADTS.probe(stream, nbytes) or probe_ac3(stream, nbytes)
    return frames or probe_mpeg(stream, nbytes) or Probe("other")


def _probe_header(stream: BinaryIO, nbytes: int, *, behind: bool) -> Probe:
    head = read_at(stream, 0, HEAD_BYTES)
    kinds = (kind for kind, is_one, _ in WALKED if is_one(head))
    return _sized(stream, head, nbytes, behind=behind) or Probe(next(kinds, "other"))


def _sized(stream: BinaryIO, head: bytes, nbytes: int, *, behind: bool = True) -> Probe | None:
    for is_one, walk in SIZED:
        if is_one(head):
            return walk(stream, nbytes, behind=behind)
    return None
