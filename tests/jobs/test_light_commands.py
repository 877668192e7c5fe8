"""Commands that answer at once: what they leave out, and when what is kept of models holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from amtcore.features.registry import list_models
from earmill.jobs.commands.models import listed_models
from earmill.pipeline.common import user_cache
from earmill.pipeline.common.user_cache import models_key
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import validate_models

HEAVY = {"torch", "numba", "ray", "scipy", "zarr", "datasets", "matplotlib"}
SPEECH = Path(__file__).parents[1] / "data" / "speech"
STORED = Path(__file__).parents[1] / "data" / "layout1" / "dataset"
_RUN = """
import sys
from earmill.jobs.cli import run
codes = [run(line.split()) for line in sys.argv[1:]]
print(*codes, *sys.modules, file=sys.stderr)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "earmill"


def test_what_is_kept_is_what_the_models_say_and_needs_no_model(
    cache: Path, tmp_path: Path
) -> None:
    made = listed_models()
    assert made == listed_models()
    assert made == json.loads(json.dumps([model.to_dict() for model in list_models()], default=str))
    (path,) = cache.iterdir()
    assert json.loads(path.read_text()) == made
    job = tmp_path / "job.json"
    job.write_text(
        json.dumps(
            {
                "source": {"kind": "files", "uri": str(SPEECH)},
                "extract": [{"model": "dau1997"}],
                "output": {"uri": "out", "formats": ["parquet"]},
            }
        )
    )
    validate_models(JobSpec.load(job))
    commands = ["models --json", "models dau1997", f"inspect {STORED}", f"plan {job}"]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *commands], capture_output=True, text=True, check=True
    )
    codes, modules = done.stderr.split()[:4], set(done.stderr.split()[4:])
    assert codes == ["0"] * 4 and not HEAVY & modules
    assert json.loads(done.stdout.splitlines()[0]) == made


def test_a_damaged_list_is_made_again(cache: Path) -> None:
    made = listed_models()
    (path,) = cache.iterdir()
    path.write_text("[{")
    assert listed_models() == made == json.loads(path.read_text())


def test_other_sources_and_versions_have_a_list_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = models_key()
    monkeypatch.setattr(user_cache, "version", lambda name: "0")
    assert models_key() != before
    strangers: list[Any] = [type("Point", (), {"name": "mine", "dist": None})]
    monkeypatch.setattr(user_cache, "entry_points", lambda group: strangers)
    assert models_key() is None
