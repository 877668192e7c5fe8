"""The schema for editors: committed as it is made, takes every job that we ship, and refuses what
the spec refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from amtcore.features.registry import list_models
from earmill.pipeline.common.errors import EarmillError
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.reference import json_schema

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "job.schema.json"
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    Draft202012Validator.check_schema(json_schema())
    return Draft202012Validator(json_schema())


def job(**changes: Any) -> dict[str, Any]:
    return {
        "source": {"kind": "files", "uri": "in"},
        "extract": [{"model": "dau1997", "streams": {"modulation": {}}}],
        "output": {"uri": "out"},
    } | changes


def test_the_committed_file_is_current() -> None:
    made = json.dumps(json_schema(), indent=1) + "\n"
    assert FILE.read_text() == made, "run: earmill spec --json-schema > docs/job.schema.json"


@pytest.mark.parametrize("path", JOBS, ids=[path.stem for path in JOBS])
def test_every_job_that_is_shipped_passes(path: Path, schema: Draft202012Validator) -> None:
    schema.validate(yaml.safe_load(path.read_text()))


def test_every_model_and_stream_passes(schema: Draft202012Validator) -> None:
    for model in list_models():
        for stream in model.streams:
            schema.validate(job(extract=[{"model": model.name, "streams": {stream: {}}}]))


EMPTY: list[dict[str, Any]] = [
    {"extract": [{"model": "dau1997", "streams": {"modulation": None}}]},
    {"extract": [{"model": "dau1997", "streams": None}]},
    {"extract": [{"model": "dau1997", "params": None}]},
    {"output": {"uri": "out", "formats": "zarr"}},
    {"output": {"uri": "out", "storage_options": None}},
    {"audio": None},
    {"audio": {"calibration": None}},
    {"audio": {"channels": 1}},
    {"run": None},
    {"run": {"workers": None}},
    {"name": None},
]


@pytest.mark.parametrize("changes", EMPTY, ids=str)
def test_schema_and_spec_agree_on_null_and_single_values(
    changes: dict[str, Any], schema: Draft202012Validator, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job(**changes)))
    try:
        JobSpec.load(path)
        taken = True
    except EarmillError:
        taken = False
    assert schema.is_valid(job(**changes)) == taken


def test_a_stream_with_nothing_behind_it_takes_its_defaults(tmp_path: Path) -> None:
    loaded = []
    for text in ("streams: {modulation: }", "streams: {modulation: {}}"):
        path = tmp_path / "job.yaml"
        head = "source: {kind: files, uri: in}\noutput: {uri: out}\n"
        path.write_text(f"{head}extract: [{{model: dau1997, {text}}}]\n")
        loaded.append(JobSpec.load(path))
    assert loaded[0] == loaded[1]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "key": (job(outptu={}), "outptu"),
    "section": (job(audio={"chanels": "mean"}), "chanels"),
    "kind": (job(source={"kind": "folder", "uri": "in"}), "folder"),
    "key_of_kind": (job(source={"kind": "files", "uri": "in", "globb": "*"}), "globb"),
    "key_of_other_kind": (job(source={"kind": "files", "uri": "in", "split": "a"}), "split"),
    "missing": (job(source={"kind": "hf"}), "uri"),
    "model": (job(extract=[{"model": "dau97"}]), "dau97"),
    "stream": (job(extract=[{"model": "dau1997", "streams": {"mod": {}}}]), "mod"),
    "type": (job(run={"workers": "many"}), "many"),
    "bound": (job(run={"max_bad_fraction": -1}), "-1"),
    "choice": (job(output={"uri": "out", "dtype": "float8"}), "float8"),
    "nothing": (job(extract=[]), "[]"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_spec_refuses_is_marked(name: str, schema: Draft202012Validator) -> None:
    bad, word = BAD[name]
    assert any(word in error.message for error in schema.iter_errors(bad))


@pytest.mark.parametrize("name", sorted(BAD.keys() - {"model", "stream"}))
def test_and_the_spec_does_refuse_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(BAD[name][0]))
    with pytest.raises(EarmillError):
        JobSpec.load(path)
