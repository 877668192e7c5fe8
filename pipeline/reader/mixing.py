"""Several feature sets mixed by weight, with an epoch that is a number of draws.

Each set is gone through pass after pass, every pass in an order of its own; an epoch takes the next
of each set's rows, as many as its weight says, spread evenly over the epoch. So no row of a set is
drawn again before all of them were (but for what windows of the shuffle move), across epochs too,
and every stretch of an epoch that is longer than a window holds the sets in the shares wanted.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from earmill.pipeline.loader import epoch_order as order
from earmill.pipeline.loader.epoch_order import Rows
from earmill.pipeline.reader.concat import ConcatenatedFeatures
from earmill.pipeline.reader.features import Features

SPREAD_SALT = 5


def mix(
    sets: Sequence[Features], weights: Sequence[float], *, draws: int | None = None
) -> MixedFeatures:
    """Feature sets as one whose `iterable()` draws from each by weight.

    Args:
        sets: Opened with the same streams and dtypes, at least one.
        weights: One a set, above 0; their sum does not matter.
        draws: Rows of an epoch over all ranks; None for as many as the sets have together.
    Raises:
        TypeError, ValueError: In one line, which argument is wrong.
    Example:
        both = mix([open_features("speech"), open_features("music")], [3, 1], draws=100_000)
        loader = FeatureLoader(both.iterable(seed=1, batch_size=16))
        next(iter(loader)).sets               # which set each row is from
    """
    return MixedFeatures(sets, weights, draws)


class MixedFeatures(ConcatenatedFeatures):
    """See `mix`; by number and by id it gives the rows of all sets, one set after the other.

    Attributes:
        weights: As given, with sum 1. draws: Rows of an epoch. counts: Of each set in it.
    """

    def __init__(
        self, sets: Sequence[Features], weights: Sequence[float], draws: int | None = None
    ) -> None:
        if not isinstance(sets, Sequence) or not all(isinstance(each, Features) for each in sets):
            raise TypeError(
                f"mix: expected a list of opened feature sets, got {_kind(sets)}; "
                "mix([open_features(a), open_features(b)], [3, 1])"
            )
        super().__init__(sets)
        if any(each.dtypes != sets[0].dtypes for each in sets):
            dtypes = [each.dtype.name for each in sets]
            raise ValueError(
                f"mix: expected sets of the same dtypes, got {dtypes}; open them all alike, with "
                "the same dtype="
            )
        empty = [i for i, each in enumerate(sets) if not len(each)]
        if empty:
            raise ValueError(f"mix: expected rows in every set, set {empty[0]} has none")
        self.weights = _checked_weights(weights, len(sets))
        wanted = sum(map(len, sets)) if draws is None else order.check_whole("draws", draws)
        if wanted < 1:
            raise ValueError(f"mix: draws must be at least 1, got {wanted}")
        self.draws, self.counts = wanted, _counts(self.weights, wanted)
        self.mixture = self.counts

    def __repr__(self) -> str:
        return f"MixedFeatures({list(self.sets)!r}, weights={list(self.weights)}, {self.draws})"

    def block_order(self, *, shuffle: bool, seed: int, epoch: int) -> tuple[Rows, Rows]:
        """Rows of an epoch in the order of shuffled blocks, and the pass of its set for each."""
        drawn = [
            self._drawn(part, shuffle=shuffle, seed=seed, epoch=epoch)
            for part in range(len(self.sets))
        ]
        times = [
            self._times(part, shuffle=shuffle, seed=seed, epoch=epoch)
            for part in range(len(self.sets))
        ]
        merged = np.argsort(np.concatenate(times), kind="stable")
        rows, passes = (np.concatenate(column)[merged] for column in zip(*drawn, strict=True))
        return rows, passes

    def _drawn(self, part: int, *, shuffle: bool, seed: int, epoch: int) -> tuple[Rows, Rows]:
        """The rows of one set in an epoch: its passes go on where the last epoch ended."""
        n_rows, count = len(self.sets[part]), self.counts[part]
        # Python's integers: an epoch may be any 63-bit number.
        first, at = divmod(epoch * count, n_rows)
        blocks = self.sets[part].block_rows()
        rows, passes, needed = [], [], count
        while needed:
            whole = order.block_order(
                blocks, shuffle=shuffle, seed=seed, epoch=first % 2**63, part=part + 1
            )
            taken = whole[at : at + needed]
            rows.append(self._starts[part] + taken)
            passes.append(np.full(len(taken), first % 2**63, np.int64))
            first, at, needed = first + 1, 0, needed - len(taken)
        none = np.zeros(0, np.int64)
        return np.concatenate([none, *rows]), np.concatenate([none, *passes])

    def _times(self, part: int, *, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
        """When each row of a set comes, from 0 to 1: evenly, at random inside its step."""
        count = self.counts[part]
        within: Any = 0.5
        if shuffle:
            drawn = order.keys(count, seed=seed, epoch=epoch, salt=SPREAD_SALT, part=part + 1)
            within = order.unit(drawn)
        return np.asarray((np.arange(count) + within) / max(1, count))


def _checked_weights(weights: Any, n_sets: int) -> tuple[float, ...]:
    if isinstance(weights, str) or not isinstance(weights, Sequence | np.ndarray):
        raise TypeError(f"mix: weights takes a list of numbers, one a set, got {weights!r}")
    if len(weights) != n_sets:
        raise ValueError(f"mix: expected {n_sets} weights, one a set, got {len(weights)}")
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
            raise TypeError(f"mix: weights are numbers, got {weight!r}")
        if not 0 < float(weight) < math.inf:
            raise ValueError(f"mix: weights are above 0, got {weight!r}; leave that set out")
    total = math.fsum(float(weight) for weight in weights)
    return tuple(float(weight) / total for weight in weights)


def _counts(weights: Sequence[float], draws: int) -> tuple[int, ...]:
    """Rows of each set in an epoch: the weights' shares, rounded by largest remainder."""
    shares = [weight * draws for weight in weights]
    counts = [math.floor(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_rest[: draws - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def _kind(sets: Any) -> str:
    if not isinstance(sets, Sequence):
        return type(sets).__name__
    return str([type(each).__name__ for each in sets if not isinstance(each, Features)][:1])
