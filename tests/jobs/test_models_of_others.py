"""The command `models` on models of other distributions, and on an unsafe folder of kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from amtcore.features.registry import BUILT_IN
from earmill.jobs.cli import run

from ..amtcore.test_kernel_cache import made
from ..amtcore.test_registry import _peak, place  # noqa: F401


def test_a_model_is_shown_with_its_distribution(
    place: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    _peak(place)
    assert run(["models", "peak", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert list(listed["params"]) == ["hop_length"]
    assert listed["distribution"] == "loud-things 1.0" and listed["error"] is None
    assert run(["models", "peak"]) == 0
    assert "loud-things 1.0" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["no_such_module:Peak", "peak_model:Peek", "peak_model:np"])
def test_a_broken_model_hurts_no_other(
    place: Path,  # noqa: F811
    value: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _peak(place, broken=value)
    assert run(["models", "--json"]) == 0
    listed = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    assert {*BUILT_IN, "broken"} <= set(listed)
    assert listed["broken"]["error"] and listed["dau1997"]["error"] is None
    assert run(["models", "broken"]) == 0


@pytest.mark.long
def test_no_kernel_is_loaded_from_such_a_folder(tmp_path: Path) -> None:
    """The whole way: importing the models fails, and the command says it in one line."""
    cache = made(tmp_path / "cache", 0o1777)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "earmill.jobs.start", "models", "--json"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "everybody can write to it (mode 1777)" in line and "NUMBA_CACHE_DIR" in line
    assert list(cache.iterdir()) == []
