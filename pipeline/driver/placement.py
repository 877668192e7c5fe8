"""Where workers go and how many threads each gets, from the cluster's nodes and the job's wishes.

One worker a node uses all its cores; Ray reserves next to nothing for it, because a cluster whose
CPUs are all reserved can run nothing else and hangs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

from earmill.pipeline.common.errors import SpecError

if TYPE_CHECKING:
    from earmill.pipeline.driver.ray_session import Node
    from earmill.pipeline.spec.job import RunSpec

# Enough for Ray to count the worker, too little to ever fill a node.
CPUS_RESERVED = 0.001


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker: its node, kernel threads, and what Ray reserves for it."""

    node_id: str
    threads: int
    num_cpus: float


def place_workers(nodes: Sequence[Node], run: RunSpec, *, at_most: int) -> list[Placement]:
    """Placements for a job.

    Args:
        nodes: Live nodes. at_most: No more workers than there are shards.
    Raises:
        SpecError: The cluster cannot hold the workers asked for.
    """
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
        )
        for node in chosen
    ]
