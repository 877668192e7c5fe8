"""Workers of a pool that answer when a test says so, and a clock that goes on when it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Ref:
    """A call that a worker was sent."""

    worker: Worker
    kind: str
    args: tuple[Any, ...]


@dataclass(eq=False)
class Worker:
    """A worker that answers when the test says so."""

    index: int


@dataclass
class FakeWorkers:
    """Workers whose answers lie ready in `answers`."""

    answers: dict[Ref, Any] = field(default_factory=dict)
    started: list[Worker] = field(default_factory=list)
    killed: list[Worker] = field(default_factory=list)

    def start(self, index: int) -> Worker:
        self.started.append(Worker(index))
        return self.started[-1]

    def call(self, worker: Worker, kind: str, *args: Any) -> Ref:
        return Ref(worker, kind, args)

    def ended(self, calls: list[Ref], timeout_s: float) -> Iterator[tuple[Ref, Any]]:
        yield from [(ref, self.answers[ref]) for ref in calls if ref in self.answers]

    def kill(self, worker: Worker) -> None:
        self.killed.append(worker)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now
