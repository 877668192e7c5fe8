"""Bookkeeping of containers, which their decoders do not report.

The library libsndfile shortens most cut files silently, believes sizes that cannot be right, and
reads only the first link of a chained Ogg. It guesses the length of an MP3 that has no frame count.
The function `probe` reads the container's own bookkeeping, one module for each family, and never
decodes a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import BinaryIO

from earmill.pipeline.audio.containers import compressed, lossless, mpeg, ogg, pcm
from earmill.pipeline.audio.containers.base import MAX_PARTS, Probe, open_window, read_at, skip_tags

__all__ = ["Probe", "probe"]

HEAD_BYTES = 16

Walk = Callable[..., Probe]


# Containers whose header states a size. It is compared with the bytes that are there.
SIZED: tuple[tuple[Callable[[bytes], bool], Walk], ...] = (
    (lambda head: head[:4] in pcm.RIFF_NAMES and head[8:12] == b"WAVE", pcm.probe_riff),
    (lambda head: head == pcm.W64_RIFF, pcm.probe_w64),
    (lambda head: head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"), pcm.probe_aiff),
    (lambda head: head[:4] == b"caff", pcm.probe_caf),
    (lambda head: head[:4] in (b".snd", b"dns."), pcm.probe_au),
    (lambda head: head[:8] == b"NIST_1A\n", pcm.probe_nist),
)
# Containers that need a walk over the file, by kind.
WALKED: tuple[tuple[str, Callable[[bytes], bool], Walk], ...] = (
    ("flac", lambda head: head[:4] == lossless.FLAC, lossless.probe_flac),
    ("tta", lambda head: head[:4] == lossless.TTA, lossless.probe_tta),
    ("asf", lambda head: head == compressed.ASF, compressed.probe_asf),
    ("matroska", lambda head: head[:4] == compressed.EBML, compressed.probe_matroska),
    ("mp4", lambda head: head[4:8] in compressed.MP4_FIRST, compressed.probe_mp4),
    ("ogg", lambda head: head[:4] == ogg.OGG, ogg.probe_ogg),
    ("wavpack", lambda head: head[:4] == lossless.WAVPACK, lossless.probe_wavpack),
    ("amr", lambda head: head.startswith(tuple(compressed.AMR_MAGIC)), compressed.probe_amr),
)
# Kinds whose probe finds the end of a file if another file of the kind follows.
JOINED = frozenset({"asf", "matroska", "mp4"})


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
        parts.append(_moved(walk(open_window(stream, start), nbytes - start), start))
        start = parts[-1].stop or nbytes
    if len(parts) == 1:
        return parts[0]
    damage = next((part.damage for part in parts if part.damage), None)
    return Probe(parts[0].kind, damage=damage, parts=tuple(parts))


def probe(
    stream: BinaryIO, nbytes: int, *, header_only: bool = False, behind: bool = True
) -> Probe:
    """Read the container's bookkeeping behind the tags in front; the stream position is lost. With
    `header_only`, nothing is read that needs a walk over the file. With `behind`, the bytes behind
    the samples are looked at as well."""
    start = skip_tags(stream)
    if start >= nbytes:
        damage = f"tags of {start} bytes before the audio, in a file of {nbytes}" if start else None
        return Probe("other", damage=damage)
    found = _probe(open_window(stream, start), nbytes - start, header_only, behind)
    return _moved(found, start) if start else found


def _probe(stream: BinaryIO, nbytes: int, header_only: bool, behind: bool) -> Probe:
    head = read_at(stream, 0, HEAD_BYTES)
    for is_one, walk in SIZED:
        if is_one(head):
            return walk(stream, nbytes, behind=behind)
    for kind, is_one, walk in WALKED:
        if is_one(head):
            if header_only:
                return Probe(kind)
            return _in_a_row(walk, stream, nbytes) if kind in JOINED else walk(stream, nbytes)
    if header_only:
        return Probe("other")
    frames = compressed.ADTS.probe(stream, nbytes) or compressed.probe_ac3(stream, nbytes)
    return frames or mpeg.probe_mpeg(stream, nbytes) or Probe("other")
