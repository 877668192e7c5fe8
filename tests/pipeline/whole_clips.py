"""Whole clips out of the block reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from earmill.pipeline.audio.channels import AudioBlock, Channels
from earmill.pipeline.audio.decode import AudioFacts, BlockReader, Limits


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
    """Decode a span of a stream, or the whole stream.

    Args:
        stream: Seekable bytes. If it has a method `digest()`, bytes_sha256 is its result.
        uri: Name of the stream in messages.
        start_s: Start in seconds; None is the beginning.
        end_s: End in seconds; None is the end.
        channels: mean, left, right, each, binaural, or an index.
        limits: Limits of the file; None for the defaults.
    Raises:
        RowError: The stream cannot be decoded; the subclass names the reason.
    """
    with BlockReader(
        stream, uri=uri, start_s=start_s, end_s=end_s, channels=channels, limits=limits
    ) as reader:
        waveform = np.concatenate(list(reader), axis=1)
        return Decoded(waveform, reader.channel_ids, reader.facts)
