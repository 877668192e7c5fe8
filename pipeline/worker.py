"""The Ray actor: one process that runs shards, at most two at a time, and answers in plain values.

It knows Ray and nothing about audio: the work is a `Runner`, built inside the process by a factory,
so that warm-up is a call that can be repeated and a failing constructor cannot end the actor for
good. An exception becomes an `Outcome` here; only the death of the process reaches Ray. Whether a
shard is done is read from its commit record, never from an outcome.
"""

from __future__ import annotations

import errno
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.messages import CONCURRENT_SHARDS, Outcome, PublishError, Runner, ShardOrder

if TYPE_CHECKING:
    from pipeline.sources.base import Item

# Writing again will not help with these; the run stops and says why.
PERMANENT_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}
)
MESSAGE_LIMIT = 600


class ShardWorker:
    """A Runner behind remote calls.

    Args:
        make_runner: Builds the runner; called once, by the first warm-up.
        environment: Variables to set before anything heavy is imported (thread counts).
    """

    def __init__(
        self, make_runner: Callable[[], Runner], environment: Mapping[str, str] | None = None
    ) -> None:
        os.environ.update(environment or {})
        self._make_runner = make_runner
        self._runner: Runner | None = None

    @ray.method(concurrency_group="shards")
    def warm_up(self) -> Outcome:
        """Build and warm the runner; an outcome with `info`, or the reason why not."""
        try:
            if self._runner is None:
                self._runner = self._make_runner()
            return Outcome(ok=True, info=self._runner.warm_up())
        except Exception as error:
            self._runner = None
            return Outcome(ok=False, stage="warm_up", message=one_line(error))

    @ray.method(concurrency_group="shards")
    def run(self, order: ShardOrder) -> Outcome:
        """Run and publish one shard."""
        return self._guard(lambda runner: runner.run(order))

    @ray.method(concurrency_group="shards")
    def probe(self, items: Sequence[Item]) -> Outcome:
        """Run rows without publishing them; the process may die of it."""
        return self._guard(lambda runner: runner.probe(items))

    @ray.method(concurrency_group="control")
    def status(self) -> Outcome:
        """Audio seconds done in running shards; has its own thread, so it answers at once."""
        runner = self._runner
        return Outcome(ok=True, value=runner.seconds_in_flight() if runner is not None else 0.0)

    def _guard(self, call: Callable[[Runner], None]) -> Outcome:
        if self._runner is None:
            # The process was restarted behind the driver's back.
            warm = self.warm_up()
            if not warm.ok or self._runner is None:
                return warm
        try:
            call(self._runner)
        except PublishError as error:
            cause = error.__cause__ or error
            return Outcome(
                ok=False, stage="publish", message=one_line(cause), permanent=is_permanent(cause)
            )
        except Exception as error:
            return Outcome(ok=False, stage="rows", message=one_line(error, where=True))
        return Outcome(ok=True)


def one_line(error: BaseException, *, where: bool = False) -> str:
    """An exception as one line: class, text and, on request, the innermost place."""
    text = " ".join(str(error).split()) or "no message"
    place = ""
    frames = traceback.extract_tb(error.__traceback__)
    if where and frames:
        last = frames[-1]
        place = f" ({os.path.basename(last.filename)}:{last.lineno} {last.name})"
    return f"{type(error).__name__}: {text}"[:MESSAGE_LIMIT] + place


def is_permanent(error: BaseException) -> bool:
    """Whether an I/O error will come back whatever we do: no space, no right, read-only."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in PERMANENT_ERRNOS:
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def spawn_worker(
    make_runner: Callable[[], Runner],
    *,
    environment: Mapping[str, str] | None = None,
    num_cpus: float = 0.0,
    num_gpus: float = 0.0,
    node_id: str | None = None,
) -> Any:
    """Start one worker actor and return its handle; it is not warm yet.

    Args:
        num_cpus: What to reserve. Keep the sum below the cluster's CPUs: a cluster whose CPUs are
            all reserved cannot run anything else and hangs.
        node_id: The node to prefer; another one is taken when it is gone.
    """
    options: dict[str, Any] = {
        "num_cpus": num_cpus,
        "num_gpus": num_gpus,
        "max_restarts": -1,
        "max_task_retries": 0,
        "concurrency_groups": {"shards": CONCURRENT_SHARDS, "control": 1},
    }
    if node_id is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id, soft=True)
    return ray.remote(**options)(ShardWorker).remote(make_runner, environment)
