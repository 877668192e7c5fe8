"""Workers on GPUs as the driver sees them: asked for, refused, fallen back, lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from amtcore.errors import BackendError, DeviceLostError, DeviceMemoryError
from amtcore.kernels.gpu import device as device_facts
from amtcore.kernels.gpu.device import DeviceFacts
from earmill.pipeline.common.errors import DeviceError, DeviceLost
from earmill.pipeline.driver import events
from earmill.pipeline.driver.executors import WorkerRequest
from earmill.pipeline.driver.executors.local import LocalWorkers
from earmill.pipeline.driver.placement import Placement
from earmill.pipeline.driver.scheduler import Scheduler
from earmill.pipeline.driver.shard_ledger import ShardLedger
from earmill.pipeline.driver.worker_pool import DEAD, READY, WorkerPool
from earmill.pipeline.worker import device, models
from earmill.pipeline.worker.device import Gpu, check_gpu, device_errors, find_gpu
from earmill.pipeline.worker.launches import DeviceFull
from earmill.pipeline.worker.messages import CONCURRENT_SHARDS, Outcome, ShardOrder, WorkerInfo
from earmill.pipeline.worker.worker_process import ShardWorker
from tests.pipeline.runners import shard
from tests.pipeline.visible_gpus import Looking

REASON = "the driver finds no device; check nvidia-smi"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose kernels say why there is none."""
    from amtcore.kernels.gpu import device as available

    monkeypatch.delenv("AMTCORE_GPU", raising=False)
    monkeypatch.setattr(available, "why_no_gpu", lambda: REASON)


@pytest.fixture
def warm(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], models.WarmModels]:
    """Warm up a job without models, on the wanted device."""
    job: Any = None
    monkeypatch.setattr(models, "build_extractors", lambda *arguments: [])
    return lambda wanted: models.warm_models(job, 1, wanted)


Warm = Callable[[str], models.WarmModels]


@pytest.mark.usefixtures("no_gpu")
def test_cuda_without_a_gpu_says_why_and_auto_goes_to_the_cpu(warm: Warm) -> None:
    for ask in (check_gpu, find_gpu, lambda: warm("cuda")):
        with pytest.raises(DeviceError) as caught:
            ask()
        assert str(caught.value) == (
            f"run.device: expected a GPU that works, got none: {REASON}; or set run.device to auto "
            "or cpu"
        )
    assert warm("auto").gpu is None
    assert warm("auto").note == f"the models run on CPU: {REASON}"
    assert (warm("cpu").gpu, warm("cpu").note) == (None, "")


def test_a_gpu_that_is_too_old_is_none(monkeypatch: pytest.MonkeyPatch, warm: Warm) -> None:
    from amtcore.kernels.gpu import device as available

    def find_device(device: object) -> None:
        raise BackendError("cuda:0 is a Tesla V100 of compute capability 7.0")

    monkeypatch.delenv("AMTCORE_GPU", raising=False)
    monkeypatch.setattr(available, "why_no_gpu", lambda: "")
    monkeypatch.setattr(available, "find_device", find_device)
    with pytest.raises(DeviceError, match=r"got none: cuda:0 is a Tesla V100"):
        warm("cuda")
    assert warm("auto").note == (
        "the models run on CPU: cuda:0 is a Tesla V100 of compute capability 7.0"
    )


def test_the_interpreter_stands_in_for_a_gpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMTCORE_GPU", "interpreted")
    check_gpu()
    gpu = find_gpu()
    assert (gpu.backend, gpu.device.type) == ("interpreted", "cpu")
    described = gpu.describe()
    assert described["backend"] == "interpreted" and described["driver"] is None
    assert described["name"].startswith("interpreter on ")


def test_a_device_s_errors_are_a_launch_too_large_or_a_worker_lost() -> None:
    with pytest.raises(DeviceFull, match="smaller"), device_errors("a launch"):
        raise DeviceMemoryError("a launch: too little memory; use smaller batches")
    with pytest.raises(DeviceLost, match="the GPU was lost: a launch: gone"), device_errors("x"):
        raise DeviceLostError("a launch: gone")
    with pytest.raises(BackendError, match="rejected"), device_errors("x"):
        raise BackendError("the driver rejected the PTX")
    with (
        pytest.raises(DeviceFull, match="a launch of 7 clips"),
        device_errors("a launch of 7 clips"),
    ):
        raise torch.cuda.OutOfMemoryError("tried to allocate")


def test_provenance_names_the_gpu_and_its_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    version = tmp_path / "version"
    version.write_text("570.86.15\n")
    monkeypatch.setattr(device, "DRIVER_VERSION", str(version))
    assert device.nvidia_driver() == "570.86.15"
    facts = DeviceFacts("NVIDIA H100 PCIe", (9, 0), 80 << 30, 114, 1.755e9, (12, 8))
    monkeypatch.setattr(device_facts, "device_facts", lambda device: facts)
    assert Gpu("cuda", torch.device("cuda", 0)).describe() == {
        "device": "cuda",
        "backend": "cuda",
        "name": "NVIDIA H100 PCIe",
        "capability": "9.0",
        "driver": "570.86.15",
        "driver_cuda": "12.8",
    }
    version.unlink()
    assert device.nvidia_driver() is None


def test_each_local_worker_sees_the_gpu_that_is_dealt_to_it() -> None:
    place = Placement("", threads=1, num_gpus=0.5, device="cuda")
    request = WorkerRequest(Looking, place, 1)  # type: ignore[arg-type]
    workers = LocalWorkers(lambda index: request, ["4", "GPU-b"])
    started = [workers.start(index) for index in range(3)]
    try:
        calls = {workers.call(worker, "warm_up"): k for k, worker in enumerate(started)}
        seen: dict[int, str] = {}
        while len(seen) < len(calls):
            for call, outcome in workers.ended(calls, 10.0):
                assert isinstance(outcome, Outcome) and outcome.info is not None, outcome
                seen[calls[call]] = outcome.info.note
    finally:
        for worker in started:
            workers.kill(worker)
    assert seen == {0: "4", 1: "GPU-b", 2: "4"}


class Raising:
    """A runner whose warm-up, and then whose shards, raise what they are told to."""

    def __init__(self, at_warm_up: Exception | None, in_shard: Exception | None) -> None:
        self.at_warm_up, self.in_shard = at_warm_up, in_shard

    def warm_up(self) -> WorkerInfo:
        if self.at_warm_up is not None:
            raise self.at_warm_up
        return WorkerInfo(1, "cuda", 1)

    def run(self, order: ShardOrder) -> None:
        assert self.in_shard is not None
        raise self.in_shard

    def probe(self, items: object) -> None:
        self.run(mock.Mock())

    def seconds_in_flight(self) -> float:
        return 0.0

    def cpu_s(self) -> dict[str, float]:
        return {}

    def waits_for(self) -> str:
        return ""


def outcome_of(
    *, at_warm_up: Exception | None = None, in_shard: Exception | None = None
) -> Outcome:
    worker = ShardWorker(lambda: Raising(at_warm_up, in_shard))  # type: ignore[arg-type,return-value]
    warm = worker.warm_up()
    return warm if not warm.ok else worker.run(mock.Mock())


def test_what_a_worker_says_of_its_device() -> None:
    lost = outcome_of(in_shard=DeviceLost("the GPU was lost: it fell off the bus"))
    assert (lost.stage, lost.permanent, lost.outage) == ("device", False, "")
    assert lost.message == "the GPU was lost: it fell off the bus"
    assert outcome_of(at_warm_up=DeviceLost("gone")).stage == "device"
    none = outcome_of(at_warm_up=DeviceError("run.device: expected a GPU"))
    assert (none.stage, none.permanent) == ("warm_up", True)
    assert none.message == "run.device: expected a GPU"
    full = outcome_of(in_shard=DeviceFull("a launch of one clip: too little memory"))
    assert (full.stage, full.permanent, full.outage) == ("rows", False, "")
    assert "DeviceFull: a launch of one clip" in full.message


Started = tuple[Scheduler, WorkerPool, list[events.Event]]


@pytest.fixture
def started() -> Callable[[int], Started]:
    def start(workers: int, shards: int = 9) -> Started:
        said: list[events.Event] = []
        ledger = ShardLedger(
            [shard(f"{i:05d}", f"ok-{i}") for i in range(shards)],
            lambda shard_id: None,
            max_attempts=3,
            sink=said.append,
        )
        processes = mock.Mock()
        processes.start.side_effect = lambda index: mock.Mock()
        processes.call.side_effect = lambda *_: mock.Mock()
        pool = WorkerPool(processes, workers)
        pool.start()
        return Scheduler(ledger, pool, sink=said.append), pool, said

    return start


def test_a_worker_without_its_gpu_is_given_up_at_once_and_the_others_work_on(
    started: Callable[[int], Started],
) -> None:
    scheduler, pool, said = started(2)
    first, second = pool.slots
    hopeless = Outcome(ok=False, stage="warm_up", message="run.device: no GPU", permanent=True)
    scheduler._settle_warm_up(first, hopeless)
    assert (first.state, scheduler._ledger.result.fatal) == (DEAD, "")
    assert [event.to_dict() for event in said] == [
        {"event": "note", "text": "worker 0 is given up: run.device: no GPU"}
    ]
    scheduler._settle_warm_up(second, hopeless)
    assert scheduler._ledger.result.fatal == "no worker could be started: run.device: no GPU"


def test_a_device_lost_in_warm_up_costs_the_process(
    started: Callable[[int], Started],
) -> None:
    """In the same process the device would fail for ever."""
    scheduler, pool, _ = started(1)
    (slot,) = pool.slots
    before = slot.worker
    scheduler._settle_warm_up(slot, Outcome(ok=False, stage="device", message="lost"))
    assert slot.worker is not before
    assert pool.workers.kill.call_args.args == (before,)  # type: ignore[attr-defined]


def test_a_worker_that_fell_back_says_so_once(started: Callable[[int], Started]) -> None:
    scheduler, pool, said = started(1)
    (slot,) = pool.slots
    info = WorkerInfo(1, "cpu", 2, note="the models run on CPU: no GPU")
    for _ in range(2):
        scheduler._settle_warm_up(slot, Outcome(ok=True, info=info))
        pool.restart(slot)
    notes = [event.text for event in said if isinstance(event, events.Note)]
    assert notes == ["worker 0: the models run on CPU: no GPU"]
    (ready,) = (event for event in said if isinstance(event, events.WorkersReady))
    assert ready.device == "cpu"


@pytest.mark.parametrize(("shards", "expected"), [(60, [20, 30]), (12, [6, 6]), (3, [2, 1])])
def test_a_worker_gets_what_it_takes_but_not_what_the_others_could_do(
    started: Callable[..., Started], shards: int, expected: list[int]
) -> None:
    """Two GPU workers, one taking 20 shards and one 40, in one round of the loop."""
    scheduler, pool, _ = started(2, shards)
    for slot, takes in zip(pool.slots, (20, 40), strict=True):
        slot.state, slot.info = READY, WorkerInfo(1, "cuda", 8, shards=takes)
    scheduler._dispatch()
    assert [len(slot.work) for slot in pool.slots] == expected
    assert max(expected) <= max(CONCURRENT_SHARDS, -(-shards // 2))


def test_the_first_worker_that_is_warm_leaves_shards_for_the_next(
    started: Callable[..., Started],
) -> None:
    scheduler, pool, _ = started(4, 20)
    pool.slots[2].state, pool.slots[2].info = READY, WorkerInfo(1, "cuda", 8, shards=64)
    scheduler._dispatch()
    assert [len(slot.work) for slot in pool.slots] == [0, 0, 5, 0]
