"""Where a job's workers run, and which executor a job has: processes of this machine, or Ray.

`base` is what the driver asks of an executor. Each executor imports what it runs on, and only the
one that the job names is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from earmill.pipeline.common.errors import SpecError

if TYPE_CHECKING:
    from earmill.pipeline.driver.executors.base import Executor
    from earmill.pipeline.spec.job import RunSpec


def executor_of(run: RunSpec, ray_address: str | None) -> Executor:
    """Return the executor that a job names.

    Args:
        ray_address: A cluster for Ray to join.
    Raises:
        SpecError: The address of a cluster, for an executor that joins none.
    """
    if run.executor == "ray":
        from earmill.pipeline.driver.executors.ray_executor import RayExecutor

        return RayExecutor(ray_address)
    if ray_address is not None:
        raise SpecError(
            f"run.executor: expected ray with a Ray cluster's address, got {run.executor}; leave "
            "out --ray-address or set run.executor to ray"
        )
    # The tasks of an array are drivers of their own, each with workers of its machine.
    from earmill.pipeline.driver.executors.local import LocalExecutor

    return LocalExecutor()
