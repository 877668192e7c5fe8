"""One run under its schedule: drivers are started until the job is done, and then looked at.

While the schedule lasts a driver may end with exit code 0 or 1, or be killed; nothing else, and
never with a traceback. Then everything is well again, and one more start must end with 0.
"""

from __future__ import annotations

import json
import os
import queue
import random
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from tests import waiting
from tests.chaos.faulty_server import Rule
from tests.chaos.jobs import start_extract
from tests.chaos.schedule import DEADLINE_S, RAY, SOURCES, ProcessFault, Schedule
from tests.chaos.world import BUCKET, World, marked
from tests.pipeline.outputs import grow_disk, small_disk

POLL_S = 0.02
# A start takes a tenth of this on an idle machine, an outage a bit more than the half.
START_S = 200.0
MOST_STARTS = 7
GONE_WITHIN_S = waiting.DEADLINE_S
ROOM = "200m"
# An empty output and what begins it, and a shard with what is written beside it meanwhile.
DISK_BEGIN_KIB, DISK_SHARD_KIB = 500, 180
MARK = "EARMILL_CHAOS"


@dataclass
class Outcome:
    """How a run went.

    Args:
        starts: Exit codes of all drivers, in the order of their starts.
        met: Faults that have come, of those drawn.
        problems: What must not be.
    """

    schedule: Schedule
    starts: list[int] = field(default_factory=list)
    met: int = 0
    drawn: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        """The run in a few words."""
        said = "ok" if not self.problems else f"BROKEN: {'; '.join(self.problems)}"
        codes = " ".join(str(code) for code in self.starts)
        return f"{self.met} of {self.drawn} faults met, exit codes {codes}: {said}"


class _Driver:
    """A driver's process; its events go into a queue, its standard error into a file."""

    def __init__(self, arguments: list[str], environment: dict[str, str], errors: Path) -> None:
        self.errors, self.heard = errors, queue.SimpleQueue[dict[str, object]]()
        self._file = errors.open("wb")
        self.process = start_extract(arguments, environment, self._file)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        began = time.monotonic()
        with self.errors.with_suffix(".events").open("w") as file:
            for line in self.process.stdout:
                file.write(f"{time.monotonic() - began:.2f} {line}")
                file.flush()
                with suppress(ValueError):
                    self.heard.put(json.loads(line))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._file.close()


class DisturbedRun:
    """See the module.

    Args:
        world: Where it happens. schedule: What happens. folder: Of its own.
    """

    def __init__(self, world: World, schedule: Schedule, folder: Path) -> None:
        self.world, self.schedule, self.folder = world, schedule, folder
        self.mark = f"{MARK}={schedule.seed}-{os.getpid()}"
        is_local = schedule.output == "local"
        name = f"run{schedule.seed}-{os.getpid()}"
        self.output = str(folder / "disk" / "out") if is_local else f"s3://{BUCKET}/{name}"
        self.outcome = Outcome(schedule)
        self._rng = random.Random(schedule.seed)
        self._todo = deque(schedule.processes)
        self._seen: set[object] = set()
        self._actions: list[tuple[float, Callable[[], bool]]] = []
        self._drivers: list[_Driver] = []
        self._frozen: set[int] = set()

    def run(self, compare: Callable[[str], list[str]]) -> Outcome:
        """Until it is done, or too much has gone wrong.

        Args:
            compare: What is wrong with the output at this address; asked once it is done.
        """
        began, schedule = time.monotonic(), self.schedule
        front_rules = {"s3": schedule.output_rules, "web": ()}
        side = SOURCES[schedule.source]
        if side is not None:
            front_rules[side] = (*schedule.source_rules, *front_rules[side])
        self.folder.mkdir(parents=True)
        with ExitStack() as stack:
            # Short: Ray's sockets lie below it.
            self.tmp = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ch-")))
            self._disk(stack)
            for name, front in self.world.fronts.items():
                front.begin(self.folder / name, front_rules[name])
            try:
                self._starts()
                self._all_is_well(front_rules)
            finally:
                self._end_all()
            self._leftovers()
            if not self.outcome.problems:
                self.outcome.problems += compare(self.output)
        drawn: dict[str, tuple[Rule, ...]] = front_rules
        self.outcome.drawn = len(schedule.processes) + sum(map(len, drawn.values()))
        self.outcome.drawn += schedule.disk_shards is not None
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    # -- starts -------------------------------------------------------------------------------

    def _starts(self) -> None:
        for _ in range(MOST_STARTS):
            codes = self._start(self.schedule.drivers)
            if self._is_full and 1 in codes:
                grow_disk(self._small, ROOM)
                self._is_full = False
                self.outcome.met += 1
            is_done = all(code == 0 for code in codes) or self.outcome.problems
            if is_done or self.schedule.ends_here:
                return

    def _all_is_well(self, rules: dict[str, tuple[Rule, ...]]) -> None:
        """Nothing disturbs any more: one start, and it is done."""
        self._todo.clear()
        for name, front in self.world.fronts.items():
            self.outcome.met += front.fired()
            front.begin(self.folder / f"calm-{name}", ())
        if self._is_full:
            grow_disk(self._small, ROOM)
            self._is_full = False
        codes = [self._end_here()] if self.schedule.ends_here else self._start(1)
        if codes != [0]:
            self._problem(f"a start without faults ended with {codes[0]}: {self._last_error()}")

    def _end_here(self) -> int:
        """The rest, by a driver in this process; its exit code."""
        end = run_job(JobSpec.load(self._job_file(0)), resume=True)
        self._note(end.message)
        return end.exit_code

    def _start(self, drivers: int) -> list[int]:
        """Drivers side by side until all have ended; their exit codes."""
        number = len(self.outcome.starts)
        for index in range(drivers):
            job = self._job_file(index)
            share = ["--join"] if index else ["--resume"]
            errors = self.folder / f"errors-{number}-{index}"
            self._drivers.append(_Driver([str(job), *share], self._environment(), errors))
        until = time.monotonic() + START_S
        while any(one.process.poll() is None for one in self._drivers):
            self._hear()
            self._act()
            if time.monotonic() > until:
                self._problem(f"still running after {START_S:.0f} s")
                break
            time.sleep(POLL_S)
        self._hear()
        codes = [one.process.poll() for one in self._drivers]
        ended, self._drivers = self._drivers, []
        for one in ended:
            one.close()
            self._check_words(one)
        self.outcome.starts += [-99 if code is None else code for code in codes]
        if unexpected := [code for code in codes if code not in (0, 1, -signal.SIGKILL, None)]:
            self._problem(f"exit code {unexpected[0]}: {self._last_error()}")
        return [-99 if code is None else code for code in codes]

    def _job_file(self, index: int) -> Path:
        schedule = self.schedule
        executor = schedule.executor if index == 0 else "local"
        run = {
            "executor": executor,
            "workers": schedule.workers,
            "shard_deadline_s": DEADLINE_S,
            "decode_in_child": schedule.in_child,
        }
        path = self.folder / f"job-{index}.yaml"
        return self.world.job(path, schedule.source, self.output, **run)

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        name, _, value = self.mark.partition("=")
        tmp = str(self.tmp)
        return {**kept, name: value, "TMPDIR": tmp, "RAY_TMPDIR": tmp, "PYTHONFAULTHANDLER": "1"}

    def _disk(self, stack: ExitStack) -> None:
        """The disk that is written to: the output's, or where files wait for their upload."""
        self._is_full = self.schedule.disk_shards is not None
        self._small = self.folder / "disk"
        if not self._is_full:
            self._small.mkdir()
            return
        kib = DISK_BEGIN_KIB + DISK_SHARD_KIB * (self.schedule.disk_shards or 0)
        if self.schedule.output != "local":
            self._small.mkdir()
            self._small = self.tmp / "t"
            # Only what is being written lies there, and goes again.
            kib = DISK_SHARD_KIB
            self.tmp = self._small
        stack.enter_context(small_disk(self._small, f"{kib}k"))

    # -- faults -------------------------------------------------------------------------------

    def _hear(self) -> None:
        for one in self._drivers:
            while not one.heard.empty():
                event = one.heard.get()
                if event["event"] == "shard_done":
                    self._seen.add(event["shard_id"])
                if event["event"] == "error" or event.get("status") == "failed":
                    self._note(str(event.get("message")))
        while self._todo and len(self._seen) >= self._todo[0].commits:
            fault = self._todo.popleft()
            self._later(fault.delay_s, lambda fault=fault: self._do(fault))

    def _later(self, seconds: float, action: Callable[[], bool]) -> None:
        self._actions.append((time.monotonic() + seconds, action))

    def _act(self) -> None:
        """What is due; what cannot be done yet stays due."""
        now = time.monotonic()
        due = [one for one in self._actions if one[0] <= now]
        self._actions = [one for one in self._actions if one[0] > now]
        for when, action in due:
            if not action():
                self._actions.append((when, action))

    def _do(self, fault: ProcessFault) -> bool:
        verb, _, target = fault.what.partition(" ")
        if target == "server":
            done = self._disturb_servers(verb, fault.seconds)
        else:
            done = self._disturb(verb, self._targets(target), fault)
        self.outcome.met += done
        return done

    def _disturb_servers(self, verb: str, seconds: float) -> bool:
        side = SOURCES[self.schedule.source]
        names = {"s3"} if self.schedule.output == "s3" else set()
        for name in names | ({side} if side else set()):
            front = self.world.fronts[name]
            if verb == "kill":
                front.kill()
                self._later(seconds, lambda front=front: front.start() is None)
            else:
                front.send(signal.SIGSTOP)
                self._later(seconds, lambda front=front: front.send(signal.SIGCONT) is None)
        return True

    def _disturb(self, verb: str, targets: list[psutil.Process], fault: ProcessFault) -> bool:
        if not targets:
            return False
        target = targets[fault.which % len(targets)]
        with suppress(psutil.Error):
            if verb == "kill":
                target.kill()
                return True
            target.suspend()
            self._frozen.add(target.pid)
            self._later(fault.seconds, lambda: self._wake(target))
            return True
        return False

    def _wake(self, process: psutil.Process) -> bool:
        with suppress(psutil.Error):
            process.resume()
        self._frozen.discard(process.pid)
        return True

    def _targets(self, kind: str) -> list[psutil.Process]:
        drivers = [one.process for one in self._drivers if one.process.poll() is None]
        if kind == "driver":
            return [psutil.Process(one.pid) for one in drivers]
        found = []
        for one in drivers:
            with suppress(psutil.Error):
                children = psutil.Process(one.pid).children(recursive=True)
                found += [child for child in children if _is(kind, child)]
        return sorted(found, key=lambda process: process.pid)

    # -- the end ------------------------------------------------------------------------------

    def _end_all(self) -> None:
        for _, action in self._actions:
            action()  # who is frozen wakes, who is away comes back
        self._actions.clear()
        for one in self._drivers:
            one.close()

    def _leftovers(self) -> None:
        """Nothing of ours is left: no process, and no temporary file that the next would not
        remove. Ray's own processes end after a killed driver in their own time; its folder stays.
        """
        from earmill.pipeline.storage.scratch import sweep

        until = time.monotonic() + GONE_WITHIN_S
        while (alive := marked(self.mark)) and time.monotonic() < until:
            time.sleep(0.2)
        for pid in alive:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                if self.schedule.executor != RAY:
                    self._problem(f"left behind: {' '.join(process.cmdline())[:120]}")
                process.kill()
        sweep(parent=str(self.tmp))
        if left := sorted(path.name for path in self.tmp.iterdir() if path.name != "ray"):
            self._problem(f"left behind in the folder for temporary files: {', '.join(left[:5])}")

    def _check_words(self, driver: _Driver) -> None:
        text = driver.errors.read_text(errors="replace")
        if "Traceback (most recent call last)" in text:
            self._problem(f"a traceback: {text.strip().splitlines()[-1][:200]}")
        elif text.strip():
            self._note(text.strip().splitlines()[-1])

    def _note(self, text: str) -> None:
        with (self.folder / "said.txt").open("a") as file:
            file.write(f"{text}\n")

    def _last_error(self) -> str:
        path = self.folder / "said.txt"
        return path.read_text().splitlines()[-1][:300] if path.exists() else "no word"

    def _problem(self, text: str) -> None:
        self.outcome.problems.append(text)


def _is(kind: str, process: psutil.Process) -> bool:
    try:
        name, command = process.name(), " ".join(process.cmdline())
    except psutil.Error:
        return False
    if kind == "raylet":
        return name == "raylet"
    return "pipeline.worker.worker_process" in command or command.startswith("ray::ShardWorker")
