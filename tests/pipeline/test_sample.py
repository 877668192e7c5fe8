"""A sample of a plan's rows: which rows it draws, what they cost, and how that is scaled."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import earmill
from earmill.jobs.cli import run
from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.dataset.garbage import collect_garbage
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.operations.sample import ROW_S, draw, sample, scaled
from earmill.pipeline.planning.estimate import JobCost, Range, job_cost
from earmill.pipeline.planning.shards import Shard
from earmill.pipeline.sources.base import Item
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.pipeline import audio_factory
from tests.pipeline.again_jobs import shards_run_here
from tests.pipeline.workers_here import workers_here

GOOD, DAMAGED = 10, 3


@pytest.fixture
def no_workers() -> Iterator[None]:
    """Shards run in this process."""
    with shards_run_here():
        yield


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for index in range(GOOD):
        kind = "flac" if index % 2 else "wav"
        data = audio_factory.clip(kind, 0.8 + 0.1 * index, seed=index)
        (folder / f"{index:03d}.{kind}").write_bytes(data)
    return folder


def spec_of(corpus: Path, **output: Any) -> JobSpec:
    return JobSpec.load(
        {
            "source": {"kind": "files", "uri": str(corpus)},
            "extract": [{"model": "mfcc", "fs_hz": 16000}],
            "output": {
                "uri": str(corpus.parent / "out"),
                "formats": ["parquet"],
                "shard_rows": 2,
                **output,
            },
            "run": {"executor": "local", "workers": 1, "threads_per_worker": 1},
        }
    )


def costed(spec: JobSpec) -> JobCost:
    with workers_here():
        return job_cost(spec, sampler=partial(sample, spec=spec, rows=48, seed=1))


def damage(corpus: Path, count: int) -> None:
    """Some files become no audio."""
    for path in sorted(corpus.iterdir())[:count]:
        path.write_bytes(b"no audio at all" * 40)


def test_every_row_is_drawn_as_often_as_another_and_a_seed_draws_the_same_rows() -> None:
    items = [Item(str(number), f"{number}.wav", seconds=4.0) for number in range(20)]
    shards = [Shard("00000", tuple(items[:3])), Shard("00001", tuple(items[3:]))]
    drawn = Counter(item.row_id for seed in range(400) for item in draw(shards, 5, seed))
    assert set(drawn) == {item.row_id for item in items}
    assert 60 < min(drawn.values()) and max(drawn.values()) < 140  # 100, each way 4.6 deviations
    assert draw(shards, 5, 3) == draw(shards, 5, 3) != draw(shards, 5, 4)
    assert draw(shards, 99, 0) == items


def test_a_range_is_three_standard_errors_of_cost_over_seconds() -> None:
    # Residuals 1 and -1: sqrt(2 * 2 / 1) / 8 s.
    apart = scaled([(3.0, 4.0), (1.0, 4.0)], 10.0)
    assert (apart.expected, apart.low, apart.high) == pytest.approx((5.0, 0.0, 5.0 + 7.5))
    alike = scaled([(2.0, 4.0), (1.0, 2.0), (3.0, 6.0)], 2.0)
    assert (alike.low, alike.expected, alike.high) == pytest.approx((0.9, 1.0, 1.1)), "two runs"
    assert scaled([(2.0, 4.0)], 2.0) == Range(0.0, 1.0, 2.0), "one shard says nothing of others"


def test_a_sample_of_all_rows_knows_what_will_be_stored(corpus: Path) -> None:
    damage(corpus, DAMAGED)
    spec = spec_of(corpus)  # shards of two rows, as the sample has
    result = costed(spec)
    found = result.sample
    assert found is not None
    assert (found.rows, found.bad) == (GOOD, {"not_audio": DAMAGED})
    assert not (corpus.parent / "out").exists(), "planning writes nothing"
    for value in (found.time_s, found.cpu_s, found.stored_bytes):
        assert 0 < value.low <= value.expected <= value.high
    assert json.loads(json.dumps(result.to_dict()))["sample"]["workers"] == 1
    with shards_run_here():
        run_job(JobSpec.load(spec, overrides=["run.max_bad_fraction=1"]))
    layout = Layout.open(spec.output.uri)
    actual = verify(layout).bytes
    assert found.stored_bytes.expected == pytest.approx(actual, rel=0.15)
    # Earlier releases kept an estimate beside the plan.
    left = f"plan/{result.plan_id}.estimate.json"
    layout.write_bytes(left, b"{}")
    collect_garbage(layout, grace_s=0.0)
    assert layout.exists(left) and verify(layout).ok


@pytest.mark.long  # the scaling itself is tested on figures above
def test_a_larger_corpus_costs_in_proportion_to_its_audio(corpus: Path) -> None:
    once = costed(spec_of(corpus)).sample
    for path in sorted(corpus.iterdir()):
        path.with_stem(f"{path.stem}-again").write_bytes(path.read_bytes())
    equal = spec_of(corpus, equal_files_once=True)
    twice = costed(equal).sample
    assert once is not None and twice is not None
    assert twice.rows == GOOD, "copies are not processed"
    stored = 2 * once.stored_bytes.expected
    assert twice.stored_bytes.expected == pytest.approx(stored, rel=0.05), "but they are stored"


@pytest.mark.long
def test_of_a_long_row_the_beginning_is_processed(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in sorted(corpus.iterdir())[1:]:
        path.unlink()
    seconds = 2 * ROW_S
    (long,) = corpus.iterdir()
    long.write_bytes(audio_factory.encode(audio_factory.speech_like(seconds, 8000), "wav", 8000))
    spec = JobSpec.load(spec_of(corpus))
    small: list[Any] = []

    def seen(job: JobSpec, **options: Any) -> Any:
        small.append(options["plan"])
        return run_job(job, **options)

    monkeypatch.setattr("earmill.pipeline.operations.sample.run_job", seen)
    found = costed(spec).sample
    ((item,),) = [shard.items for plan in small for shard in plan.shards]
    assert (item.start_s, item.end_s, item.seconds) == (None, ROW_S, ROW_S)
    frames_bytes = seconds * 100 * 13 * 2
    assert found is not None and found.rows == 1
    assert found.stored_bytes.expected == pytest.approx(frames_bytes, rel=0.5)


@pytest.mark.usefixtures("no_workers")
def test_the_command_and_the_call_say_the_same(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(spec_of(corpus).model_dump(mode="json")))
    assert run(["plan", str(job), "--sample", "6", "--seed", "2"]) == 0
    shown = capsys.readouterr()
    assert "processing 6 of 10 rows" in shown.err
    for text in ("with 1 worker of 1 thread", "CPU", "stored", "6 rows", "seed 2", "none"):
        assert text in shown.out
    (cpu,) = (line for line in shown.out.splitlines() if "CPU" in line)
    assert re.search(r" (under 1|\d+) s ", cpu) and "e-" not in cpu
    found = earmill.plan(job, sample=6, seed=2).sample
    assert found is not None and (found.rows, found.seed) == (6, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "1"], "--seed goes with --sample ROWS"),
        (["--sample", "-1"], "greater than or equal to 0"),
        (["--sample", "4", "--set", "run.device=cuda"], "run.device"),
        (["--sample", "4"], "expected a usable row among the 4 of the sample, got none: not_audio"),
    ],
)
def test_what_cannot_be_sampled_is_one_line(
    arguments: list[str],
    said: str,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(corpus, GOOD)
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(spec_of(corpus).model_dump(mode="json")))
    with shards_run_here() if "usable row" in said else nullcontext():
        assert run(["plan", str(job), *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_the_call_refuses_what_the_command_refuses(corpus: Path) -> None:
    for options in ({"seed": 1}, {"sample": -1}):
        with pytest.raises(ValueError, match="sample"):
            earmill.plan(spec_of(corpus), **options)


@pytest.mark.usefixtures("no_workers")
def test_a_row_that_is_gone_is_a_bad_row(corpus: Path) -> None:
    spec = spec_of(corpus)

    def gone_first(*arguments: Any) -> Any:
        sorted(corpus.iterdir())[0].unlink()
        return sample(*arguments, spec=spec, rows=48, seed=1)

    found = job_cost(spec, sampler=gone_first).sample
    assert found is not None and sum(found.bad.values()) == 1


def test_a_model_that_ends_its_process_ends_no_planner(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that cannot start are one line."""
    monkeypatch.setattr("earmill.pipeline.driver.executors.local.COMMAND", "raise SystemExit(3)")
    spec = spec_of(corpus)
    with pytest.raises(SourceError, match="the sample failed: no worker could be started"):
        job_cost(spec, sampler=partial(sample, spec=spec, rows=48, seed=1))
