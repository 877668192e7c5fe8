"""Start workers on all GPUs of a Ray cluster, and print what each worker sees, as a line of JSON.

A script for `ray job submit`: Ray pickles the class of a script with the call.
"""

from __future__ import annotations

import json
import os

import ray

from earmill.pipeline.driver.executors import WorkerRequest, executor_of
from earmill.pipeline.driver.placement import place_workers
from earmill.pipeline.spec.job import RunSpec
from earmill.pipeline.worker.messages import Outcome, WorkerInfo


class Looking:
    """A runner whose warm-up tells which GPUs Ray has given to its process."""

    def warm_up(self) -> WorkerInfo:
        ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(ids)
        return WorkerInfo(pid=os.getpid(), device="cuda", threads=1, note=",".join(ids))

    def cpu_s(self) -> dict[str, float]:
        return {}

    def waits_for(self) -> str:
        return ""


def main() -> None:
    run = RunSpec(device="cuda")
    with executor_of(run).session(run, print) as session:
        places = place_workers(session.nodes, run, at_most=9)
        workers = session.workers(lambda index: WorkerRequest(Looking, places[index], 1))  # type: ignore[arg-type]
        calls = [workers.call(workers.start(index), "warm_up") for index in range(len(places))]
        found: dict[object, str] = {}
        while len(found) < len(calls):
            for call, outcome in workers.ended([c for c in calls if c not in found], 1.0):
                assert isinstance(outcome, Outcome) and outcome.info is not None, outcome
                found[call] = outcome.info.note
    print(json.dumps({"gpus": sorted(found.values())}), flush=True)


if __name__ == "__main__":
    main()
