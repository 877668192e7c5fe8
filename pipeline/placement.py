"""Where workers go and how many threads each gets, from the cluster's nodes and the job's wishes.

On CPU one worker a node uses all its cores; Ray reserves next to nothing for it, because a cluster
whose CPUs are all reserved can run nothing else and hangs. With GPUs one worker takes what
`gpus_per_worker` says and no CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

from pipeline.errors import SpecError

if TYPE_CHECKING:
    from pipeline.ray_cluster import Node
    from pipeline.spec import RunSpec

# Enough for Ray to count the worker, too little to ever fill a node.
CPUS_RESERVED = 0.001


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker: its node, kernel threads, and what Ray reserves for it."""

    node_id: str
    threads: int
    num_cpus: float
    num_gpus: float


def place_workers(nodes: Sequence[Node], run: RunSpec, *, at_most: int) -> list[Placement]:
    """Placements for a job.

    Args:
        nodes: Live nodes. at_most: No more workers than there are shards.
    Raises:
        SpecError: The cluster cannot hold the workers asked for.
    """
    if run.gpus_per_worker > 0:
        return _on_gpus(nodes, run, at_most)
    with_cpus = [node for node in nodes if node.cpus > 0]
    if not with_cpus:
        raise SpecError("the Ray cluster has no node with a CPU; start one with --num-cpus")
    count = min(run.workers or len(with_cpus), at_most)
    chosen = list(islice(cycle(with_cpus), count))
    sharing = Counter(node.node_id for node in chosen)
    return [
        Placement(
            node_id=node.node_id,
            threads=run.threads_per_worker or max(1, node.cpus // sharing[node.node_id]),
            num_cpus=CPUS_RESERVED,
            num_gpus=0.0,
        )
        for node in chosen
    ]


def _on_gpus(nodes: Sequence[Node], run: RunSpec, at_most: int) -> list[Placement]:
    seats = [
        (node, max(1, int(node.gpus / run.gpus_per_worker)))
        for node in nodes
        if node.gpus >= run.gpus_per_worker
    ]
    room = sum(count for _, count in seats)
    if room < (run.workers or 1):
        raise SpecError(
            f"run.workers {run.workers or 1} with run.gpus_per_worker {run.gpus_per_worker:g}: "
            f"the Ray cluster has room for {room}; ask for fewer or add GPU nodes"
        )
    placements = [
        Placement(
            node_id=node.node_id,
            threads=run.threads_per_worker or max(1, node.cpus // count),
            num_cpus=0.0,
            num_gpus=run.gpus_per_worker,
        )
        for node, count in seats
        for _ in range(count)
    ]
    return placements[: min(run.workers or room, at_most)]
