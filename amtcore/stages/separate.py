"""Outputs of channels in memory of their own, without a copy: one saved alone is saved alone.

The bank writes one tensor (batch, filter, time), of which a channel is a view; a saved view takes
the whole with it. So the batch goes into the channels, channel by channel,

    (batch, channel, time) -> (1, channel * batch, time) -> (1, all filters of all items, time)

where what belongs to a channel lies together, and becomes a tensor whose storage ends there. Under
torch.compile and torch.func, which cannot look at memory, channels stay views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amtcore.kernels.torch_state import is_transformed


def can_separate(x: Tensor) -> bool:
    """Whether the memory of a result of x can be looked at."""
    plain = type(x) in (Tensor, torch.nn.Parameter) and x.device.type == "cpu"
    return plain and not (torch.compiler.is_compiling() or is_transformed(x)) and x.numel() > 0


@dataclass(frozen=True)
class Folded:
    """The filters of a batch as those of one item with more channels.

    Args:
        counts: Filters of each channel.
        batch: Items.
    """

    counts: tuple[int, ...]
    batch: int

    @property
    def offsets(self) -> list[int]:
        """Where the filters of each channel of each item begin, and the end."""
        at = [0]
        for count in self.counts:
            start = at[-1]
            at += [start + count * (b + 1) for b in range(self.batch)]
        return at

    def _order(self) -> Tensor:
        """Row (item * filters + filter) of each folded row."""
        total = sum(self.counts)
        rows = torch.arange(self.batch * total).view(self.batch, total)
        return torch.cat([part.reshape(-1) for part in rows.split(list(self.counts), 1)])

    def signals(self, x: Tensor) -> Tensor:
        """(batch, channel, time) -> (1, channel * batch, time)."""
        return x.transpose(0, 1).flatten(0, 1).unsqueeze(0)

    def coefficients(self, coef: Tensor) -> Tensor:
        """(filter, ..) -> (filter of every item, ..)."""
        return coef if self.batch == 1 else coef[self._order() % len(coef)]

    def state(self, state: Tensor) -> Tensor:
        """(batch, filter, values) -> (1, filter of every item, values)."""
        return state.flatten(0, 1)[self._order()].unsqueeze(0)

    def unfold_state(self, state: Tensor) -> Tensor:
        """The inverse of `state`."""
        back = torch.argsort(self._order())
        return state[0][back].unflatten(0, (self.batch, -1))

    def outputs(self, y: Tensor) -> list[Tensor]:
        """(1, filter of every item, time) -> list over channels of (batch, M, time)."""
        rows = [count * self.batch for count in self.counts]
        parts = _Separate.apply(y[0], rows)
        return [part.unflatten(0, (self.batch, -1)) for part in parts]


class _Separate(torch.autograd.Function):
    """Parts of a tensor as tensors with storages of their own on the same memory."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """(row, time) -> parts of so many rows."""
        memory, at, parts = y.detach().numpy(), 0, []
        for count in rows:
            parts.append(torch.from_numpy(memory[at : at + count]))
            at += count
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The parts' gradients together."""
        return torch.cat(gradients), None
