"""Kernels compiled ahead: what goes into a folder, and what a model that fails says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import entries_of
from earmill.pipeline.worker.models import compile_into, entries_of_all


def test_a_model_that_fails_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process imports a module in the place of torch, whose import takes four CPU seconds."""
    (tmp_path / "torch.py").write_text("raise RuntimeError('no such library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (line,) = compile_into(tmp_path / "kernels", [{"model": "dau1997"}], cpu=None, features=None)
    assert line == "dau1997: RuntimeError: no such library"


@pytest.mark.long
def test_a_model_that_does_not_exist_is_told_in_a_line(tmp_path: Path) -> None:
    (line,) = compile_into(tmp_path, [{"model": "dau1998"}], cpu=None, features=None)
    assert line.startswith("dau1998: ") and "dau1997" in line


def test_a_job_needs_its_own_models_only() -> None:
    spec = JobSpec.load(
        {
            "source": {"kind": "files", "uri": "clips"},
            "audio": {"calibration": {"rms1_db_spl": 100}},
            "extract": [{"model": "king2019", "fs_hz": 16000}],
            "output": {"uri": "out"},
        }
    )
    (entry,) = entries_of(spec)
    assert entry["model"] == "king2019" and entry["fs_hz"] == 16000
    assert {"dau1997", "king2019", "moore2016"} < {each["model"] for each in entries_of_all()}


@pytest.mark.long
def test_every_model_compiles_into_a_folder(tmp_path: Path) -> None:
    assert not compile_into(tmp_path, entries_of_all(), cpu=None, features=None)
    names = {path.name.split("-")[0] for path in tmp_path.rglob("*.kernel")}
    assert {"run_chain", "run_lower_skirt", "run_attack_release"} <= names
    assert {"_narrow", "_encode_blocks", "_decode_blocks"} <= names
