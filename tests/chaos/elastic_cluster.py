"""Run one job while nodes join its Ray cluster and die. A script, because it has a Ray of its own.

    python -m tests.chaos.elastic_cluster JOB.yaml FOLDER WORKERS

The head is there from the start and holds on to its first shards. A second node joins, commits a
shard and is killed with more in flight. A third node does the same. Then the head does the rest.
Each node has WORKERS workers; a job on GPUs finds one GPU on each node. Prints the events as
`earmill extract --json` does, and the node ids as `node`; ends with the job's exit code.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.two_nodes import NODE, POLL_S, start_head, tell

# isort: split
import ray

from earmill.pipeline.driver.events import Event, Note, ShardDone, WorkersReady
from earmill.pipeline.driver.worker_pool import ID_DIGITS
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.worker.messages import ShardOrder
from earmill.pipeline.worker.shard_runner import ShardRunner, WorkerJob

NODES = 2


class GatedRunner(ShardRunner):
    """The real runner; each node does one shard, and others when it is told to."""

    def __init__(self, job: WorkerJob, folder: Path) -> None:
        super().__init__(job)
        self._folder = folder

    def run(self, order: ShardOrder) -> None:
        here = ray.get_runtime_context().get_node_id()[:ID_DIGITS]
        try:
            (self._folder / f"first-{here}").touch(exist_ok=False)
        except FileExistsError:
            while not (self._folder / f"go-{here}").exists():
                time.sleep(POLL_S)
        super().run(order)


@dataclass(frozen=True)
class MakeGated:
    """Builds the runner inside the worker."""

    job: WorkerJob
    folder: Path

    def __call__(self) -> GatedRunner:
        return GatedRunner(self.job, self.folder)


@dataclass
class Story:
    """What happens to the cluster, event by event."""

    cluster: Any
    folder: Path
    head: str
    workers: int
    node: dict[str, Any]
    nodes: list[Any] = field(default_factory=list)
    given_up: int = 0

    def __call__(self, event: Event) -> None:
        tell(event)
        if isinstance(event, WorkersReady):
            self._join()
        elif isinstance(event, ShardDone) and event.worker // self.workers == len(self.nodes):
            self.cluster.remove_node(self.nodes[-1], allow_graceful=False)
        elif isinstance(event, Note) and "is gone: given up" in event.text:
            self.given_up += 1
            if self.given_up % self.workers:
                return
            if len(self.nodes) < NODES:
                self._join()
            else:
                (self.folder / f"go-{self.head}").touch()

    def _join(self) -> None:
        self.nodes.append(self.cluster.add_node(**self.node))
        print(json.dumps({"event": "node", "id": self.nodes[-1].node_id}), flush=True)


def main(job: str, folder: Path, workers: int) -> int:
    run = JobSpec.load(job).run
    node = NODE | {"num_gpus": 1 if run.device == "cuda" else 0}
    cluster = start_head(node)
    try:
        head = cluster.head_node.node_id[:ID_DIGITS]
        (folder / f"first-{head}").touch()
        end = run_job(
            JobSpec.load(job, [f"run.ray_address={cluster.address}"]),
            sink=Story(cluster, folder, head, workers, node),
            make_runner=lambda work: MakeGated(work, folder),
        )
        return end.exit_code
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])))
