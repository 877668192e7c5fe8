"""One type for a whole model after loading.

`load_state_dict(.., assign=True)` takes the tensors as they are. Stages without constants, such as
a resampler, have none to take and would stay in the type that they were built in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from amtcore.stages.stage import Stage


def share_type(model: nn.Module, _: Any = None) -> None:
    """Bring the stages of a model to the widest type of what they have loaded."""
    stages = [stage for stage in model.modules() if isinstance(stage, Stage)]
    loaded = [stage.dtype for stage in stages if stage.state_dict()]
    wanted = torch.float64 if torch.float64 in loaded else torch.float32
    for stage in stages:
        if loaded and stage.dtype != wanted:
            stage.to(wanted)
