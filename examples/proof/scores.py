"""Accuracy over the signal-to-noise ratio, with intervals by a bootstrap over words and seeds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

DRAWS = 2000
Correct = NDArray[np.bool_]


@dataclass(frozen=True)
class Interval:
    """A mean and the 95 % of its bootstrap around it."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} ({100 * self.low:.1f} to {100 * self.high:.1f})"


def interval(values: NDArray[np.float64], seed: int = 0) -> Interval:
    """Of values (seed of the network, word that was spoken): both are drawn again."""
    rng = np.random.default_rng(seed)
    seeds, words = values.shape
    means = np.empty(DRAWS)
    for draw in range(DRAWS):
        some = values[rng.integers(seeds, size=seeds)]
        means[draw] = some[:, rng.integers(words, size=words)].mean()
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high))


def by_ratio(correct: Correct, snr_db: NDArray[np.float64]) -> dict[float, Interval]:
    """Of (seed, row), rows in the same order of words at each ratio."""
    ratios = sorted(set(snr_db.tolist()), reverse=True)
    return {ratio: interval(correct[:, snr_db == ratio].astype(float)) for ratio in ratios}


def in_noise(correct: Correct, words: list[str], noisy: Correct) -> NDArray[np.float64]:
    """(seed, word): the share of a word's noisy versions that were told."""
    names = sorted(set(words))
    at = np.array([names.index(word) for word in words])
    return np.stack(
        [
            [row[(at == n) & noisy].mean() for n in range(len(names))]
            for row in correct.astype(float)
        ]
    )
