"""Channel policy: which channels of a file become clips, and how many channels become one.

"mean" averages all channels, "left" and "right" pick the first and second, "each" makes one clip
per channel, and a number picks by index. Levels are not corrected: the mean of two equal channels
is the channel itself, the mean of two independent ones is 3 dB below either.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeline.errors import ChannelIndexError

Block = npt.NDArray[np.float32]
Channels = str | int

MIXED = -1
NAMED_CHANNELS = {"left": 0, "right": 1}


def channel_ids(channels: Channels, n_channels: int) -> tuple[int, ...]:
    """The channels a policy selects, MIXED for the mean; ChannelIndexError if there are fewer."""
    if channels == "mean":
        return (MIXED,)
    if channels == "each":
        return tuple(range(n_channels))
    index = NAMED_CHANNELS.get(channels) if isinstance(channels, str) else channels
    if index is None or index < 0:
        raise ValueError(f"expected mean, left, right, each or an index from 0, got {channels!r}")
    if index >= n_channels:
        raise ChannelIndexError(f"expected a channel {index}, got {n_channels} channel(s)")
    return (index,)


def mix(block: Block, ids: tuple[int, ...]) -> Block:
    """(frames, channels) to (len(ids), frames): picked channels, or their mean.

    The mean adds in float64, channel by channel, so that no sample depends on its block's length.
    """
    if ids != (MIXED,):
        return np.ascontiguousarray(block.T[list(ids)])
    n_channels = block.shape[1]
    if n_channels == 1:
        return np.ascontiguousarray(block.T)
    total = block[:, 0].astype(np.float64)
    for channel in range(1, n_channels):
        total += block[:, channel]
    return (total / n_channels).astype(np.float32)[np.newaxis]
