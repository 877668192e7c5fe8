"""Messages of driver and workers: orders and outcomes.

They are plain values, so they pickle small and need no Ray. An outcome is only a report: the commit
record says whether a shard is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from earmill.pipeline.common.monitoring import Counts, Stretch
    from earmill.pipeline.formats.rows import QuarantineRow
    from earmill.pipeline.planning.shards import Shard
    from earmill.pipeline.sources.base import Item

# Shards in a worker: one is extracted while the next is decoded or the last is written. A worker on
# a GPU takes as many as fill its launches.
CONCURRENT_SHARDS = 2
# Quarantined rows of a shard in its notes; all of them are in its quarantine table.
MOST_ROWS_TOLD = 20


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """One attempt on one shard.

    Args:
        attempt: Eight hex digits, unique to this attempt.
        attempts: Attempts so far, this one included.
        culprits: Row id -> reason, for rows that must go to quarantine unprocessed.
        witnesses: Rows of the source that were read before, in this run or an earlier one.
        memory_share: Part of the usual memory for clips and batches; changes no value.
    """

    shard: Shard
    attempt: str
    attempts: int = 1
    culprits: Mapping[str, str] = field(default_factory=dict)
    witnesses: Sequence[Item] = ()
    memory_share: float = 1.0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Facts about a warm worker.

    Args:
        device: cpu, cuda or interpreted.
        shards: Shards that it takes at a time.
        note: Why it does not use the GPU that the job allows; one line.
    """

    pid: int
    device: str
    threads: int
    shards: int = CONCURRENT_SHARDS
    note: str = ""


@dataclass(frozen=True, slots=True)
class ShardNotes:
    """A worker's notes on a shard that it published, for progress reports alone.

    Args:
        attempt: Attempt of the order.
        won: True if the commit of this attempt counts.
        stages: Name to when it began and ended, seconds since 1970; `commit` is the creation of the
            record.
        bad: The first of its quarantined rows; at most `MOST_ROWS_TOLD`.
    """

    attempt: str
    won: bool
    stages: Mapping[str, Stretch] = field(default_factory=dict)
    bad: Sequence[QuarantineRow] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a call, as far as the worker knows.

    Args:
        stage: Where it failed: warm_up, rows or publish; device, where that was lost and the
            process is of no more use; overtaken, where another command has the output now.
        message: One line for people.
        permanent: Trying again is pointless.
        outage: Kind of an outage, see `driver.circuit_breaker`; it says nothing of the shard.
        info: Set by a good warm-up.
        value: Set by a status call.
        memory: There was too little of it.
        cpu_s: CPU seconds of the process since it was warm, by part; of shards and status calls.
        counts: What the process has counted since it began; of shards and status calls.
        notes: Set by a shard that was published.
    """

    ok: bool
    stage: str = ""
    message: str = ""
    permanent: bool = False
    outage: str = ""
    info: WorkerInfo | None = None
    value: float = 0.0
    memory: bool = False
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    counts: Counts | None = None
    notes: ShardNotes | None = None


@dataclass(frozen=True, slots=True)
class LostCall:
    """The worker did not answer: its process is gone, unreachable or was killed for hanging.

    Args:
        restarting: Ray is starting the process again; the same handle will work in a moment.
        outage: Kind of an outage, if the worker was waiting for its end when it was given up.
        memory: It may have been killed for the memory it took.
    """

    message: str
    restarting: bool = False
    outage: str = ""
    memory: bool = False


class PublishError(RuntimeError):
    """Rows were computed but the shard could not be written or committed."""
