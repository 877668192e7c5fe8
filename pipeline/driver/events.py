"""Events of a run while it works: small, immutable, given to one sink. An event holds only plain
values, so `to_dict` is JSON as it stands. Worker processes never print: an error in a worker
reaches the sink as an event with one line of text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

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


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
@dataclass(frozen=True)
class Event:
    """Base of all events, each a frozen dataclass; `kind` is its stable name in JSON output."""

    kind: ClassVar[str]

    def __init_subclass__(cls, kind: str, repr: bool = True) -> None:
        cls.kind = kind
        dataclass(frozen=True, repr=repr)(cls)

    def to_dict(self) -> dict[str, Any]:
        return {"event": self.kind, **asdict(self)}


Sink = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Drop an event."""


class Step(Event, kind="step"):
    """The driver begins something that may take a while; `text` says what."""

    text: str


class Note(Event, kind="note"):
    """A remark for the user, on the source or on the machines of the run."""

    text: str


class SourceChanged(Event, kind="source_changed"):
    """The source differs from the plan; `text` says how, and what to do. `changed` rows have
    another file or other columns. The numbers of rows are 0 if the source could not be listed."""

    added: int
    removed: int
    changed: int
    text: str


class JobStarted(Event, kind="job_started"):
    """Plan and output are settled; work begins, unless no work is left."""

    job: str
    output: str
    plan_id: str
    shards_total: int
    shards_done: int
    rows_total: int
    rows_ok: int
    rows_bad: int
    seconds_total: float  # Planned audio, an estimate.
    seconds_done: float  # The part of `seconds_total` in shards that were committed earlier.
    audio_s_done: float = 0.0  # Audio of the good rows in those shards, as decoded.


class WorkersReady(Event, kind="workers_ready"):
    """The first worker is warm, after `start_s` seconds."""

    workers: int
    threads: int
    device: str
    start_s: float


class InFlight(Event, kind="in_flight"):
    """Audio seconds already extracted in shards that are not committed yet."""

    seconds: float


class ShardDone(Event, kind="shard_done"):
    """A shard is committed, by this run or by another attempt of it."""

    shard_id: str
    rows_ok: int
    rows_bad: int
    seconds: float  # Planned audio of the shard, an estimate.
    nbytes: int  # Bytes of its data files.
    audio_s: float  # Audio of its good rows, as decoded.
    worker: int | None = None  # Index of this driver's worker that ended it last.
    bad_by_class: dict[str, int] = field(default_factory=dict)  # Quarantined rows by reason.


class ShardRetry(Event, kind="shard_retry"):
    """An attempt on a shard failed and it was put back; `attempt` counts from 1. The cause is lost
    (its worker was lost), memory, rows or publish."""

    shard_id: str
    attempt: int
    reason: str
    worker: int | None = None
    cause: str = ""


class ShardWaits(Event, kind="shard_waits"):
    """A shard met an outage: source, missing, output or machine. It is tried again after at least
    `pause_s` seconds."""

    shard_id: str
    reason: str
    pause_s: float
    worker: int | None = None
    cause: str = ""


class ShardFailed(Event, kind="shard_failed"):
    """A shard was given up; the run goes on with the others and ends with exit code 1."""

    shard_id: str
    reason: str
    worker: int | None = None


class RowQuarantined(Event, kind="row_quarantined"):
    """A row of a published shard went to quarantine; emitted for the first rows of a shard. The
    fields `stage`, `error_class` and `message` are as in the quarantine table."""

    shard_id: str
    row_id: str
    stage: str
    error_class: str
    message: str
    worker: int | None = None


class WorkerLost(Event, kind="worker_lost"):
    """A worker process died or hung; it is started again."""

    worker: int
    reason: str


class BisectStarted(Event, kind="bisect_started"):
    """The rows of a shard that keeps killing its worker are searched for the culprits."""

    shard_id: str
    rows: int


class CulpritFound(Event, kind="culprit_found"):
    """This row kills or hangs its worker; it goes to quarantine."""

    shard_id: str
    row_id: str
    reason: str


class Draining(Event, kind="draining"):
    """The run was asked to stop; no new shard is started."""

    reason: str
    in_flight: int


class JobFinished(Shown, Event, kind="summary", repr=False):
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


class WorkerSays(Event, kind="worker_says"):
    """CPU seconds and counts (`common.monitoring`) of a worker process since it began; `worker` is
    its slot, `generation` the number of the process in that slot."""

    worker: int
    generation: int
    cpu_s: Mapping[str, float]
    counts: Counts


class PoolState(Event, kind="pool_state"):
    """Numbers of shards (`ShardLedger.states`) and workers (warming, ready or dead) by state."""

    shards: Mapping[str, int]
    workers: Mapping[str, int]


class ShardAttempt(Event, kind="shard_attempt"):
    """An attempt on a shard ended. `error` is empty if it succeeded; `notes` are None if it failed
    or there was nothing to do."""

    shard_id: str
    worker: int
    error: str
    notes: ShardNotes | None
