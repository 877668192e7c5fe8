"""Run one job on two Ray nodes of this machine; a script, because it owns its Ray.

    python -m tests.chaos.two_nodes JOB.yaml

Exit code and output are those of `earmill extract --json`.
"""

from __future__ import annotations

import os
import sys

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

from ray.cluster_utils import Cluster

from jobs.cli import run
from pipeline.ray_cluster import OBJECT_STORE_BYTES


def main() -> int:
    options = {
        "num_cpus": 1,
        "object_store_memory": OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }
    cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)
        cluster.wait_for_nodes()
        return run(["extract", sys.argv[1], "--json", "--ray-address", cluster.address])
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
