"""`torch.compile` in tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def one_graph(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    """Compiled to one graph, or it raises.

    What earlier tests compiled is forgotten, and what they found that cannot be: a function that
    was left uncompiled once stays so, and those it calls are refused.
    """
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, backend=backend)
    return compiled
