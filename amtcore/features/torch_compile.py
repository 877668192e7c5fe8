"""`torch.compile` where it works; where it fails the function itself, and one line in the log.

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

_LOG = logging.getLogger(__name__)
_COMPILING = threading.Lock()


class Compiled:
    """A function of one tensor under `torch.compile`, without gradients.

    A compiler that is missing, or that cannot compile the function, is reported once in the log.
    The function then runs as it is; its values differ by rounding.

    Args:
        name: What it is, for the log.
        function: The function.
        enabled: Whether to compile at all.
        dynamic: Compile once for all lengths instead of once for each.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Tensor], Any],
        *,
        enabled: bool,
        dynamic: bool = False,
    ) -> None:
        self._name, self._function = name, function
        self._enabled, self._dynamic = enabled, dynamic
        self._compiled: Any = None
        #: Shapes that have run: another shape is compiled, one at a time.
        self._shapes: set[torch.Size] = set()

    def __call__(self, x: Tensor) -> Any:
        """Return what the function returns."""
        with torch.no_grad():
            if not self._enabled:
                return self._function(x)
            try:
                if x.shape in self._shapes:
                    return self._compiled(x)
                # One at a time: filters of warnings are the process's.
                with _COMPILING, warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of the compiler, about itself
                    if self._compiled is None:  # loads the compiler: seconds
                        self._compiled = torch.compile(self._function, dynamic=self._dynamic)
                    made = self._compiled(x)
                    self._shapes.add(x.shape)
                    return made
            except Exception as error:  # compilers fail in many ways; the function decides below
                made = self._function(x)
                self._enabled = False
                reason = " ".join(str(error).split())[:200]
                _LOG.warning(
                    "%s runs without torch.compile, which failed: %s: %s",
                    self._name,
                    type(error).__name__,
                    reason,
                )
                return made
