"""Placement of workers on nodes, which changes no file: a node without GPUs has one worker that
uses all its cores, a node with GPUs one for each GPU, or for each share of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest

from earmill.pipeline.common.errors import DeviceError, SpecError
from earmill.pipeline.spec.job import RunSpec


@dataclass(frozen=True, slots=True)
class Node:
    node_id: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Placement:
    node_id: str  # Empty for any node.
    threads: int
    num_gpus: float = 0.0  # Share of a GPU that it computes on.
    device: str = "cpu"  # Its `run.device`.


def place_workers(nodes: Sequence[Node], run: RunSpec, *, at_most: int) -> list[Placement]:
    seats = gpu_seats(nodes, run)
    with_gpus = {node.node_id for node in seats}
    on_cpu = [node for node in nodes if node.cpus > 0 and node.node_id not in with_gpus]
    if not (seats or on_cpu):
        raise SpecError("the Ray cluster has no node with a CPU; start one with --num-cpus")
    if run.device == "cuda":
        on_cpu = []
    count = min(run.workers or len(seats) + len(on_cpu), at_most)
    chosen = seats[:count]
    chosen += islice(cycle(on_cpu), count - len(chosen))
    sharing = Counter(node.node_id for node in chosen)
    return [
        Placement(
            node_id=node.node_id,
            threads=run.threads_per_worker or max(1, node.cpus // sharing[node.node_id]),
            num_gpus=run.gpus_wanted if node.node_id in with_gpus else 0.0,
            device=run.device if node.node_id in with_gpus else "cpu",
        )
        for node in chosen
    ]


def cpu_note(nodes: Sequence[Node], run: RunSpec) -> str:
    """Return a note for a job that would take GPUs and finds none; else an empty text."""
    if run.device != "auto" or not run.gpus_wanted or gpu_seats(nodes, run):
        return ""
    return "found no GPU: the models run on CPU"


def gpu_seats(nodes: Sequence[Node], run: RunSpec) -> list[Node]:
    """Return the node of every GPU worker that fits, first workers of all nodes first."""
    seats: list[Node] = []
    if run.gpus_wanted:
        # A worker's share is of one GPU: halves of two GPUs do not add up.
        a_gpu = int(1 / run.gpus_wanted + 1e-9)
        by_node = [[node] * (node.gpus * a_gpu) for node in nodes]
        seats = [node for turn in zip_longest(*by_node) for node in turn if node is not None]
    if run.device == "cuda" and not seats:
        raise DeviceError(
            "run.device: expected a node with a GPU for cuda, got a Ray cluster that offers none; "
            "add one, say --num-gpus to `ray start`, or set run.device to auto or cpu"
        )
    if run.device == "cuda" and run.workers is not None and run.workers > len(seats):
        raise SpecError(
            f"run.workers: expected at most {len(seats)}, as many as the cluster's GPUs hold at "
            f"{run.gpus_wanted:g} each, got {run.workers}; lower it, or gpus_per_worker"
        )
    return seats
