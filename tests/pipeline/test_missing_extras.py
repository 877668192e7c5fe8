"""Without an extra: readers work, and commands and names that need it name the command for it."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import pytest

import earmill
from earmill.jobs.cli import run
from earmill.pipeline.common.errors import MissingPackageError
from tests.pipeline.reader_data import write_set
from tests.pipeline.workers_here import workers_here
from tests.without_packages import ALL, EXTRACT, MODELS, without


def read_all(folder: Path) -> str:
    """Return hashes of all values of a dataset, and its statistics."""
    found: list[Any] = []
    for fmt in ("zarr", "parquet"):
        ds = earmill.open_features(folder, format=fmt)
        for row in ds:
            for name in sorted(row.features):
                found.append(hashlib.sha256(row.features[name].tobytes()).hexdigest())
        statistics = earmill.compute_statistics(ds)
        found.append([statistics[name].mean.tolist() for name in sorted(statistics)])
    return str(found)


# The module of this test needs pytest, which the base lacks.
READ_ALL = f"""
from __future__ import annotations
import hashlib, sys, earmill

{inspect.getsource(read_all)}
"""
# Runs command lines, or functions of earmill with arguments, and prints what became of them.
SCRIPT = """
import contextlib, io, json
from earmill.jobs.cli import run

OWN = {
    "values": read_all,
    "torch dataset": lambda folder: earmill.open_features(folder).torch(),
    "install": sys.modules.pop,
}
results = []
for name, *arguments in json.loads(sys.argv[1]):
    error = io.StringIO()
    if name == "command":
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            code = run(arguments)
        results.append([code, error.getvalue()])
        continue
    try:
        value = OWN.get(name, earmill)
        for part in name.split(".") if name not in OWN else ():
            value = getattr(value, part)
        if arguments:
            value = value(*arguments)
        results.append([0, value if name == "values" else ""])
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


def results(folder: Path, groups: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Run groups of calls in one process that lacks the packages of every extra.

    Returns:
        The calls of each group, each with its exit code or error, and its text.
    """
    calls = [call for group in groups.values() for call in group]
    private = folder / "lacks all"
    # A cache without descriptions of models: with them `plan` needs no models.
    environment = without(private, *ALL) | {"XDG_CACHE_HOME": str(private / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL + SCRIPT, json.dumps(calls)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    said = iter(json.loads(done.stdout.splitlines()[-1]))
    return {name: [(call, *next(said)) for call in group] for name, group in groups.items()}


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


@pytest.fixture(scope="module")
def base(folder: Path) -> dict[str, list[Any]]:
    """Calls where no package of an extra is, and last the calls of `CALLS`, where pytest is."""
    commands = {
        extra: [["command", *arguments] for arguments in lines] for extra, lines in COMMANDS.items()
    }
    groups: dict[str, list[Any]] = {"reading": READING, **commands}
    groups["names"] = [[name] for name in earmill.__all__]
    groups["values"] = [["values", "small"], ["torch dataset", "small"]]
    groups["pytest"] = [["install", "pytest"]]
    groups |= {f"calls of {extra}": calls for extra, calls in CALLS.items()}
    return results(folder, groups)


def test_the_base_reads_inspects_verifies_and_plots(base: dict[str, list[Any]]) -> None:
    for call, code, text in base["reading"]:
        assert code == 0, (call, text)


@pytest.mark.parametrize("extra", COMMANDS)
def test_a_command_names_its_extra_in_one_line(base: dict[str, list[Any]], extra: str) -> None:
    for call, code, text in base[extra]:
        assert code == 2, (call, text)
        assert_one_line(text, extra)


def test_a_job_on_ray_names_ray(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(folder)
    assert run(["extract", "ray.yaml"]) == 2
    assert_one_line(capsys.readouterr().err, "ray")
    with pytest.raises(MissingPackageError) as refused:
        earmill.extract("ray.yaml")
    assert_one_line(str(refused.value), "ray")


@pytest.mark.parametrize("extra", CALLS)
def test_a_public_name_names_its_extra(base: dict[str, list[Any]], extra: str) -> None:
    for call, kind, text in base[f"calls of {extra}"]:
        assert kind == "MissingPackageError", (call, kind, text)
        assert_one_line(text, extra)


def test_every_public_name_is_there_or_names_an_extra(base: dict[str, list[Any]]) -> None:
    missing = []
    for (name,), kind, text in base["names"]:
        if kind != 0:
            assert kind == "MissingPackageError", (name, kind, text)
            assert text.startswith(f"earmill.{name}: ")
            missing.append(name)
    assert {"FeatureLoader", "build_extractor", "models", "Pushed"} <= set(missing)
    assert not {"open_features", "mix", "StreamInfo", "SpikeEvents", "extract"} & set(missing)


WITH_TORCH_ALONE = """
class Searched:
    count = 0

    def find_spec(self, name, path=None, target=None):
        if name in ("numba", "llvmlite"):
            Searched.count += 1
            raise ModuleNotFoundError(f"No module named {name}", name=name)

sys.meta_path.insert(0, Searched())
print(read_all("small"))
print(Searched.count)
ds = earmill.open_features("small")
print(type(ds.torch()[0].features["modulation"]))
loader = earmill.FeatureLoader(ds.iterable(seed=1, batch_size=2))
print(sum(len(batch) for batch in loader))
"""


@pytest.fixture(scope="module")
def torch_alone(folder: Path) -> list[str]:
    """Lines of a process that has torch, no other package of the models, and looks for numba."""
    missing = (name for name in (*EXTRACT, "ray") if name not in ("torch", "numba", "llvmlite"))
    done = subprocess.run(
        [sys.executable, "-c", READ_ALL + WITH_TORCH_ALONE],
        cwd=folder,
        env=without(folder / "reads with torch", *missing),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_values_are_the_same_bits_with_and_without_numba(
    folder: Path, base: dict[str, list[Any]], torch_alone: list[str]
) -> None:
    """numpy widens float16 where numba is missing."""
    (_, code, sums), (_, _, refused) = base["values"]
    assert code == 0 and read_all(folder / "small") == sums == torch_alone[0]
    assert_one_line(refused, "torch")


def test_values_are_read_after_one_search_for_numba(torch_alone: list[str]) -> None:
    """A failed import is not kept by Python: to repeat it for each value takes milliseconds."""
    assert torch_alone[1] == "1"


def test_a_loader_needs_torch_alone(torch_alone: list[str]) -> None:
    assert torch_alone[2:] == ["<class 'torch.Tensor'>", "6"]


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
