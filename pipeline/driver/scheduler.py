"""The driver loop: takes work from the ledger, gives it to the pool, watches the clock.

A warm worker has two shards in flight on a CPU, and as many as fill the launches on a GPU. Past its
deadline a shard is run a second time by an idle worker, which is safe because only one of them can
commit. Past twice the deadline the worker is taken for hung, and killed.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from earmill.pipeline.common.errors import OvertakenError
from earmill.pipeline.common.monitoring import DRIVER, IDLE, in_order
from earmill.pipeline.driver import events
from earmill.pipeline.driver.shard_ledger import Assignment, Result, ShardLedger
from earmill.pipeline.driver.worker_pool import (
    DEAD,
    READY,
    WARMING,
    WORK,
    WorkerCall,
    WorkerPool,
    WorkerSlot,
)
from earmill.pipeline.spec.job import GRACE_S
from earmill.pipeline.worker.messages import CONCURRENT_SHARDS, LostCall, Outcome

BASE_S = 300.0  # Start-up, compilation and slow storage, whatever the audio.
WALL_PER_AUDIO_S = 10.0  # Before a rate is known: a shard may take ten times its audio.
OVER_MEDIAN = 20.0  # Once three rates are known: a shard may take 20 times their median.
RATES_NEEDED = 3
HUNG_FACTOR = 2.0


class Deadlines:
    """Deadlines of shards: generous for the first three shards, then learned from their rates. The
    job's deadlines are `fixed_s` for a shard and `row_s` for each of its rows."""

    def __init__(self, fixed_s: float | None = None, row_s: float | None = None) -> None:
        self._fixed_s, self._row_s = fixed_s, row_s
        self._rates: list[float] = []  # Sorted.
        self._wall_per_audio_s = WALL_PER_AUDIO_S

    def learn(self, wall_s: float, audio_s: float) -> None:
        if audio_s > 0:
            insort(self._rates, wall_s / audio_s)
        count = len(self._rates)
        if count >= RATES_NEEDED:
            middle = self._rates[(count - 1) // 2 : count // 2 + 1]
            self._wall_per_audio_s = OVER_MEDIAN * sum(middle) / len(middle)

    def limit_s(self, audio_s: float) -> float:
        return BASE_S + self._wall_per_audio_s * audio_s if self._fixed_s is None else self._fixed_s

    def hung_s(self, audio_s: float, rows: int) -> float:
        hung_s = HUNG_FACTOR * self.limit_s(audio_s)
        return hung_s if self._row_s is None else min(hung_s, self._row_s * rows)


class CpuAccount:
    """CPU seconds of a run, from the first warm worker on; `slots` is the pool's growing list. The
    seconds of a process after its last report are lost."""

    def __init__(self, slots: Sequence[WorkerSlot], clock: Callable[[], float]) -> None:
        self._slots, self._clock, self.began_s = slots, clock, clock()
        self._of_workers: dict[tuple[int, int], Mapping[str, float]] = {}
        self._driver_before_s = time.process_time()

    def heard(self, worker: tuple[int, int], cpu_s: Mapping[str, float]) -> None:
        if cpu_s:
            self._of_workers[worker] = cpu_s

    def seconds(self) -> dict[str, float]:
        of_workers = Counter[str]()
        for cpu_s in self._of_workers.values():
            of_workers.update(cpu_s)
        spent = {**of_workers, DRIVER: time.process_time() - self._driver_before_s}
        now_s = self._clock()
        cores_s = sum(
            slot.info.threads * max(0.0, min(now_s, slot.left_s) - max(self.began_s, slot.came_s))
            for slot in self._slots
            if slot.info is not None
        )
        spent[IDLE] = max(0.0, cores_s - sum(spent.values()))
        return in_order(spent)


POLL_S = 0.2
STATUS_EVERY_S = 1.0
# Most workers that are asked for their status at a time; the others are asked a second later.
STATUS_AT_ONCE = 100
# Each turn of the loop looks at all workers. From 100 workers on a turn lasts 20 ms at least, so
# that calls that end together share it.
MANY_WORKERS, TURN_S = 100, 0.02
WARM_UP_LIMIT_S = 900.0
WARM_UP_ATTEMPTS = 3
WARM_UP_PAUSE_S = 1.0
# A worker opens the source in its warm-up, so it tries as long as a run bears an outage.
OUTAGE_WARM_UP_S = 100.0
OUTAGE_WARM_UP_PAUSE_S = 10.0
# Ray starts a dead actor again in a second or two; until then calls to it fail at once.
RESTART_LIMIT_S = 60.0


class Scheduler:
    """Runs a ledger's shards on a pool until each is settled, or until told to stop; shards in
    flight then have `drain_s` seconds. Each turn of the loop calls `on_tick`, which may raise."""

    def __init__(
        self,
        ledger: ShardLedger,
        pool: WorkerPool,
        *,
        deadlines: Deadlines | None = None,
        sink: events.Sink = events.ignore,
        observe: events.Sink = events.ignore,
        stop: events.StopRequest | None = None,
        on_tick: Callable[[], None] = lambda: None,
        drain_s: float = GRACE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger, self._pool, self._sink, self._observe = ledger, pool, sink, observe
        self._deadlines = deadlines or Deadlines()
        self._stop, self._drain_s, self._clock = stop or events.StopRequest(), drain_s, clock
        self._on_tick = on_tick
        self._started = self._last_status = self._last_check = clock()
        self._next_asked, self._heard = 0, False
        self._cpu: CpuAccount | None = None
        self._drain_until: float | None = None

    def run(self) -> Result:
        self._stop.watched = True
        turned = self._clock()
        try:
            self._pool.start()
            while not self._finished():
                self._dispatch()
                if len(self._pool.slots) >= MANY_WORKERS:
                    time.sleep(max(0.0, turned + TURN_S - self._clock()))
                    turned = self._clock()
                for call, outcome in self._pool.wait(POLL_S, self._look_ahead):
                    self._settle(call, outcome)
                if self._heard:
                    self._heard = False
                    in_flight_s = sum(slot.seconds_in_flight for slot in self._pool.slots)
                    self._sink(events.InFlight(in_flight_s))
                self._on_tick()
                self._check_stop()
                self._check_deadlines()
                self._poll_status()
        finally:
            self._stop.watched = False
            if self._cpu is not None:
                self._ledger.result.worked_s = self._clock() - self._cpu.began_s
                self._ledger.result.cpu_s = self._cpu.seconds()
            self._pool.close()
        return self._ledger.result

    @property
    def _stopping(self) -> bool:
        return bool(self._ledger.result.fatal) or self._drain_until is not None

    def _finished(self) -> bool:
        if self._ledger.all_settled:
            return True
        if not self._stopping:
            return False
        out_of_time = self._drain_until is not None and self._clock() >= self._drain_until
        return out_of_time or not any(slot.work for slot in self._pool.slots)

    def _check_stop(self) -> None:
        if not self._stop.requests:
            return
        if self._drain_until is None:
            self._ledger.result.stopped = True
            self._drain_until = self._clock() + self._drain_s
            in_flight = sum(len(slot.work) for slot in self._pool.slots)
            self._sink(events.Draining(self._stop.reason, in_flight))
        if self._stop.requests > 1:
            self._drain_until = self._clock()

    def _dispatch(self) -> None:
        if self._stopping or self._ledger.nothing_waits:
            return
        # The first warm worker must leave some shards to the others.
        living = sum(slot.state in (WARMING, READY) for slot in self._pool.slots)
        share = max(CONCURRENT_SHARDS, -(-self._ledger.unsettled // max(1, living)))
        served = self._pool.slots
        while served and not self._stopping:
            slots = [slot for slot in served if slot.room > 0]
            served = []
            # Empty workers first: a shard prefetched on a busy worker must not starve an idle one.
            for slot in sorted(slots, key=lambda slot: len(slot.work)):
                if len(slot.work) >= share or any(call.payload.alone for call in slot.work):
                    continue
                busy = any(other.work for other in self._pool.slots)
                assignment = self._ledger.next(idle=slot.idle, busy=busy)
                if assignment is not None:
                    self._send(slot, assignment)
                    served.append(slot)

    def _send(self, slot: WorkerSlot, assignment: Assignment) -> None:
        assignment.work.copies += 1
        if assignment.probe is None:
            order = assignment.work.order(self._ledger.witnesses)
            self._pool.submit(slot, "run", order, payload=assignment)
        else:
            self._pool.submit(slot, "probe", assignment.probe, payload=assignment)

    def _look_ahead(self, calls: Sequence[WorkerCall]) -> None:
        self._ledger.look_ahead(call.payload.work for call in calls if call.kind == "run")

    def _settle(self, call: WorkerCall, outcome: Outcome) -> None:
        slot = call.slot
        if call.kind == "warm_up":
            self._settle_warm_up(slot, outcome)
            return
        if isinstance(outcome, LostCall):
            self._settle_lost(call, outcome)
        else:
            worker = (slot.index, call.generation)
            if self._cpu is not None and call.kind in WORK:
                self._cpu.heard(worker, outcome.cpu_s)
            if outcome.counts is not None:
                self._observe(events.WorkerSays(*worker, outcome.cpu_s, outcome.counts))
        if call.kind == "status":
            if isinstance(outcome, LostCall):
                slot.seconds_in_flight = 0.0
            else:
                slot.under_way(outcome.value)
                slot.waits_for = outcome.outage
            self._heard = True
        elif outcome.stage == "overtaken":
            raise OvertakenError(outcome.message)
        elif outcome.stage == "device":
            # The process is replaced; shards together on it are not charged.
            others = list[WorkerCall]()
            if call.generation == slot.generation:
                self._sink(events.WorkerLost(slot.index, outcome.message))
                others = self._pool.replace(slot)
            for one in (call, *others):
                one.shared_worker = one.shared_worker or bool(others)
                self._settle_work(one, LostCall(outcome.message))
        else:
            self._settle_work(call, outcome)

    def _settle_lost(self, call: WorkerCall, lost: LostCall) -> None:
        """Handle a lost call: its process has died with all its calls. A process that was started
        in the slot since then is left alone."""
        slot = call.slot
        together = [one for one in slot.work if one.generation == call.generation]
        together += [call] if call.kind in WORK else []
        for one in together:
            one.shared_worker = one.shared_worker or len(together) > 1
        if slot.state == READY and call.generation == slot.generation:
            self._sink(events.WorkerLost(slot.index, lost.message))
            self._pool.restart(slot)

    def _settle_work(self, call: WorkerCall, outcome: Outcome) -> None:
        assignment: Assignment = call.payload
        assignment.work.copies -= 1
        assignment.work.worker = call.slot.index
        if assignment.probe is not None:
            self._ledger.probe_ended(assignment.work, outcome)
            return
        call.slot.ended(assignment.seconds)
        if outcome.ok:
            self._deadlines.learn(self._clock() - call.head_since, assignment.seconds)
        shard_id, index = assignment.work.shard_id, call.slot.index
        notes = outcome.notes
        self._observe(events.ShardAttempt(shard_id, index, outcome.message, notes))
        for row in notes.bad if notes is not None and notes.won else ():
            bad = (row.row_id, row.stage, row.error_class, row.message)
            self._sink(events.RowQuarantined(shard_id, *bad, index))
        self._ledger.shard_ended(assignment.work, outcome, certain=not call.shared_worker)

    def _settle_warm_up(self, slot: WorkerSlot, outcome: Outcome) -> None:
        if outcome.ok and outcome.info is not None:
            slot.state, slot.info, slot.failures = READY, outcome.info, 0
            if slot.info.note and slot.generation == 1:
                self._sink(events.Note(f"worker {slot.index}: {slot.info.note}"))
            if self._cpu is None:
                self._cpu = CpuAccount(self._pool.slots, self._clock)
                start_s = round(self._cpu.began_s - self._started, 3)
                workers, info = len(self._pool.slots), slot.info
                self._sink(events.WorkersReady(workers, info.threads, info.device, start_s))
            return
        now = self._clock()
        if outcome.restarting and now - slot.warming_since < RESTART_LIMIT_S:
            slot.retry_s = now + POLL_S
        else:
            self._warm_up_failed(slot, outcome)

    def _warm_up_failed(self, slot: WorkerSlot, outcome: Outcome) -> None:
        """Warm up again, in a new process where that one is dead, or give the worker up."""
        now, reason = self._clock(), outcome.message
        slot.failing_since = slot.failing_since if slot.failures else now
        slot.failures += 1
        if outcome.permanent:
            self._sink(events.Note(f"worker {slot.index} is given up: {reason}"))
        else:
            self._sink(events.WorkerLost(slot.index, f"warm-up failed: {reason}"))
        again = slot.failures < WARM_UP_ATTEMPTS
        again = again or (bool(outcome.outage) and now - slot.failing_since < OUTAGE_WARM_UP_S)
        if again and not outcome.permanent:
            if isinstance(outcome, LostCall) or outcome.stage == "device":
                self._pool.replace(slot)
            else:
                pause_s = OUTAGE_WARM_UP_PAUSE_S if outcome.outage else WARM_UP_PAUSE_S
                slot.retry_s = now + pause_s
            return
        self._pool.retire(slot)
        if all(other.state == DEAD for other in self._pool.slots):
            self._ledger.result.fatal = f"no worker could be started: {reason}"

    def _check_deadlines(self) -> None:
        now = self._clock()
        if now - self._last_check < POLL_S:
            return
        self._last_check = now
        for slot in self._pool.slots:
            if slot.retry_s is not None and now >= slot.retry_s:
                self._pool.warm_up(slot)
            elif slot.state == WARMING and now - slot.warming_since > WARM_UP_LIMIT_S:
                late = LostCall(f"not ready within {WARM_UP_LIMIT_S:.0f} s")
                self._warm_up_failed(slot, late)
            elif slot.work:
                self._check_head(slot, now - slot.work[0].head_since)

    def _check_head(self, slot: WorkerSlot, waited_s: float) -> None:
        """Kill a worker whose oldest work hangs, or run slow work a second time elsewhere."""
        assignment: Assignment = slot.work[0].payload
        hung_s = self._deadlines.hung_s(assignment.seconds, assignment.rows)
        if waited_s > hung_s:
            reason, outage = f"no result within {hung_s:g} s, the worker was killed", slot.waits_for
            if outage:
                reason += f" while it waited for the {outage}"
            self._sink(events.WorkerLost(slot.index, reason))
            head, *others = self._pool.replace(slot)
            for call in others:
                self._ledger.put_back(call.payload.work)
            self._settle_work(head, LostCall(reason, outage=outage))
        elif (
            assignment.probe is None
            and waited_s > self._deadlines.limit_s(assignment.seconds)
            and assignment.work.copies < 2
            and not self._stopping
            and self._ledger.nothing_waits
        ):
            idle = next((slot for slot in self._pool.slots if slot.idle), None)
            if idle is not None:
                self._send(idle, Assignment(assignment.work, alone=True))

    def _poll_status(self) -> None:
        now = self._clock()
        if now - self._last_status < STATUS_EVERY_S:
            return
        self._last_status = now
        slots = self._pool.slots
        for slot in slots:
            if not slot.work:
                slot.seconds_in_flight = 0.0
        for _ in range(min(len(slots), STATUS_AT_ONCE)):
            slot = slots[self._next_asked % len(slots)]
            self._next_asked += 1
            if slot.work and not slot.asked:
                self._pool.submit(slot, "status")
        states = Counter(slot.state for slot in slots)
        self._observe(events.PoolState(self._ledger.states(), states))
        self._heard = True
