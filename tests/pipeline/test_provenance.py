"""Provenance is asked from the system: checked against other sources of the same facts."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from earmill.pipeline.common.machine import processor_name
from earmill.pipeline.dataset.provenance import (
    VALUE_PACKAGES,
    code_sha256,
    device_info,
    git_state,
    host_info,
    package_versions,
    run_provenance,
)
from earmill.pipeline.worker.shard_runner import value_versions


def git(folder: Path, *command: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *who, *command], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with one committed package."""
    package = tmp_path / "repo" / "package"
    package.mkdir(parents=True)
    (package / "code.py").write_text("x = 1\n")
    git(tmp_path / "repo", "init", "--quiet")
    git(tmp_path / "repo", "add", "package")
    git(tmp_path / "repo", "commit", "--quiet", "-m", "first")
    return tmp_path / "repo"


def test_versions_are_those_of_the_installed_packages() -> None:
    versions = package_versions()
    assert len(versions) > 50
    assert list(versions) == sorted(versions)
    for name in ("numpy", "pyarrow", "zarr", "torch", "typing-extensions"):
        assert versions[name] == metadata.version(name)
    import numpy

    assert versions["numpy"] == numpy.__version__


def test_a_commit_record_gets_the_packages_that_touch_values() -> None:
    versions = value_versions()
    assert set(versions) <= set(VALUE_PACKAGES)
    assert {"earmill", "torch", "numpy", "numba", "soundfile", "soxr"} <= set(versions)
    assert len(json.dumps(versions)) < 500


def test_a_clean_and_a_modified_checkout(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert git_state(checkout / "package") == {"commit": commit, "dirty": False}
    (checkout / "notes.txt").write_text("not tracked")
    assert git_state(checkout / "package") == {"commit": commit, "dirty": False}
    (checkout / "package" / "code.py").write_text("x = 2\n")
    assert git_state(checkout / "package") == {"commit": commit, "dirty": True}


def test_an_environment_inside_a_foreign_checkout_is_not_that_checkout(checkout: Path) -> None:
    installed = checkout / "venv" / "package"
    installed.mkdir(parents=True)
    (installed / "code.py").write_text("x = 1\n")
    assert git_state(installed) is None


def test_no_checkout_no_commit_no_git(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    plain = tmp_path / "plain"
    plain.mkdir()
    assert git_state(plain) is None
    unborn = tmp_path / "unborn"
    unborn.mkdir()
    git(unborn, "init", "--quiet")
    (unborn / "a.py").write_text("")
    git(unborn, "add", "a.py")
    assert git_state(unborn) is None
    monkeypatch.setenv("PATH", str(plain))
    assert git_state(checkout / "package") is None


def test_the_code_hash_sees_names_contents_and_nothing_else(tmp_path: Path) -> None:
    def tree(root: str, **files: str) -> Path:
        for name, text in files.items():
            path = tmp_path / root / "package" / name.replace("__", "/").replace("_py", ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / root / "package"

    first = code_sha256([tree("a", a_py="x", sub__b_py="y", data="1")])
    assert code_sha256([tree("b", a_py="x", sub__b_py="y", data="2")]) == first
    changed = [
        code_sha256([tree("c", a_py="x", sub__b_py="z")]),
        code_sha256([tree("d", a_py="x", sub__c_py="y")]),
        code_sha256([tree("e", a_py="xsub/b.pyy")]),
        code_sha256([tree("f", a_py="x", sub__b_py="y", new_py="")]),
    ]
    assert len({first, *changed}) == 5
    assert code_sha256() == code_sha256()
    assert code_sha256() != first


def test_the_host_is_this_one() -> None:
    host = host_info()
    assert host["name"] == platform.node()
    assert host["cores"] == os.cpu_count()
    assert host["memory_bytes"] == psutil.virtual_memory().total
    assert host["python"] == platform.python_version()
    assert host["processor"] == processor_name() != ""


def test_the_device_is_what_computes() -> None:
    assert device_info() == {"device": "cpu", "backend": "cpu", "name": processor_name()}


def test_a_run_is_described_in_plain_json_without_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret-value")
    described = {"model": "dau1997", "fs_hz": 44100.0, "backend": "numba", "dtype": "float32"}
    text = json.dumps(run_provenance([described], device="cpu", dtype="float16"))
    # What computed is known shard by shard; the process that says this did not.
    del described["backend"]
    assert json.loads(text)["models"] == [described]
    assert json.loads(text)["device"] == {"wanted": "cpu"}
    assert json.loads(text)["output_dtype"] == "float16"
    assert set(json.loads(text)) == {
        "versions",
        "git",
        "code_sha256",
        "host",
        "device",
        "models",
        "output_dtype",
    }
    assert "very-secret-value" not in text
