"""Where a job's workers run: processes of this machine, or Ray.

`base` is what the driver asks of an executor. Only the module of the job's executor is imported.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from earmill.pipeline.driver.executors.base import Executor
    from earmill.pipeline.spec.job import RunSpec


def executor_of(run: RunSpec) -> Executor:
    """Return the executor of a job.

    `auto` is Ray where a cluster is named or this process is connected to Ray, else processes of
    this machine. Ray names the cluster in RAY_ADDRESS for a job that came by `ray job submit`.
    """
    address = cluster_address(run)
    wants_ray = address is not None or is_connected()
    if run.executor == "ray" or (run.executor == "auto" and wants_ray):
        from earmill.pipeline.driver.executors.ray import RayExecutor

        return RayExecutor(address)
    # Each task of an array is a driver with workers on its machine.
    from earmill.pipeline.driver.executors.local import LocalExecutor

    return LocalExecutor()


def cluster_address(run: RunSpec) -> str | None:
    """Return the address of the Ray cluster to join, or None.

    RAY_ADDRESS says nothing in a process that is connected to Ray already.
    """
    address = run.ray_address or (None if is_connected() else os.environ.get("RAY_ADDRESS"))
    return None if address in ("", "local") else address


def is_connected() -> bool:
    """Return True if this process is connected to Ray; does not import Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
