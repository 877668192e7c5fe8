"""Requests that a job makes of its stores, as counted on an S3 server; files of a disk need none.

Two prices: PUT, COPY, POST and LIST are of one kind, GET and HEAD of the other. What a job without
disturbance makes is counted, no retries.

    writes of a shard    one for each object, its claim, and four listings: was it committed, did
                         its parts arrive
    reads of a shard     its commit and its row table, each asked for and read, by driver and worker
    source               a row is asked for and read; rows of one block are read together
"""

from __future__ import annotations

from dataclasses import dataclass

from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.sources.base import is_local
from earmill.pipeline.spec.job import JobSpec

WRITES_PER_SHARD, READS_PER_SHARD = 5, 10
WRITES_PER_JOB, READS_PER_JOB = 70, 50
READS_PER_ROW = 2
NAMES_IN_A_LISTING = 1000


@dataclass(frozen=True)
class Requests:
    """How many: `puts` that write or list, `gets` that read."""

    puts: int
    gets: int


def requests(plan: Plan, spec: JobSpec, objects: int) -> Requests:
    """Of a whole job.

    Args:
        objects: That it writes.
    """
    puts = gets = 0
    if not is_local(spec.output.uri):
        puts += objects + WRITES_PER_SHARD * len(plan.shards) + WRITES_PER_JOB
        gets += READS_PER_SHARD * len(plan.shards) + READS_PER_JOB
    remote = pieces = 0
    block: object = None
    for item in plan.items():
        # Members of tars and rows of tables have the uri of what they are in.
        if is_local(item.uri):
            continue
        remote += 1
        pieces += item.block is None or item.block != block
        block = item.block
    if remote:
        puts += 2 * (1 + remote // NAMES_IN_A_LISTING)
        gets += READS_PER_ROW * pieces
    return Requests(puts, gets)
