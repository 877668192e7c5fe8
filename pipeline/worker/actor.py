"""A worker as a Ray actor: `ShardWorker` behind Ray's calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from earmill.pipeline.worker.messages import CONCURRENT_SHARDS, Runner
from earmill.pipeline.worker.worker_process import ShardWorker

# Threads of their own: a question is answered while shards run.
SHARDS, CONTROL = "shards", "control"


def spawn_worker(
    make_runner: Callable[[], Runner],
    *,
    environment: Mapping[str, str] | None = None,
    num_cpus: float = 0.0,
    num_gpus: float = 0.0,
    shards: int = CONCURRENT_SHARDS,
    node_id: str | None = None,
) -> Any:
    """Start one worker actor and return its handle; it is not warm yet.

    Args:
        num_cpus: What to reserve. Keep the sum below the cluster's CPUs: a cluster whose CPUs are
            all reserved cannot run anything else and hangs.
        num_gpus: The share of a GPU to reserve.
        shards: Most shards that it is sent at a time.
        node_id: The node to prefer; another one is taken when it is gone.
    """
    options: dict[str, Any] = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "max_restarts": -1,
        "max_task_retries": 0,
        "concurrency_groups": {SHARDS: shards, CONTROL: 1},
    }
    if node_id is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
    return ray.remote(**options)(ShardWorker).remote(make_runner, environment)


def call_worker(actor: Any, kind: str, *args: Any) -> Any:
    """Call a worker; the reference to its answer."""
    group = CONTROL if kind == "status" else SHARDS
    return getattr(actor, kind).options(concurrency_group=group).remote(*args)
