"""Run one job on two Ray nodes of this machine; a script, because it owns its Ray.

    python -m tests.chaos.two_nodes JOB.yaml FOLDER

Prints the events as `earmill extract --json` does and ends with the job's exit code. No worker
begins before both are warm, which they say in FOLDER: else one could do it all on a busy machine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

from ray.cluster_utils import Cluster

from earmill.pipeline.driver.events import Event
from earmill.pipeline.driver.executors.ray import OBJECT_STORE_BYTES
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.worker.messages import ShardOrder, WorkerInfo
from earmill.pipeline.worker.shard_runner import ShardRunner, WorkerJob

NODES = 2
NODE = {"num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
POLL_S = 0.05


class MeetingRunner(ShardRunner):
    """The real runner; its first shard waits until every worker is warm."""

    def __init__(self, job: WorkerJob, meeting: Path) -> None:
        super().__init__(job)
        self._meeting = meeting

    def warm_up(self) -> WorkerInfo:
        info = super().warm_up()
        (self._meeting / str(info.pid)).touch()
        return info

    def run(self, order: ShardOrder) -> None:
        while len(list(self._meeting.iterdir())) < NODES:
            time.sleep(POLL_S)
        super().run(order)


@dataclass(frozen=True)
class MakeMeeting:
    """Builds the runner inside the worker."""

    job: WorkerJob
    meeting: Path

    def __call__(self) -> MeetingRunner:
        return MeetingRunner(self.job, self.meeting)


def tell(event: Event) -> None:
    """An event as a line of JSON."""
    print(json.dumps(event.to_dict()), flush=True)


def start_head(node: Mapping[str, Any]) -> Cluster:
    """A cluster of one node, the head."""
    return Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})


def main(job: str, meeting: Path) -> int:
    cluster = start_head(NODE)
    try:
        cluster.add_node(**NODE)
        cluster.wait_for_nodes()
        end = run_job(
            JobSpec.load(job, [f"run.ray_address={cluster.address}"]),
            sink=tell,
            make_runner=lambda work: MakeMeeting(work, meeting),
        )
        return end.exit_code
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
