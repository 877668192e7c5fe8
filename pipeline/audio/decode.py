"""Encoded bytes to float32 samples and facts about them, whole or in blocks, with one result.

Decoding is libsndfile's (through soundfile) and, for what libsndfile does not read, FFmpeg's
(through PyAV), from a seekable stream. Tags in front of the audio are skipped for every format. Bad
input becomes a RowError:

- certain to be found: empty, not audio, a codec that is not supported, unreadable header, no
  samples, NaN or infinity, absurd sample rate, missing channel, a span outside the file; a cut or
  damaged FLAC, WavPack or TTA (checksums, lengths in headers) and Ogg (page checksums, numbers, end
  mark); a cut WAV, RF64, BW64, W64, AIFF, CAF, AU, NIST, MP4, Matroska or ASF (sizes in the
  header); a cut MP3 that has a Xing or Info tag with its length; samples behind those that the
  header counts, such as a second file behind the first.
- not detectable: a cut WAV, or FLAC at a frame border, whose writer never knew the length
  (`AudioFacts.header_size` says which these are); an MP3 without such a tag, ADTS, AC-3 or AMR, cut
  exactly between two frames; a fragmented MP4 or live Matroska between two fragments; wrong sample
  values inside a WAV or inside intact frames of a lossy codec; damage outside the span of a row,
  except in Ogg, ADTS, AC-3 and AMR, where it moves time.

Spans are cut from the samples of the whole file: lossy streams are decoded from their start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from earmill.pipeline.audio.block_reader import BLOCK_FRAMES, AudioFacts, BlockReader, Limits
from earmill.pipeline.audio.channels import AudioBlock, Channels
from earmill.pipeline.audio.time_span import seconds_to_frames

__all__ = [
    "AudioFacts",
    "BlockReader",
    "Decoded",
    "Limits",
    "decode",
    "open_blocks",
    "seconds_to_frames",
]


@dataclass(frozen=True)
class Decoded:
    """A decoded clip.

    Shape:
        - waveform: (len(channel_ids), facts.frames) float32
    """

    waveform: AudioBlock
    channel_ids: tuple[int, ...]
    facts: AudioFacts


def decode(
    stream: BinaryIO,
    *,
    uri: str,
    start_s: float | None = None,
    end_s: float | None = None,
    channels: Channels = "mean",
    limits: Limits | None = None,
) -> Decoded:
    """Decode a span of a stream, or all of it; a RowError subclass says what is wrong with it.

    Args:
        stream: Seekable bytes; a `digest()` method on it replaces reading them for bytes_sha256.
        uri: What messages call it.
        start_s: Start in seconds; None is the beginning.
        end_s: End in seconds; None is the end.
        channels: mean, left, right, each, or an index.
        limits: What is taken of files.
    """
    with open_blocks(
        stream, uri=uri, start_s=start_s, end_s=end_s, channels=channels, limits=limits
    ) as reader:
        waveform = np.concatenate(list(reader), axis=1)
        return Decoded(waveform, reader.channel_ids, reader.facts)


def open_blocks(
    stream: BinaryIO,
    *,
    uri: str,
    start_s: float | None = None,
    end_s: float | None = None,
    channels: Channels = "mean",
    limits: Limits | None = None,
    block_frames: int = BLOCK_FRAMES,
    margins_s: tuple[int, int] = (0, 0),
) -> BlockReader:
    """The same samples as `decode`, block by block in constant memory; arguments as there and of
    `BlockReader`.

    Damage may show only after good blocks: what was made of them must then be thrown away.
    """
    return BlockReader(
        stream,
        uri=uri,
        span=(start_s, end_s),
        channels=channels,
        limits=limits or Limits(),
        block_frames=block_frames,
        margins_s=margins_s,
    )
