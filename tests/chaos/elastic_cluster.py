"""Run one job while nodes join its Ray cluster, drain and die; a script, because it owns its Ray.

    python -m tests.chaos.elastic_cluster JOB.yaml FOLDER

The head is there from the start and holds on to its first shards. A second node joins, commits a
shard, is drained with more in flight, and ends with them. A third one joins, commits a shard and is
killed with more in flight. Then the head does the rest. Prints the events as `earmill extract
--json` does, and the node ids as `node`; ends with the job's exit code.
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
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION

from earmill.pipeline.driver.events import Event, Note, ShardDone, WorkersReady
from earmill.pipeline.driver.roster import ID_DIGITS
from earmill.pipeline.driver.run import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.worker.messages import ShardOrder
from earmill.pipeline.worker.shard_runner import ShardRunner, WorkerJob

# Longer than the rest of the story: nothing here ends for want of time.
DRAIN_S = 120.0


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
    nodes: list[Any] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        tell(event)
        if isinstance(event, WorkersReady):
            self._join()
        elif isinstance(event, ShardDone) and event.worker == len(self.nodes):
            self._first_shard_of_the_newest()
        elif isinstance(event, Note) and "drains: it ends" in event.text:
            (self.folder / f"go-{self._newest}").touch()
        elif isinstance(event, Note) and "drains: given up" in event.text:
            self._join()
        elif isinstance(event, Note) and "is gone: given up" in event.text:
            (self.folder / f"go-{self.head}").touch()

    @property
    def _newest(self) -> str:
        return str(self.nodes[-1].node_id[:ID_DIGITS])

    def _join(self) -> None:
        self.nodes.append(self.cluster.add_node(**NODE))
        print(json.dumps({"event": "node", "id": self.nodes[-1].node_id}), flush=True)

    def _first_shard_of_the_newest(self) -> None:
        if (self.folder / f"go-{self._newest}").exists():
            return
        if len(self.nodes) == 1:
            ends_ms = int((time.time() + DRAIN_S) * 1000)
            gcs = GcsClient(address=self.cluster.address)
            taken, why = gcs.drain_node(
                self.nodes[-1].node_id, DRAIN_NODE_REASON_PREEMPTION, "spot", ends_ms
            )
            assert taken, why
        else:
            self.cluster.remove_node(self.nodes[-1], allow_graceful=False)


def main(job: str, folder: Path) -> int:
    cluster = start_head()
    try:
        head = cluster.head_node.node_id[:ID_DIGITS]
        (folder / f"first-{head}").touch()
        end = run_job(
            JobSpec.load(job),
            sink=Story(cluster, folder, head),
            ray_address=cluster.address,
            make_runner=lambda work: MakeGated(work, folder),
        )
        return end.exit_code
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
