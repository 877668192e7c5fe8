"""The network, the same for every kind of features, and its training.

    values (row, column, frame) -> standardised -> 48 mixtures of the columns
        -> two convolutions over time -> mean and maximum over time -> 20 scores

A front-end that learns does so in one epoch, after a third of them: before it is the fixed one, and
after it stands still and its features are computed once more. Its gradients cost a hundred times
what the rest does; so it gets as many steps as an epoch has, of half as many clips.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool1d, cross_entropy

from amtcore import Dau1997
from examples.proof.features import HOP, Part
from examples.proof.words import LABELS, RATE_HZ

BATCH = 32
WIDTH = 48
# A front-end learns so much faster than the network, as it has so few steps. Nothing was tried.
FASTER = 10


@dataclass(frozen=True)
class Plan:
    """How long a network is trained, and what is tried for it: the same for all kinds.

    Args:
        learning_epoch: In which a front-end learns. rate: Of learning, at the beginning. seeds:
            Networks that are trained.
    """

    epochs: int = 24
    learning_epoch: int = 8
    rate: float = 3e-3
    seeds: int = 3


class Classifier(nn.Module):
    """Scores of the words, from standardised columns."""

    mean: Tensor
    scale: Tensor

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", like.mean((0, 2))[:, None])
        self.register_buffer("scale", 1 / (like.std((0, 2)) + 1e-6)[:, None])
        self.layers = nn.Sequential(
            nn.Conv1d(like.shape[1], WIDTH, 1),
            nn.ReLU(),
            nn.Conv1d(WIDTH, WIDTH, 9, stride=2, padding=4),
            nn.BatchNorm1d(WIDTH),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv1d(WIDTH, 2 * WIDTH, 9, stride=2, padding=4),
            nn.BatchNorm1d(2 * WIDTH),
            nn.ReLU(),
        )
        self.scores = nn.Sequential(nn.Dropout(0.3), nn.Linear(4 * WIDTH, len(LABELS)))

    def forward(self, values: Tensor) -> Tensor:
        """(row, column, frame) to (row, word)."""
        hidden = self.layers((values - self.mean) * self.scale)
        return self.scores(torch.cat([hidden.mean(-1), hidden.amax(-1)], 1))


class FrontEnd(nn.Module):
    """Dau1997 whose constants are learnt, pooled to frames as in the job."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Dau1997(fs=RATE_HZ, learnable=True)

    def forward(self, samples: Tensor) -> Tensor:
        """Rows of `samples`, (row, HOP, frame), to (row, column, frame)."""
        wave = samples.transpose(1, 2).flatten(1)
        return torch.cat([avg_pool1d(channel, HOP) for channel in self.model(wave)], 1)

    def features(self, samples: Part) -> Part:
        """Of a whole split, without gradients."""
        with torch.no_grad():
            values = torch.cat([self(some) for some in samples.values.split(64)])
        return replace(samples, values=values)


@dataclass(frozen=True)
class Trained:
    """A network, and the features that it takes: of its own front-end where that has learnt."""

    classifier: Classifier
    parts: dict[str, Part]

    def scores(self, split: str) -> Tensor:
        """Of every row."""
        self.classifier.eval()
        with torch.no_grad():
            return self.classifier(self.parts[split].values)


def train(
    parts: dict[str, Part], plan: Plan, *, seed: int, samples: dict[str, Part] | None
) -> Trained:
    """One network.

    Args:
        parts: Features. samples: The same rows' samples, for a front-end that learns.
    """
    torch.manual_seed(seed)
    rows = len(parts["train"].labels)
    classifier = Classifier(parts["train"].values)
    optimiser = torch.optim.AdamW(classifier.parameters(), lr=plan.rate, weight_decay=0.01)
    steps = max(1, rows // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimiser, plan.epochs * steps, plan.rate / 10
    )
    for epoch in range(plan.epochs):
        classifier.train()
        batches = torch.randperm(rows).split(BATCH)[:steps]
        learner: FrontEnd | None = None
        if samples is not None and epoch == plan.learning_epoch:
            learner = FrontEnd()
            learning = torch.optim.Adam(learner.parameters(), lr=FASTER * plan.rate)
        for chosen in batches:
            if learner is None or samples is None:
                values = parts["train"].values[chosen]
            else:
                chosen = chosen[: BATCH // 2]
                values = learner(samples["train"].values[chosen])
                learning.zero_grad()
            loss = cross_entropy(
                classifier(values), parts["train"].labels[chosen], label_smoothing=0.1
            )
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(classifier.parameters(), 5.0)
            optimiser.step()
            schedule.step()
            if learner is not None:
                learning.step()
        if learner is not None and samples is not None:
            parts = {split: learner.features(part) for split, part in samples.items()}
    return Trained(classifier, parts)
