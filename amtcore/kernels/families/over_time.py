"""What the plain loops share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def over_time(samples: Sequence[Tensor], state: Tensor) -> Tensor:
    """(batch, channel, time) of the samples of a loop; no time where there are none.

    Args:
        samples: (batch, channel) each.
        state: (batch, channel, values), of the same recurrence.
    """
    return torch.stack(list(samples), -1) if samples else state[..., :0]
