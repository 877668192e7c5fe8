"""Without an extra: readers work, and commands and names that need it name the command for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import pytest

import earmill
from tests.pipeline.reader_data import write_set
from tests.pipeline.workers_here import workers_here
from tests.without_packages import ALL, EXTRACT, MODELS, without

# Runs command lines, or functions of earmill with arguments, and prints what became of them.
SCRIPT = """
import contextlib, io, json, sys
import earmill
from earmill.jobs.cli import run

results = []
for name, *arguments in json.loads(sys.argv[1]):
    error = io.StringIO()
    if name == "command":
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            code = run(arguments)
        results.append([code, error.getvalue()])
        continue
    try:
        value = earmill
        for part in name.split("."):
            value = getattr(value, part)
        if arguments:
            value = value(*arguments)
        results.append([0, ""])
    except Exception as failure:
        results.append([type(failure).__name__, str(failure)])
print(json.dumps(results))
"""
COMMAND_OF = re.compile(r"run:? pip install '?([\w\[\]-]+)'?")

JOB = {
    "source": {"kind": "files", "uri": "audio"},
    "audio": {"calibration": {"rms1_db_spl": 100}},
    "extract": [{"model": "dau1997", "fs_hz": 16000}],
    "output": {"uri": "out", "formats": ["zarr"]},
    "run": {"workers": 1, "threads_per_worker": 1},
}
ADDED = {"extract": [{"model": "king2019", "fs_hz": 16000}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with jobs, two recordings, and two datasets: one of a job with two shards."""
    folder = tmp_path_factory.mktemp("extras")
    (folder / "audio").mkdir()
    source = {"kind": "files", "uri": str(folder / "audio")}
    job = {**JOB, "source": source, "output": {"uri": str(folder / "features")}}
    for name in ("a", "b"):
        with wave.open(str(folder / "audio" / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(b"\1\2" * 8000)
        with workers_here():
            earmill.extract(job, update=name == "b")
    write_set(folder / "small", n_rows=6, rows_per_shard=2, finalised=True)
    jobs: dict[str, dict[str, Any]] = {
        "job": {},
        "ray": {"run": {**JOB["run"], "executor": "ray"}},
        "hf": {"source": {"kind": "hf", "uri": "somebody/speech", "split": "train"}},
        "tars": {"source": {"kind": "webdataset", "uri": "a.tar"}},
        "metrics": {"run": {**JOB["run"], "metrics": "metrics.prom"}},
        "from-s3": {"source": {"kind": "files", "uri": "s3://corpus/speech"}},
        "to-s3": {"output": {"uri": "s3://features/speech"}},
        "to-google": {"output": {"uri": "gs://features/speech"}},
        "to-azure": {"output": {"uri": "abfs://features/speech"}},
    }
    for name, changes in jobs.items():
        (folder / f"{name}.yaml").write_text(json.dumps({**JOB, **changes}))  # JSON is YAML
    (folder / "added.yaml").write_text(json.dumps(ADDED))
    return folder


def results(folder: Path, missing: tuple[str, ...], calls: list[Any]) -> list[Any]:
    """Run the calls in one process that lacks packages; return exit code or error, and text."""
    private = folder / f"lacks {len(missing)}"
    # A cache without descriptions of models: with them `plan` needs no models.
    environment = without(private, *missing) | {"XDG_CACHE_HOME": str(private / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(calls)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


def assert_one_line(text: str, extra: str) -> None:
    last = text.strip().splitlines()[-1]
    assert COMMAND_OF.search(last), text
    assert COMMAND_OF.search(last)[1] == f"earmill[{extra}]", text  # type: ignore[index]
    assert "damaged" not in text and "Traceback" not in text and "defect" not in text


READING = [
    ["command", "--version"],
    ["command", "inspect", "features"],
    ["command", "inspect", "features", "--quarantine"],
    ["command", "log", "features"],
    ["command", "verify", "features"],
    ["command", "plot", "features", "--out", "plot.png"],
    ["command", "report", "features", "--out", "report.html"],
    ["command", "watch", "features", "--once"],
    ["command", "gc", "features"],
    ["command", "compact", "features"],
    ["command", "verify", "features"],
    ["command", "explain", "memory"],
    ["command", "doctor", "--quick"],
    ["open_features", "features"],
    ["verify", "features"],
    ["Calibration", 100.0],
]


def test_the_base_reads_inspects_verifies_and_plots(folder: Path) -> None:
    for call, (code, text) in zip(READING, results(folder, ALL, READING), strict=True):
        assert code == 0, (call, text)


COMMANDS = {
    "extract": [
        ["extract", "job.yaml"],
        ["extract", "ray.yaml"],
        ["extract", "tars.yaml"],
        ["extract", "metrics.yaml"],
        ["plan", "job.yaml"],
        ["plan", "job.yaml", "--sample", "1"],
        ["demo", "--out", "demo"],
        ["add-features", "features", "added.yaml"],
        ["models"],
        ["models", "dau1997"],
        ["spec"],
        ["kernels", "kernels"],
    ],
    "hf": [["extract", "hf.yaml"], ["push", "features", "a/b"], ["inspect", "hf://datasets/a/b"]],
    "s3": [["extract", "from-s3.yaml"], ["extract", "to-s3.yaml"], ["inspect", "s3://a/b"]],
    "gcs": [["extract", "to-google.yaml"], ["verify", "gs://a/b"]],
    "azure": [["extract", "to-azure.yaml"], ["verify", "abfs://a/b"]],
}


@pytest.mark.parametrize("extra", COMMANDS)
def test_a_command_names_its_extra_in_one_line(folder: Path, extra: str) -> None:
    calls = [["command", *arguments] for arguments in COMMANDS[extra]]
    for call, (code, text) in zip(calls, results(folder, ALL, calls), strict=True):
        assert code == 2, (call, text)
        assert_one_line(text, extra)


def test_a_job_on_ray_names_ray(folder: Path) -> None:
    calls = [["command", "extract", "ray.yaml"], ["extract", "ray.yaml"]]
    (code, text), (kind, message) = results(folder, ("ray",), calls)
    assert (code, kind) == (2, "MissingPackageError")
    assert_one_line(text, "ray")
    assert_one_line(message, "ray")


CALLS = {
    "extract": [
        ["extract", "job.yaml"],
        ["plan", "job.yaml"],
        ["add_features", "features", ADDED],
        ["build_extractor", "dau1997"],
        ["list_models"],
        ["models.Dau1997", 16000],
        ["stages.AdaptLoop", 16000],
        ["testing.ModelConformance"],
    ],
    "hf": [["push", "features", "a/b"]],
    "torch": [
        ["FeatureLoader"],
        ["FeatureDataset"],
        ["FeatureStream"],
        ["Batch"],
        ["collate"],
        ["collate_padded"],
        ["collate_packed"],
        ["collate_jagged"],
        ["per_channel"],
    ],
}


@pytest.mark.parametrize("extra", CALLS)
def test_a_public_name_names_its_extra(folder: Path, extra: str) -> None:
    missing = tuple(name for name in ALL if name != "pytest")
    for call, (kind, text) in zip(
        CALLS[extra], results(folder, missing, CALLS[extra]), strict=True
    ):
        assert kind == "MissingPackageError", (call, kind, text)
        assert_one_line(text, extra)


def test_every_public_name_is_there_or_names_an_extra(folder: Path) -> None:
    calls = [[name] for name in earmill.__all__]
    missing = []
    for (name,), (kind, text) in zip(calls, results(folder, ALL, calls), strict=True):
        if kind != 0:
            assert kind == "MissingPackageError", (name, kind, text)
            assert text.startswith(f"earmill.{name}: ")
            missing.append(name)
    assert {"FeatureLoader", "build_extractor", "models", "Pushed"} <= set(missing)
    assert not {"open_features", "mix", "StreamInfo", "SpikeEvents", "extract"} & set(missing)


READ_ALL = """
import hashlib, sys, earmill
sums = []
for fmt in ("zarr", "parquet"):
    ds = earmill.open_features("small", format=fmt)
    for row in ds:
        for name in sorted(row.features):
            sums.append(hashlib.sha256(row.features[name].tobytes()).hexdigest())
    statistics = earmill.compute_statistics(ds)
    sums.append([statistics[name].mean.tolist() for name in sorted(statistics)])
print(sums)
try:
    ds.torch()
    print("torch")
except ImportError as error:
    print(error)
print([name for name in ("torch", "numba", "ray") if sys.modules.get(name)])
"""


def test_values_are_the_same_bits_with_and_without_numba(folder: Path) -> None:
    """numpy widens float16 where numba is missing."""
    printed = {}
    for kind, missing in (("all", ()), ("no numba", ("numba",)), ("base", ALL)):
        done = subprocess.run(
            [sys.executable, "-c", READ_ALL],
            cwd=folder,
            env=without(folder / f"reads {kind}", *missing),
            capture_output=True,
            text=True,
            check=True,
        )
        printed[kind] = done.stdout.splitlines()
    assert printed["all"][0] == printed["no numba"][0] == printed["base"][0]
    assert printed["all"][1] == printed["no numba"][1] == "torch"
    assert_one_line(printed["base"][1], "torch")
    assert printed["base"][2] == "[]"


def test_values_are_read_after_one_search_for_numba(folder: Path) -> None:
    """A failed import is not kept by Python: to repeat it for each value takes milliseconds."""
    code = (
        "import sys, earmill\n"
        "class Searched:\n"
        "    count = 0\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'numba':\n"
        "            Searched.count += 1\n"
        "            raise ModuleNotFoundError('No module named numba', name='numba')\n"
        "sys.meta_path.insert(0, Searched())\n"
        "print(len([row.features for row in earmill.open_features('small')]), Searched.count)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=without(folder / "searches", "ray"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["6", "1"]


def test_a_loader_needs_torch_alone(folder: Path) -> None:
    missing = tuple(name for name in EXTRACT if name != "torch")
    code = (
        "import earmill\n"
        "ds = earmill.open_features('small')\n"
        "loader = earmill.FeatureLoader(ds.iterable(seed=1, batch_size=2))\n"
        "print(sum(len(batch) for batch in loader))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=without(folder / "loads", *missing),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["6"]


def test_models_alone_name_their_own_extra(tmp_path: Path) -> None:
    code = (
        "import amtcore, amtcore.features\n"
        "for get in (lambda: amtcore.Dau1997, lambda: amtcore.features.FeatureModel,\n"
        "            lambda: amtcore.models, lambda: amtcore.get_num_threads):\n"
        "    try:\n"
        "        get()\n"
        "    except ModuleNotFoundError as error:\n"
        "        print(error)\n"
        "print(amtcore.features.StreamInfo, amtcore.Calibration(rms1_db_spl=100).to_dict())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=without(tmp_path, *MODELS),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 5 and all("pip install 'amtcore[models]'" in line for line in lines[:4])
