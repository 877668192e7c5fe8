"""Which clips are extracted together: similar lengths, bounded size, decided by lengths alone.

A batch shares one length bucket from a fixed geometric grid, so padding stays below one step of the
grid and a compiled kernel meets a bounded number of shapes. Features do not depend on the company a
clip is in; batches only decide speed and memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Upper ends of the buckets: 1000 * 1.5^k samples.
FIRST_BUCKET_SAMPLES = 1000
BUCKET_RATIO = 1.5


def bucket_of(n_samples: int) -> int:
    """Index of the bucket for a clip length; bucket k holds lengths up to 1000 * 1.5^k."""
    if n_samples <= FIRST_BUCKET_SAMPLES:
        return 0
    k = math.ceil(math.log(n_samples / FIRST_BUCKET_SAMPLES, BUCKET_RATIO))
    # The logarithm may be off by a rounding error at the exact ends.
    while bucket_end(k - 1) >= n_samples:
        k -= 1
    while bucket_end(k) < n_samples:
        k += 1
    return k


def bucket_end(k: int) -> int:
    """Longest clip of bucket k, in samples."""
    return math.floor(FIRST_BUCKET_SAMPLES * BUCKET_RATIO**k)


def form_batches(lengths: Sequence[int], max_samples: int) -> list[list[int]]:
    """Split clips into batches.

    Args:
        lengths: Samples of each clip. max_samples: Most samples in a batch of more than one clip.
    Returns:
        Lists of positions in `lengths`; each position in exactly one of them, one bucket a list,
        clips of a bucket in their given order.
    """
    by_bucket: dict[int, list[int]] = {}
    for position, length in enumerate(lengths):
        by_bucket.setdefault(bucket_of(length), []).append(position)
    batches: list[list[int]] = []
    for _, members in sorted(by_bucket.items()):
        size = 0
        for position in members:
            if not size or size + lengths[position] > max_samples:
                batches.append([])
                size = 0
            batches[-1].append(position)
            size += lengths[position]
    return batches
