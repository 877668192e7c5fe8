"""Python looks for no garbage while a worker starts, and does again once it is warm."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from earmill.pipeline.driver.executors.local import LocalProcess
from earmill.pipeline.worker.messages import Outcome
from earmill.pipeline.worker.worker_process import ShardWorker
from tests.pipeline.runners import MakeTelling

ANSWERS_WITHIN_S = 60.0


@pytest.fixture
def process() -> Iterator[LocalProcess]:
    made = LocalProcess(MakeTelling(), {}, shards=1)  # type: ignore[arg-type]
    yield made
    made.kill()


def asked(process: LocalProcess, kind: str) -> Outcome:
    process.call(kind, ())
    assert process.connection.poll(ANSWERS_WITHIN_S)
    ((_, outcome),) = process.read()
    assert isinstance(outcome, Outcome)
    return outcome


def test_a_process_looks_for_none_while_its_worker_warms_up(process: LocalProcess) -> None:
    info = asked(process, "warm_up").info
    assert info is not None and info.note == "False"
    assert asked(process, "status").value == 1.0


def test_a_worker_that_does_not_start_leaves_it_on() -> None:
    outcome = ShardWorker(MakeTelling(fails=True)).warm_up()  # type: ignore[arg-type]
    assert "garbage is looked for: False" in outcome.message and gc.isenabled()
