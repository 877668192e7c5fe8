"""Channel policy: the channels of a file that become clips.

"each" makes one clip of each channel. "binaural" takes two channels as the ears of one listener: a
model of two ears hears both, any other model hears their mean. A mono file sounds at both ears.
Levels are not corrected: the mean of two independent channels is 3 dB below either.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from earmill.pipeline.common.errors import ChannelIndexError

AudioBlock = npt.NDArray[np.float32]
Channels = str | int

MIXED = -1
BINAURAL = "binaural"
EARS = 2
NAMED_CHANNELS = {"left": 0, "right": 1}


def channel_ids(channels: Channels, n_channels: int) -> tuple[int, ...]:
    """Return the channels that a policy selects, MIXED for the mean; or ChannelIndexError."""
    if channels == "mean":
        return (MIXED,)
    if channels == BINAURAL and n_channels > EARS:
        raise ChannelIndexError(f"expected one or two channels, one an ear, got {n_channels}")
    if channels in ("each", BINAURAL):
        return tuple(range(n_channels))
    index = NAMED_CHANNELS.get(channels) if isinstance(channels, str) else channels
    if index is None or index < 0:
        raise ValueError(
            f"expected mean, left, right, each, binaural or an index from 0, got {channels!r}"
        )
    if index >= n_channels:
        raise ChannelIndexError(f"expected a channel {index}, got {n_channels} channel(s)")
    return (index,)


def mix(block: AudioBlock, ids: tuple[int, ...]) -> AudioBlock:
    """Turn (frames, channels) into (len(ids), frames): the picked channels, or the mean of all. The
    mean adds in float64, channel by channel, so that no sample depends on its block's length."""
    if ids != (MIXED,):
        return np.ascontiguousarray(block.T[list(ids)])
    n_channels = block.shape[1]
    if n_channels == 1:
        return np.ascontiguousarray(block.T)
    total = block[:, 0].astype(np.float64)
    for channel in range(1, n_channels):
        total += block[:, channel]
    return (total / n_channels).astype(np.float32)[np.newaxis]


def clips_of_channels(channels: Channels, ids: tuple[int, ...]) -> list[tuple[int, slice]]:
    """Return the source channel and the rows of each clip in a waveform of these channels."""
    if channels == BINAURAL:
        return [(MIXED, slice(0, len(ids)))]
    return [(channel, slice(row, row + 1)) for row, channel in enumerate(ids)]


def as_model_input(ears: AudioBlock, n_ears: int) -> AudioBlock:
    """Turn (1 or 2, frames) into the input of a model: (frames,), or both ears if it has two."""
    if len(ears) == 1:
        return ears[0]
    return ears if n_ears == EARS else mix(ears.T, (MIXED,))[0]
