"""Whether an interpreter stands in for the GPU: what the environment says of it, without torch.

`AMTCORE_GPU=interpreted` puts the interpreter of the compiled kernels where their driver would be;
all else of a job on a GPU stays as it is, so that it can be tried on a machine without one.
"""

from __future__ import annotations

import os

VARIABLE = "AMTCORE_GPU"
INTERPRETED = "interpreted"


def is_interpreted() -> bool:
    """Whether "cuda" means the interpreter in this process."""
    return os.environ.get(VARIABLE) == INTERPRETED


def for_workers() -> dict[str, str]:
    """What a worker's environment must say of it: processes of a joined cluster have their own."""
    return {VARIABLE: os.environ[VARIABLE]} if VARIABLE in os.environ else {}
