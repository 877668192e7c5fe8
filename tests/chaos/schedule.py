"""What happens to one disturbed run: drawn from its seed alone, in terms of the run's progress.

Faults of processes come so many commits into the run, those of transfers so many requests of a kind
into it; clocks only say how long something lasts. So a seed means the same on any machine, as far
as threads and processes allow.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.chaos.faulty_server import Rule

LOCAL, RAY, ARRAY = "local", "ray", "slurm-array"
# Source -> side of the server that its bytes come through; None for files of this machine.
SOURCES = {"files": None, "s3": "s3", "tars": "s3", "parquet": "s3", "web": "web"}
KILLS = ("kill worker", "kill driver", "kill server", "kill raylet")
FREEZES = ("freeze worker", "freeze driver", "freeze server")
STATUSES = (500, 503, 429)
READS = ("status", "reset", "cut", "short", "slow", "stall")
WRITES = ("status", "lost", "reset", "reset_after", "stall", "slow")
# What a job stores, by the names in its output.
OUT = "/out/[^/]*/"
WRITTEN = ("commits/.*", "data/.*", "rows/.*", "driver.json", "(plan|dataset|index|snapshots).*")
ALSO_READ = ("commits/.*", "driver.json", "plan/.*", "dataset.json", "current.json")
# Longer than a client waits for an answer here, and shorter.
STALLS_S = (0.5, 5.0)
# Shorter than a shard's deadline; past it, so that another does the shard; past twice of it.
FREEZES_S = (1.0, 3.0, 9.0, 17.0)
DEADLINE_S = 8.0


@dataclass(frozen=True)
class ProcessFault:
    """Something done to a process.

    Args:
        what: Of KILLS or FREEZES. commits: It is done once so many shards are committed.
        delay_s: And so long after that. seconds: For how long it is frozen, or the server away.
        which: Of several processes, this one.
    """

    what: str
    commits: int
    delay_s: float
    seconds: float
    which: int

    def __str__(self) -> str:
        lasts = f" for {self.seconds:g} s" if self.what in (*FREEZES, "kill server") else ""
        return f"{self.what} after {self.commits} commits{lasts}"


@dataclass(frozen=True)
class Schedule:
    """One run.

    Args:
        executor: Of the first driver. drivers: 1, or 2 that share the output.
        source: Of SOURCES. output: `local` or `s3`.
        in_child: Decoding is done in child processes.
        disk_shards: The disk is full after about so many shards; None for room enough.
        processes: In the order of their moments.
        source_rules, output_rules: Of the servers that source and output come through.
        ends_here: What is left when its driver is gone is done without a process for the driver.
    """

    seed: int
    executor: str
    drivers: int
    workers: int
    source: str
    output: str
    in_child: bool
    disk_shards: int | None
    processes: tuple[ProcessFault, ...]
    source_rules: tuple[Rule, ...]
    output_rules: tuple[Rule, ...]
    ends_here: bool = False

    def describe(self) -> str:
        """In one line, what is drawn."""
        drivers = f"{self.drivers} drivers, " if self.drivers > 1 else ""
        child = ", decoding in a child" if self.in_child else ""
        where = f"{self.executor}, {drivers}{self.workers} workers{child}"
        faults = [str(one) for one in self.processes]
        if self.disk_shards is not None:
            faults.append(f"disk full after {self.disk_shards} shards")
        for side, rules in (("source", self.source_rules), ("output", self.output_rules)):
            faults += [f"{side}: {_text(rule)}" for rule in rules]
        return f"{where}, {self.source} -> {self.output}: {'; '.join(faults)}"


def draw(seed: int, shards: int) -> Schedule:
    """The schedule of a seed, for a job of so many shards."""
    rng = random.Random(seed)
    executor = rng.choice([LOCAL, LOCAL, LOCAL, LOCAL, LOCAL, ARRAY, ARRAY, RAY])
    source = rng.choice(list(SOURCES))
    output = rng.choice(["local", "s3", "s3"])
    has_server = output == "s3" or SOURCES[source] is not None
    full = executor == LOCAL and rng.random() < 0.3
    schedule = Schedule(
        seed=seed,
        executor=executor,
        drivers=2 if executor == ARRAY else 1,
        workers=rng.choice([1, 2]) if executor == LOCAL else 1,
        source=source,
        output=output,
        in_child=rng.random() < 0.2,
        disk_shards=rng.randint(1, shards - 3) if full else None,
        processes=(),
        source_rules=_source_rules(rng) if SOURCES[source] else (),
        output_rules=_output_rules(rng) if output == "s3" else (),
    )
    kinds = [*KILLS, *FREEZES]
    if executor != RAY:
        kinds.remove("kill raylet")
    if not has_server:
        kinds = [kind for kind in kinds if "server" not in kind]
    faults = [_process_fault(rng, rng.choice(kinds), shards) for _ in range(rng.randint(1, 3))]
    faults.sort(key=lambda fault: fault.commits)
    return replace(schedule, processes=tuple(faults))


def draw_short(seed: int, shards: int) -> Schedule:
    """The least that has it all: worker and driver are killed, the store fails; for every day.

    The driver goes while another worker starts, and what is left is done by the process that asks:
    starts are what a run costs.
    """
    rng = random.Random(seed)
    worker = replace(_process_fault(rng, "kill worker", shards), commits=shards // 2)
    driver = replace(worker, what="kill driver", delay_s=worker.delay_s + 0.2)
    # However fast they are, they are not done before; and commits come that nobody waits for.
    held = Rule("stall", "PUT", OUT + WRITTEN[0], after=worker.commits, times=shards, seconds=1.0)
    return Schedule(
        seed=seed,
        executor=LOCAL,
        drivers=1,
        workers=1,
        source="files",
        output="s3",
        in_child=False,
        disk_shards=None,
        processes=(worker, driver),
        source_rules=(),
        output_rules=(
            *(replace(rule, seconds=min(rule.seconds, 0.5)) for rule in _output_rules(rng)),
            held,
        ),
        ends_here=True,
    )


def _process_fault(rng: random.Random, what: str, shards: int) -> ProcessFault:
    seconds = rng.choice(FREEZES_S)
    if what == "kill server":
        seconds = round(rng.uniform(0.2, 6.0), 1)
    elif what == "freeze driver":
        seconds = min(seconds, 3.0)
    commits = rng.randint(0, shards - 2)
    return ProcessFault(what, commits, round(rng.uniform(0, 0.4), 2), seconds, rng.randint(0, 7))


def _source_rules(rng: random.Random) -> tuple[Rule, ...]:
    return tuple(_rule(rng, rng.choice(READS), "GET", "/corpus/.+", 8) for _ in range(2))


def _output_rules(rng: random.Random) -> tuple[Rule, ...]:
    found = []
    for _ in range(rng.randint(2, 4)):
        if rng.random() < 0.7:
            path = rng.choice(WRITTEN)
            found.append(_rule(rng, rng.choice(WRITES), "PUT|POST|DELETE", OUT + path, 8))
        else:
            kinds = [kind for kind in READS if kind != "short"]
            path = rng.choice(ALSO_READ)
            found.append(_rule(rng, rng.choice(kinds), "GET|HEAD", OUT + path, 4))
    return tuple(found)


def _rule(rng: random.Random, kind: str, method: str, path: str, most_after: int) -> Rule:
    return Rule(
        kind=kind,
        method=method,
        path=path,
        after=rng.randint(0, most_after),
        times=rng.choice([1, 1, 2, 3]),
        status=rng.choice(STATUSES),
        seconds=rng.choice(STALLS_S) if kind == "stall" else 1.0,
    )


def _text(rule: Rule) -> str:
    kind = str(rule.status) if rule.kind == "status" else rule.kind
    times = f" x{rule.times}" if rule.times > 1 else ""
    name = rule.path.removeprefix(OUT)
    return f"{kind}{times} at {rule.method.partition('|')[0]} {name} #{rule.after + 1}"
