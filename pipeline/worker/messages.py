"""Messages of driver and workers. A commit record, not an outcome, says that a shard is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from earmill.pipeline.common.monitoring import Counts, Stretch
    from earmill.pipeline.formats.rows import QuarantineRow
    from earmill.pipeline.planning.shards import Shard
    from earmill.pipeline.sources.base import Item

# Shards in a worker on a CPU: one is extracted while the next is decoded or the last is written.
CONCURRENT_SHARDS = 2
# Quarantined rows of a shard in its notes; all of them are in its quarantine table.
MOST_ROWS_TOLD = 20


@dataclass(frozen=True, slots=True)
class ShardOrder:
    shard: Shard
    attempt: str  # Eight hex digits, unique to this attempt.
    attempts: int = 1  # Attempts so far, this one included.
    culprits: Mapping[str, str] = field(default_factory=dict)  # Row id to reason.
    witnesses: Sequence[Item] = ()  # Rows of the source that were read before.
    memory_share: float = 1.0  # Part of the usual memory for clips and batches.


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    pid: int
    device: str  # One of cpu, cuda and interpreted.
    threads: int
    shards: int = CONCURRENT_SHARDS  # Shards that it takes at a time.
    note: str = ""  # Why it does not use the GPU that the job allows.


@dataclass(frozen=True, slots=True)
class ShardNotes:
    """A worker's notes on a shard that it published, for progress reports alone."""

    won: bool  # The commit of this attempt counts.
    stages: Mapping[str, Stretch] = field(default_factory=dict)  # When each began and ended.
    bad: Sequence[QuarantineRow] = ()  # The first `MOST_ROWS_TOLD` of its quarantined rows.


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a call. Stages of a failure are warm_up, rows, publish, device (the process is of
    no more use) and overtaken (the output belongs to another command)."""

    ok: bool
    stage: str = ""
    message: str = ""  # One line for people.
    permanent: bool = False  # Trying again is pointless.
    outage: str = ""  # Kind of outage; says nothing of the shard.
    info: WorkerInfo | None = None  # Set by a good warm-up.
    value: float = 0.0  # Set by a status call.
    memory: bool = False  # There was too little memory.
    restarting: bool = False  # The call was lost, and Ray is starting the process again.
    cpu_s: Mapping[str, float] = field(default_factory=dict)  # By part, since the warm-up.
    counts: Counts | None = None  # Since the process began.
    notes: ShardNotes | None = None  # Set by a shard that was published.


@dataclass(frozen=True, slots=True)
class LostCall(Outcome):
    """A call without an answer: its process has died, is unreachable, or hung and was killed. The
    call waited for `outage`. With `memory`, the process may have been killed for its memory."""

    ok: bool = field(default=False, init=False)
    stage: str = field(default="lost", init=False)


class PublishError(RuntimeError):
    """Rows were computed but the shard could not be written or committed."""
