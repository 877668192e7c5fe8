"""Events of a run while it works: small, immutable, given to one sink. An event holds only plain
values, so `to_dict` is JSON as it stands. Worker processes never print: an error in a worker
reaches the sink as an event with one line of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from earmill.pipeline.common.text import Shown, audio, duration, figure

if TYPE_CHECKING:
    from earmill.pipeline.common.monitoring import Counts
    from earmill.pipeline.worker.messages import ShardNotes


@dataclass(slots=True)
class StopRequest:
    """A request to drain or, if repeated, to leave at once; `watched` while a run polls it."""

    reason: str = ""
    requests: int = 0
    watched: bool = False

    def __call__(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.requests += 1


# The end of each message about a run that can go on.
RESUME = "run the same command with --resume to go on"


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events; `kind` is its stable name in JSON output."""

    kind: ClassVar[str] = "event"

    def to_dict(self) -> dict[str, Any]:
        return {"event": self.kind, **asdict(self)}


Sink = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Drop an event."""


@dataclass(frozen=True, slots=True)
class Step(Event):
    """The driver begins something that may take a while; `text` says what."""

    kind: ClassVar[str] = "step"
    text: str


@dataclass(frozen=True, slots=True)
class Note(Event):
    """A remark for the user, on the source or on the machines of the run."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True, slots=True)
class SourceChanged(Event):
    """The source differs from the plan; `text` says how, and what to do. `changed` rows have
    another file or other columns. The numbers of rows are 0 if the source could not be listed."""

    kind: ClassVar[str] = "source_changed"
    added: int
    removed: int
    changed: int
    text: str


@dataclass(frozen=True, slots=True)
class JobStarted(Event):
    """Plan and output are settled; work begins, unless no work is left.

    Args:
        seconds_total: Planned audio in seconds, an estimate.
        seconds_done: The part of `seconds_total` in shards that were committed earlier.
        audio_s_done: Audio of the good rows in those shards, as decoded, in seconds.
    """

    kind: ClassVar[str] = "job_started"
    job: str
    output: str
    plan_id: str
    shards_total: int
    shards_done: int
    rows_total: int
    rows_ok: int
    rows_bad: int
    seconds_total: float
    seconds_done: float
    audio_s_done: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkersReady(Event):
    """The first worker is warm, after `start_s` seconds."""

    kind: ClassVar[str] = "workers_ready"
    workers: int
    threads: int
    device: str
    start_s: float


@dataclass(frozen=True, slots=True)
class InFlight(Event):
    """Audio seconds already extracted in shards that are not committed yet."""

    kind: ClassVar[str] = "in_flight"
    seconds: float


@dataclass(frozen=True, slots=True)
class ShardDone(Event):
    """A shard is committed, by this run or by another attempt of it.

    Args:
        seconds: Planned audio of the shard, an estimate.
        nbytes: Bytes of its data files.
        audio_s: Audio of its good rows, as decoded, in seconds.
        worker: Index of this driver's worker that ended it last.
        bad_by_class: Quarantined rows by reason.
    """

    kind: ClassVar[str] = "shard_done"
    shard_id: str
    rows_ok: int
    rows_bad: int
    seconds: float
    nbytes: int
    audio_s: float
    worker: int | None = None
    bad_by_class: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShardRetry(Event):
    """An attempt on a shard failed and it was put back; `attempt` counts from 1. The cause is lost
    (its worker was lost), memory, rows or publish."""

    kind: ClassVar[str] = "shard_retry"
    shard_id: str
    attempt: int
    reason: str
    worker: int | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ShardWaits(Event):
    """A shard met an outage: source, missing, output or machine. It is tried again after at least
    `pause_s` seconds."""

    kind: ClassVar[str] = "shard_waits"
    shard_id: str
    reason: str
    pause_s: float
    worker: int | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class ShardFailed(Event):
    """A shard was given up; the run goes on with the others and ends with exit code 1."""

    kind: ClassVar[str] = "shard_failed"
    shard_id: str
    reason: str
    worker: int | None = None


@dataclass(frozen=True, slots=True)
class RowQuarantined(Event):
    """A row of a published shard went to quarantine; emitted for the first rows of a shard. The
    fields `stage`, `error_class` and `message` are as in the quarantine table."""

    kind: ClassVar[str] = "row_quarantined"
    shard_id: str
    row_id: str
    stage: str
    error_class: str
    message: str
    worker: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A worker process died or hung; it is started again."""

    kind: ClassVar[str] = "worker_lost"
    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class BisectStarted(Event):
    """The rows of a shard that keeps killing its worker are searched for the culprits."""

    kind: ClassVar[str] = "bisect_started"
    shard_id: str
    rows: int


@dataclass(frozen=True, slots=True)
class CulpritFound(Event):
    """This row kills or hangs its worker; it goes to quarantine."""

    kind: ClassVar[str] = "culprit_found"
    shard_id: str
    row_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Draining(Event):
    """The run was asked to stop; no new shard is started."""

    kind: ClassVar[str] = "draining"
    reason: str
    in_flight: int


@dataclass(frozen=True, repr=False, slots=True)
class JobFinished(Shown, Event):
    """The last event of every run that got as far as work.

    Args:
        status: done, nothing_to_do, stopped, failed, or left: other drivers have the rest.
        exit_code: Exit code of the command line.
        seconds: Audio of good rows that this run committed, as decoded, in seconds.
        wall_s: Duration of the work, in seconds.
        times_real_time: seconds / wall_s, start-up left out.
        cpu_s: CPU seconds in that time by part: the parts of `common.monitoring`, the driver, and
            `idle`, CPU seconds of the workers' cores that the run did not use.
    """

    kind: ClassVar[str] = "summary"
    status: str
    exit_code: int
    message: str
    output: str
    shards: int
    shards_failed: int
    rows_ok: int
    rows_bad: int
    seconds: float
    wall_s: float
    times_real_time: float
    bad_by_class: dict[str, int] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def shown(self) -> dict[str, str]:
        """Return how the run ended, in words."""
        reasons = ", ".join(f"{name} {count:,}" for name, count in self.bad_by_class.items())
        failed = {"shards that failed": f"{self.shards_failed:,}"} if self.shards_failed else {}
        return {
            "status": self.status,
            "rows ok": f"{self.rows_ok:,}",
            "quarantined": f"{self.rows_bad:,}" + (f" ({reasons})" if reasons else ""),
            **failed,
            "audio of this run": audio(self.seconds),
            "took": f"{duration(self.wall_s)}, {figure(self.times_real_time)} x real time",
            "output": self.output,
        }


@dataclass(frozen=True, slots=True)
class WorkerSays(Event):
    """CPU seconds and counts (`common.monitoring`) of a worker process since it began; `worker` is
    its slot, `generation` the number of the process in that slot."""

    kind: ClassVar[str] = "worker_says"
    worker: int
    generation: int
    cpu_s: Mapping[str, float]
    counts: Counts


@dataclass(frozen=True, slots=True)
class PoolState(Event):
    """Numbers of shards (`ShardLedger.states`) and workers (warming, ready or dead) by state."""

    kind: ClassVar[str] = "pool_state"
    shards: Mapping[str, int]
    workers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ShardAttempt(Event):
    """An attempt on a shard ended. `error` is empty if it succeeded; `notes` are None if it failed
    or there was nothing to do."""

    kind: ClassVar[str] = "shard_attempt"
    shard_id: str
    worker: int
    error: str
    notes: ShardNotes | None
