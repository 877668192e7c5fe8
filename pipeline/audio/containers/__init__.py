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
from earmill.pipeline.audio.containers.compressed import (
    ADTS,
    AMR_MAGIC,
    ASF,
    EBML,
    MP4_FIRST,
    probe_ac3,
    probe_amr,
    probe_asf,
    probe_matroska,
    probe_mp4,
)
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
    RIFF_NAMES,
    W64_RIFF,
    probe_aiff,
    probe_au,
    probe_caf,
    probe_nist,
    probe_riff,
    probe_w64,
)

__all__ = ["Probe", "probe"]

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
    (lambda head: head[:4] in RIFF_NAMES and head[8:12] == b"WAVE", probe_riff),
    (lambda head: head == W64_RIFF, probe_w64),
    (lambda head: head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"), probe_aiff),
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
    ("mp4", lambda head: head[4:8] in MP4_FIRST, partial(_in_a_row, probe_mp4)),
    ("ogg", lambda head: head[:4] == OGG, probe_ogg),
    ("wavpack", lambda head: head[:4] == WAVPACK, probe_wavpack),
    ("amr", lambda head: head.startswith(tuple(AMR_MAGIC)), probe_amr),
)


def probe(
    stream: BinaryIO, nbytes: int, *, header_only: bool = False, behind: bool = True
) -> Probe:
    """Read the container's bookkeeping behind the tags in front; the stream position is lost.

    Args:
        stream: Seekable bytes.
        nbytes: Size of the file.
        header_only: Read nothing that needs a walk over the file.
        behind: Look at the bytes behind the samples as well.
    """
    start = skip_tags(stream)
    if start >= nbytes:
        damage = f"tags of {start} bytes before the audio, in a file of {nbytes}" if start else None
        return Probe("other", damage=damage)
    found = _probe(open_window(stream, start), nbytes - start, header_only, behind)
    return _moved(found, start)


def _probe(stream: BinaryIO, nbytes: int, header_only: bool, behind: bool) -> Probe:
    head = read_at(stream, 0, HEAD_BYTES)
    for is_one, walk in SIZED:
        if is_one(head):
            return walk(stream, nbytes, behind=behind)
    for kind, is_one, walk in WALKED:
        if is_one(head):
            return Probe(kind) if header_only else walk(stream, nbytes)
    if header_only:
        return Probe("other")
    frames = ADTS.probe(stream, nbytes) or probe_ac3(stream, nbytes)
    return frames or probe_mpeg(stream, nbytes) or Probe("other")
