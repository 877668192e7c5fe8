"""`torch.compile` of a function, with a fallback to the function itself and one line in the log.

Every shape is compiled separately, so callers keep the number of shapes small.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amtcore.errors import one_line

_LOG = logging.getLogger(__name__)
_COMPILING = threading.Lock()


class Compiled:
    """A function of one tensor under `torch.compile`, without gradients.

    If the compiler is missing or fails, the log says so once, and the function runs uncompiled. Its
    values then differ by rounding.

    Args:
        name: Name of the function in the log.
        function: Function of a tensor.
        enabled: Whether to compile at all.
        dynamic: Compile once for all lengths instead of once for each.
    """

    def __init__(
        self, name: str, function: Callable[[Tensor], Any], *, enabled: bool, dynamic: bool = False
    ) -> None:
        self._name, self._function, self._enabled = name, function, enabled
        self._dynamic = dynamic
        self._compiled: Any = None
        self._shapes: set[torch.Size] = set()  # shapes that are compiled

    def __call__(self, x: Tensor) -> Any:
        """Return what the function returns."""
        with torch.no_grad():
            if not self._enabled:
                return self._function(x)
            try:
                if x.shape in self._shapes:
                    return self._compiled(x)
                # One compilation at a time, since warning filters belong to the process.
                with _COMPILING, warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # warnings of the compiler about itself
                    if self._compiled is None:
                        self._compiled = torch.compile(self._function, dynamic=self._dynamic)
                    made = self._compiled(x)
                    self._shapes.add(x.shape)
                    return made
            except Exception as error:  # an error of the function itself is raised below
                made = self._function(x)
                self._enabled = False
                reason = one_line(error)[:200]
                _LOG.warning("%s runs without torch.compile, which failed: %s", self._name, reason)
                return made
