"""What a container says about itself that its decoder does not pass on.

libsndfile shortens most cut files without a word, reads only the first link of a chained Ogg, and
guesses the length of an MP3 that has no frame count (off by any factor for variable bit rate,
losing the tail). `probe` reads the container's own bookkeeping, one module a family, and never
decodes a sample. FLAC needs none of this: its decoder checks every frame, and its header holds the
length. It may import nothing of the package.
"""

from __future__ import annotations

from typing import BinaryIO

from earmill.pipeline.audio.containers.base import Probe
from earmill.pipeline.audio.containers.boxes import (
    ASF,
    EBML,
    is_mp4,
    probe_adts,
    probe_asf,
    probe_matroska,
    probe_mp4,
)
from earmill.pipeline.audio.containers.headers import (
    is_aiff,
    probe_aiff,
    probe_au,
    probe_caf,
    probe_nist,
)
from earmill.pipeline.audio.containers.mpeg import probe_mpeg
from earmill.pipeline.audio.containers.ogg import probe_ogg
from earmill.pipeline.audio.containers.prefixed import open_prefixed
from earmill.pipeline.audio.containers.riff import W64_RIFF, is_riff, probe_riff, probe_w64

__all__ = ["HEAD_BYTES", "Probe", "ffmpeg_kind", "open_prefixed", "probe"]

HEAD_BYTES = 16


def ffmpeg_kind(head: bytes) -> str | None:
    """The kind of a container that FFmpeg decodes and whose header says a length, or None."""
    if head[:4] == EBML:
        return "matroska"
    if head == ASF:
        return "asf"
    return "mp4" if is_mp4(head) else None


def probe(stream: BinaryIO, nbytes: int) -> Probe:
    """Read the container's bookkeeping; the stream position is lost."""
    stream.seek(0)
    head = stream.read(HEAD_BYTES)
    if is_riff(head):
        return probe_riff(stream, nbytes)
    if head == W64_RIFF:
        return probe_w64(stream, nbytes)
    if is_aiff(head):
        return probe_aiff(stream, nbytes)
    if head[:4] == b"caff":
        return probe_caf(stream, nbytes)
    if head[:4] in (b".snd", b"dns."):
        return probe_au(stream, nbytes)
    if head[:8] == b"NIST_1A\n":
        return probe_nist(stream, nbytes)
    if head[:4] == b"OggS":
        return probe_ogg(stream, nbytes)
    if head[:4] == b"fLaC":
        return Probe("flac")
    if head[:4] == EBML:
        return probe_matroska(stream, nbytes)
    if head == ASF:
        return probe_asf(stream, nbytes)
    if is_mp4(head):
        return probe_mp4(stream, nbytes)
    return probe_adts(stream, nbytes) or probe_mpeg(stream, nbytes) or Probe("other")
