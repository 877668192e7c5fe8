"""What a run cost, in CPU seconds by part: its workers, its driver, and cores that waited.

Workers say what they have spent whenever a shard of theirs ends, all in all since they were warm;
the last word of each process counts. What a process that died had spent since then is lost.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from earmill.pipeline.common.timing import DRIVER, IDLE, in_order

if TYPE_CHECKING:
    from earmill.pipeline.driver.pool import Slot


class CpuAccount:
    """One run's CPU time, from the first warm worker on.

    Args:
        slots: The places of the workers, as they are later too.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._of_workers: dict[tuple[int, int], Mapping[str, float]] = {}
        self._began_s = time.monotonic()
        self._driver_before_s = time.process_time()

    def heard(self, worker: tuple[int, int], cpu_s: Mapping[str, float]) -> None:
        """What a worker, by slot and generation, has spent so far."""
        if cpu_s:
            self._of_workers[worker] = cpu_s

    def seconds(self) -> dict[str, float]:
        """CPU seconds by part, those that were not used among them."""
        spent = dict[str, float]()
        for of_worker in self._of_workers.values():
            for part, seconds in of_worker.items():
                spent[part] = spent.get(part, 0.0) + seconds
        spent[DRIVER] = time.process_time() - self._driver_before_s
        spent[IDLE] = max(0.0, self._cores_s() - sum(spent.values()))
        return in_order(spent)

    def _cores_s(self) -> float:
        """Seconds times cores that the workers had: nodes come and go."""
        now_s = time.monotonic()
        return sum(
            slot.info.threads * max(0.0, min(now_s, slot.left_s) - max(self._began_s, slot.came_s))
            for slot in self._slots
            if slot.info is not None
        )
