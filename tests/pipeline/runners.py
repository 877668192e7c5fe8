"""Runners without audio for the scheduler tests: what a row does is spelled in its id.

    ok-*      nothing              die-*    kills the process        hang-*   never returns
    once-*    kills the process the first time it is met             raise-*  raises
    pair-*    kills the process when two of them are in one call
    late-*    kills the process after its shard was committed
    slow-*    the first call waits until another attempt has committed the shard
    full-*    the disk is full when its shard is written
    meet-*    waits until another shard is running beside it
    freeze-*  stops its process the first time it is met, until another wakes it
    big-*     has too little memory unless it may take less
    oom-*     is killed as by the system while it takes as much as usual
    both-*    waits until two processes have begun shards
    lost-*    loses its device the first time it is met, while a hold-* is held
    hold-*    never returns the first time it is met

A commit is a file linked to its name, as on a real local output. Worker processes import this
module alone: a process that imports `Shard` and `Item` takes half a CPU second more.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from earmill.pipeline.common.errors import DeviceLost
from earmill.pipeline.worker.messages import PublishError, ShardOrder, WorkerInfo

if TYPE_CHECKING:
    from earmill.pipeline.dataset.commit_record import Committed
    from earmill.pipeline.planning.shards import Shard

# What a good row is found to hold once it is decoded; the plan guesses 1 s.
DECODED_SECONDS = 1.5


def shard(shard_id: str, *row_ids: str, seconds: float = 1.0) -> Shard:
    """A planned shard of rows with these ids."""
    from earmill.pipeline.planning.shards import Shard
    from earmill.pipeline.sources.base import Item

    items = tuple(Item(row_id=row_id, uri=row_id, seconds=seconds) for row_id in row_ids)
    return Shard(shard_id, items)


@dataclass(frozen=True)
class SentRow:
    """The part of an `Item` that a `FileRunner` reads."""

    row_id: str


@dataclass(frozen=True)
class SentShard:
    """The part of a `Shard` that a `FileRunner` reads."""

    shard_id: str
    items: tuple[SentRow, ...]


@dataclass(frozen=True)
class MakeRunner:
    """Builds the runner inside the worker; `broken` makes its warm-up fail."""

    root: str
    broken: bool = False

    def __call__(self) -> FileRunner:
        if self.broken:
            raise RuntimeError("no such device")
        return FileRunner(Path(self.root))


class FileRunner:
    """Commits row ids to files under `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def warm_up(self) -> WorkerInfo:
        return WorkerInfo(pid=os.getpid(), device="cpu", threads=1)

    def seconds_in_flight(self) -> float:
        return 0.0

    def cpu_s(self) -> dict[str, float]:
        return {"model": 0.25}  # in all, so no sum of several

    def waits_for(self) -> str:
        return ""

    def run(self, order: ShardOrder) -> None:
        mark = self.root / f"running-{order.attempt}"
        with self._counting():
            mark.touch()
            running = len(list(self.root.glob("running-*")))
            (self.root / f"seen-{running}").touch()
        try:
            ids = [item.row_id for item in order.shard.items if item.row_id not in order.culprits]
            self._take_memory(ids, order.memory_share)
            self._process(ids, order.shard.shard_id)
            self._publish(order, ids)
        finally:
            mark.unlink()

    def probe(self, items: Sequence[SentRow]) -> None:
        with (self.root / "probes.txt").open("a") as file:
            file.write(" ".join(i.row_id for i in items) + "\n")
        self._process([item.row_id for item in items], "")

    def _process(self, ids: list[str], shard_id: str) -> None:
        for row_id in ids:
            kind = row_id.split("-")[0]
            if kind == "die" or (kind == "once" and self._first(row_id)):
                os._exit(139)
            if kind == "hang":
                time.sleep(3600)
            if kind == "raise":
                raise ArithmeticError(f"cannot digest {row_id}")
            if kind == "slow" and self._first(row_id):
                while not (self.root / f"{shard_id}.json").exists():
                    time.sleep(0.02)
            if kind == "meet":
                self._meet()
            if kind == "freeze" and self._first(row_id):
                (self.root / "frozen").write_text(str(os.getpid()))
                # To this thread: sent to the process, another one may take it, and this one runs
                # on and commits before it is stopped.
                signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            if kind == "both":
                (self.root / f"pid-{os.getpid()}").touch()
                self._wait_for("pid-*", 2)
            if kind == "lost" and self._first(row_id):
                self._wait_for("met-hold-*")
                raise DeviceLost("the GPU was lost: a launch of 2 clips: CUDA_ERROR_LAUNCH_FAILED")
            if kind == "step":
                time.sleep(0.3)
            if kind == "hold" and self._first(row_id):
                time.sleep(3600)
        if sum(row_id.startswith("pair-") for row_id in ids) > 1:
            os._exit(139)

    def _take_memory(self, ids: list[str], share: float) -> None:
        kinds = {row_id.split("-")[0] for row_id in ids}
        if "big" in kinds and share > 0.1:
            raise MemoryError("4 GB")
        if "oom" in kinds and share == 1.0:
            os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """One at a time, of threads and processes alike: two that begin together are two."""
        with (self.root / "counting").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _meet(self) -> None:
        self._wait_for("seen-*", 2)

    def _wait_for(self, pattern: str, files: int = 1) -> None:
        for _ in range(3000):
            if len(list(self.root.glob(pattern))) >= files:
                return
            time.sleep(0.02)
        raise TimeoutError(f"no {files} of {pattern} came")

    def _publish(self, order: ShardOrder, ids: list[str]) -> None:
        if any(row_id.startswith("full-") for row_id in ids):
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            except OSError as error:
                raise PublishError("shard not written") from error
        # Whole or not at all: the process may be killed by a row of another shard meanwhile.
        temporary = self.root / f"commit-{order.attempt}"
        temporary.write_text(
            json.dumps({"ok": ids, "bad": dict(order.culprits), "pid": os.getpid()})
        )
        try:
            os.link(temporary, self.root / f"{order.shard.shard_id}.json")
        except FileExistsError:
            (self.root / f"too-late-{os.getpid()}").touch()
            return
        if any(row_id.startswith("late-") for row_id in ids):
            os._exit(139)

    def _first(self, row_id: str) -> bool:
        try:
            os.close(os.open(self.root / f"met-{row_id}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class Telling:
    """A runner that tells whether garbage is looked for: while it warms up, and when asked."""

    def warm_up(self) -> WorkerInfo:
        return WorkerInfo(pid=os.getpid(), device="cpu", threads=1, note=str(gc.isenabled()))

    def seconds_in_flight(self) -> float:
        return float(gc.isenabled())

    def cpu_s(self) -> dict[str, float]:
        return {}

    def waits_for(self) -> str:
        return ""


@dataclass(frozen=True)
class MakeTelling:
    """Builds it inside the process; told so, it fails, and says whether garbage is looked for."""

    fails: bool = False

    def __call__(self) -> Telling:
        if self.fails:
            raise RuntimeError(f"garbage is looked for: {gc.isenabled()}")
        return Telling()


def read_commit(root: Path, shard_id: str) -> dict | None:
    """The content of a commit file, None when there is none."""
    path = root / f"{shard_id}.json"
    return json.loads(path.read_text()) if path.exists() else None


def committed(root: Path, shard_id: str) -> Committed | None:
    """Return the content of a commit file as the scheduler wants it."""
    from earmill.pipeline.dataset.commit_record import Committed

    record = read_commit(root, shard_id)
    if record is None:
        return None
    ok, bad = len(record["ok"]), len(record["bad"])
    return Committed(rows_ok=ok, rows_bad=bad, nbytes=0, seconds=DECODED_SECONDS * ok)
