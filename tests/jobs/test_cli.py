"""The command line in this process: every user error is one line, exit code 2, before any work."""

from __future__ import annotations

import errno
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from earmill.jobs.cli import run
from earmill.jobs.console.job_texts import rounded_up
from earmill.pipeline.dataset.driver_lock import DriverLock
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import ROOT, write_corpus, write_job

EXAMPLES = sorted((ROOT / "jobs").glob("*.yaml"))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A good job that nobody has run."""
    corpus = write_corpus(tmp_path / "corpus", 3, seconds=0.5)
    return write_job(tmp_path / "job.yaml", corpus, tmp_path / "out")


def error_line(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """Run a command that must fail; its one line on standard error, behind what it began."""
    assert run(arguments) == code
    *news, line = capsys.readouterr().err.splitlines()
    assert all(one.endswith(" ...") for one in news)
    assert line.startswith("earmill: ") and "Traceback" not in line
    return line


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("extract.0.model=dau1996", "did you mean 'dau1997'"),
        ("extract.0.params={flw: 1}", "did you mean 'flow'"),
        ("extract.0.streams={modulations: {}}", "did you mean 'modulation'"),
        ("output.dtyp=float32", "did you mean 'dtype'"),
        ("outputs.dtype=float32", "did you mean 'output'"),
        ("output.dtype=float13", "float16"),
        ("audio.channels=-1", "channel index from 0"),
        ("run.gpus_per_worker=2", "gpus_per_worker"),
        ("run={device: cpu, gpus_per_worker: 1}", "expected no gpus_per_worker with device cpu"),
        ("run.device=cuda", "run.device: expected a"),
        ("source.uri=/no/such/folder", "/no/such/folder: not found"),
        ("output.uri=/proc/nowhere", "cannot write to /proc/nowhere"),
        ("output.uri=s4://bucket/x", "s4://bucket/x"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_wrong_job_is_refused_before_any_work(
    job: Path, override: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in error_line(["extract", str(job), "--set", override], capsys)
    assert not (job.parent / "out" / "dataset.json").exists()


def test_a_missing_job_file_and_a_broken_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "none.yaml")
    assert missing in error_line(["extract", missing], capsys)
    broken = tmp_path / "broken.yaml"
    broken.write_text("source: {kind: files, uri: [")
    assert "broken.yaml" in error_line(["plan", str(broken)], capsys)


def test_an_unreachable_cluster_is_refused_before_any_work(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = error_line(["extract", str(job), "--ray-address", "127.0.0.1:1"], capsys)
    assert "expected a running Ray cluster at 127.0.0.1:1" in line
    assert not (job.parent / "out").exists()


def test_a_submitted_job_with_a_relative_output_is_refused(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(job.parent)
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    line = error_line(["extract", str(job), "--set", "output.uri=out/features"], capsys)
    assert "ray job submit" in line and "got out/features" in line
    assert not (job.parent / "out").exists()
    # An absolute one comes as far as the next mistake.
    override = ["--set", "source.uri=/no/such/folder"]
    assert "/no/such/folder: not found" in error_line(["extract", str(job), *override], capsys)


def test_an_empty_source_is_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job.parent / "empty").mkdir()
    override = f"source.uri={job.parent / 'empty'}"
    assert "no audio files" in error_line(["extract", str(job), "--set", override], capsys)


def test_a_second_driver_is_told_who_holds_the_output(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DriverLock(Layout.open(str(job.parent / "out"))):
        line = error_line(["extract", str(job), "--resume"], capsys)
    assert "another driver works on" in line and "pid" in line


@pytest.mark.parametrize(
    "arguments",
    [[], ["extract"], ["extract", "a.yaml", "--no-such"], ["grind"], ["plan", "a", "b"]],
)
def test_bad_usage_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert "Usage" in captured.err + captured.out


def test_help_exits_0_and_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    for command in "extract plan inspect verify plot models spec demo doctor".split():
        assert command in text


def test_the_command_line_imports_nothing_heavy_and_asks_no_model_before_it_must() -> None:
    """Neither help nor the import of the package looks for entry points or loads torch."""
    heavy = {"torch", "ray", "numpy", "pyarrow", "zarr", "rich.progress"}
    later = {"torch", "amtcore", "pytest", "earmill.pipeline.common.extension_points"}
    code = (
        f"import sys, earmill.jobs.cli as cli; imported = {heavy} & set(sys.modules)\n"
        f"import earmill.testing; cli.run(['--help']); imported |= {later} & set(sys.modules)\n"
        "print(sorted(imported))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_plan_adds_up_and_writes_nothing(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(job), "--json", "--set", "output.dtype=float32"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["rows"], plan["shards"]) == (3, 2)
    assert plan["hours"] == pytest.approx(1.5 / 3600, rel=1e-3)
    width = plan["streams"][0]["width"]
    # 0.5 s at 100 frames a second, in 4 bytes.
    assert plan["bytes_out"] == {"parquet": 3 * 50 * width * 4, "zarr": 3 * 50 * width * 4}
    assert not (job.parent / "out").exists()
    assert (plan["notes"], plan["sample"]) == ([], None)
    assert run(["plan", str(job), "--set", "run.device=cuda"]) == 0
    assert f"{width} columns at 100 Hz" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "1 s"), (21.2, "22 s"), (22, "22 s"), (100, "1.7 min"), (5000, "84 min"), (9e4, "25 h")],
)
def test_times_are_rounded_up(seconds: float, text: str) -> None:
    assert rounded_up(seconds) == text


def test_the_reference_of_the_job_file_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["spec"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "spec.md").read_text()


def test_models_lists_parameters_and_streams(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--json"]) == 0
    by_name = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    assert by_name["dau1997"]["params"]["fhigh"]["default"] == 8000.0
    assert "modulation" in by_name["dau1997"]["streams"]
    assert run(["models", "dau1997"]) == 0
    assert "fhigh" in capsys.readouterr().out
    assert "known: dau1997" in error_line(["models", "dau"], capsys)


def test_verify_and_inspect_want_a_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("verify", "inspect"):
        assert "dataset.json" in error_line([command, str(tmp_path)], capsys)
    assert run(["verify", str(tmp_path), "--storage-options", "{"]) == 2


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_example_specs_are_valid(path: Path) -> None:
    spec = JobSpec.load(path)
    assert spec.name in yaml.safe_load(path.read_text())["name"]
    # What the comments promise about credentials.
    assert "storage_options" not in spec.canonical_json()


def test_there_are_examples_for_each_kind_of_source() -> None:
    wanted = {"files", "hf", "kaldi", "lhotse", "manifest", "webdataset"}
    assert {JobSpec.load(path).source.kind for path in EXAMPLES} == wanted


def test_an_error_that_nobody_reads_any_more_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Gone())
    assert run(["plan", str(tmp_path / "none.yaml"), "--json"]) == 2
    sys.stdout.close()
    assert "none.yaml" in capsys.readouterr().err
