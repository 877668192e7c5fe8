"""What a run shows to machines that watch it: figures, metrics, counts of retries."""

from __future__ import annotations

import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from earmill.pipeline.common.errors import MissingPackageError, OutputError, SpecError
from earmill.pipeline.common.monitoring import Counts, ProcessCounts, StageTimes, cause_of, counts
from earmill.pipeline.driver import events
from earmill.pipeline.driver.run_totals import RunMetrics
from earmill.pipeline.driver.telemetry import exposed, observed
from earmill.pipeline.formats.rows import QuarantineRow
from earmill.pipeline.spec.job import JobSpec, RunSpec
from earmill.pipeline.worker.messages import ShardNotes
from tests.pipeline.outages import Clock
from tests.pipeline.test_retry_after import errors

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"
BAD = (QuarantineRow("b\n.wav", "uri", "decode", "not_audio", "no\nsound", 1),)
STAGES = {"fetch": (100.0, 101.0), "model": (100.5, 103.0), "commit": (103.0, 103.02)}
RUN: list[events.Event] = [
    events.JobStarted("speech", "out", "ab12", 5, 1, 50, 9, 1, 500.0, 100.0, 95.0),
    events.WorkersReady(2, 1, "cpu", 3.0),
    events.WorkerSays(0, 1, {"model": 4.0}, Counts({("source", "503"): 2}, 900, 100, 64)),
    # The process of before died, and its successor begins at nothing again.
    events.WorkerSays(0, 2, {"model": 1.0}, Counts({("source", "503"): 1}, 50, 50, 32)),
    # An answer that was overtaken.
    events.WorkerSays(0, 2, {"model": 0.5}, Counts({}, 10, 0, 16)),
    events.ShardAttempt("00001", 0, "", ShardNotes(True, STAGES, BAD)),
    events.RowQuarantined("00001", "b\n.wav", "decode", "not_audio", "no\nsound", 0),
    events.ShardDone("00001", 9, 1, 100.0, 4096, 90.0, 0, {"not_audio": 1}),
    events.ShardAttempt("00002", 1, "KeyError: 'x'", None),
    events.ShardRetry("00002", 1, "KeyError: 'x'", 1, "rows"),
    events.ShardWaits("00003", "503 Slow Down", 5.0, 1, "source"),
    events.WorkerLost(1, "SIGSEGV"),
    events.PoolState({"pending": 1, "waiting": 1, "in_flight": 1, "done": 1}, {"ready": 2}),
]
END = events.JobFinished("stopped", 1, "stopped", "out", 2, 0, 18, 2, 90.0, 9.0, 10.0)


def fed(*more: events.Event) -> RunMetrics:
    figures = RunMetrics(Clock(), now=lambda: 1234.0)
    for event in (*RUN, *more):
        figures(event)
    return figures


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, labels in order) to value."""
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(figures: RunMetrics) -> str:
    with exposed(figures, "127.0.0.1:0") as told:
        address = told.removeprefix("metrics are at ")
        with urllib.request.urlopen(address) as answer:
            return answer.read().decode()


def test_a_scrape_has_what_the_events_add_up_to() -> None:
    found = samples(scraped(fed()))
    wanted: dict[tuple[str, str], float] = {
        ("earmill_job_rows", "state=ok"): 18,
        ("earmill_job_rows", "state=quarantined"): 2,
        ("earmill_job_shards", "state=done"): 2,
        ("earmill_job_shards", "state=in_flight"): 1,
        ("earmill_job_shards", "state=waiting"): 1,
        ("earmill_job_shards", "state=pending"): 1,
        ("earmill_rows_total", "status=ok"): 9,
        ("earmill_rows_quarantined_total", "reason=not_audio"): 1,
        ("earmill_audio_seconds_total", ""): 90,
        ("earmill_shard_attempts_total", "result=done"): 1,
        ("earmill_shard_attempts_total", "result=failed"): 1,
        ("earmill_commit_seconds_count", ""): 1,
        ("earmill_commit_seconds_bucket", "le=0.01"): 0,
        ("earmill_commit_seconds_bucket", "le=0.03"): 1,
        ("earmill_shard_stage_seconds_sum", "stage=model"): 2.5,
        ("earmill_cpu_seconds_total", "part=model"): 5.0,
        ("earmill_retries_total", "cause=503,what=source"): 3,
        ("earmill_retries_total", "cause=rows,what=shard"): 1,
        ("earmill_retries_total", "cause=source,what=shard"): 1,
        ("earmill_retries_total", "cause=lost,what=worker"): 1,
        ("earmill_batch_samples_total", "kind=padding"): 150,
        ("earmill_queue_bytes", ""): 32,
        ("earmill_last_commit_timestamp_seconds", ""): 1234,
        ("earmill_workers", "state=ready"): 2,
    }
    assert {name: found.get(name) for name in wanted} == wanted
    over = samples(scraped(fed(END)))
    assert over["earmill_job_exit_code", "status=stopped"] == 1


def test_the_page_names_every_metric_and_no_other() -> None:
    figures = fed(END)
    figures.tally._clock.sleep(10.0)  # type: ignore[attr-defined]
    shown = set(re.findall(r"^# TYPE (\w+)", scraped(figures), re.M))
    figures.finished = None
    shown |= set(re.findall(r"^# TYPE (\w+)", scraped(figures), re.M))
    assert shown == set(re.findall(r"^\| `(earmill_\w+)`", PAGE.read_text(), re.M))


def test_a_text_file_is_whole_and_its_process_can_be_told(tmp_path: Path) -> None:
    with exposed(fed(), str(tmp_path / "e-{pid}.prom")) as told:
        path = Path(told.removeprefix("metrics are written to "))
        assert "{" not in path.name and path.parent == tmp_path
    found = samples(path.read_text())
    assert all("process=" in labels for _, labels in found)
    assert [name for name in tmp_path.iterdir()] == [path]


def test_a_place_that_is_not_to_be_had_is_told_before_any_work(tmp_path: Path) -> None:
    with exposed(RunMetrics(), "127.0.0.1:0") as told:
        taken = told.removeprefix("metrics are at http://").removesuffix("/metrics")
        with pytest.raises(OutputError, match=r"cannot listen at .*; another driver"):
            with exposed(RunMetrics(), taken):
                pass
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        with exposed(RunMetrics(), str(tmp_path / "file" / "x.prom")):
            pass


@pytest.mark.parametrize(
    "where", ["9464", "host:", "host:port", "a b:1", "x.prom.gz", "http://h:1"]
)
def test_a_place_is_an_address_or_a_text_file(where: str) -> None:
    job = {
        "source": {"kind": "files", "uri": "x"},
        "extract": [{"model": "dau1997"}],
        "output": {"uri": "out"},
    }
    with pytest.raises(SpecError, match=r"run\.metrics"):
        JobSpec.load({**job, "run": {"metrics": where}})
    for good in ("127.0.0.1:9464", "[::1]:0", "node-7:80", "/var/e-{pid}.prom"):
        assert JobSpec.load({**job, "run": {"metrics": good}}).run.metrics == good


def test_without_metrics_nobody_pays_for_them() -> None:
    seen: list[events.Event] = []
    with observed(RunSpec(), seen.append) as (sink, observe):
        assert sink == seen.append and observe is events.ignore


def test_metrics_without_their_package_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingPackageError, match=r"^run\.metrics: .*prometheus.client"):
        with observed(RunSpec(metrics="127.0.0.1:0"), events.ignore):
            pass


def test_what_is_only_for_telemetry_does_not_reach_who_follows_a_run() -> None:
    seen: list[events.Event] = []
    with observed(RunSpec(metrics="127.0.0.1:0"), seen.append) as (sink, observe):
        observe(RUN[-1])
        sink(RUN[0])
    assert [event.kind for event in seen] == ["note", "job_started"]


def test_tries_again_are_counted_by_what_and_cause() -> None:
    clock = Clock()
    policy = clock.retries(60)
    before = counts.snapshot().retries.get(("other", "503"), 0)
    asked: list[int] = []

    def work() -> int:
        asked.append(1)
        if len(asked) < 3:
            raise errors("1")["botocore"]
        return 1

    policy.run(work, lambda error: True)
    assert counts.snapshot().retries["other", "503"] == before + 2
    with pytest.raises(KeyError):
        policy.run(lambda: {}["x"], lambda error: False)
    assert counts.snapshot().retries["other", "503"] == before + 2


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (errors("1")["aiohttp"], "503"),
        (TimeoutError(), "timeout"),
        (ConnectionResetError(104, "reset"), "connection"),
        (OSError(5, "input/output error"), "machine"),
        (ValueError("s3://me:secret@host"), "other"),
    ],
)
def test_a_cause_is_one_of_a_few_words(error: Exception, cause: str) -> None:
    wrapped = RuntimeError("while reading")
    wrapped.__cause__ = error
    assert cause_of(error) == cause_of(wrapped) == cause


def test_batches_and_queues_are_counted_while_they_live() -> None:
    class Queue:
        waiting_bytes = 70

    mine, queue = ProcessCounts(), Queue()
    mine.batch([10, 7, 3])
    mine.batch([4])
    mine.watch(queue)
    assert mine.snapshot() == Counts({}, samples=24, padding=10, queue_bytes=70)
    del queue
    assert mine.snapshot().queue_bytes == 0


def test_a_stage_lasts_from_its_first_to_its_last_stretch() -> None:
    stages = StageTimes()
    stages.mark("model", 5.0, 6.0)
    stages.mark("model", 2.0, 3.0)
    stages.mark("fetch", 1.0, 4.0)
    assert list(stages.stretches().items()) == [("fetch", (1.0, 4.0)), ("model", (2.0, 6.0))]
    assert list(stages.during("decode", iter("ab"))) == ["a", "b"]
    closed: Any = stages.during("hash", iter("ab"))
    next(closed)
    closed.close()
    assert {"decode", "hash"} <= stages.stretches().keys()
