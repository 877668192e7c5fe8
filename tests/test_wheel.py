"""The wheel in an environment of its own, used beside files that hold the names of our folders."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("pipeline", "jobs", "src")
HOSTILE = 'raise ImportError("a file of the user was imported in the place of earmill\'s own")\n'
FS_HZ = 16000

SCRIPT = """
import json
import earmill

seen = []
end = earmill.extract("job.yaml", overrides=["output.uri=out/python"], progress=seen.append)
ds = earmill.open_features("out/python")
print(json.dumps({
    "rows": [row.row_id for row in ds],
    "ok": end.rows_ok,
    "verified": earmill.verify("out/python").ok,
    "events": sorted({type(event).__module__ for event in seen}),
    "homes": [earmill.__file__, earmill.models.__file__],
}))
"""


@dataclass(frozen=True)
class Installed:
    """An environment that holds the wheel, and a folder of a user's own files."""

    python: Path
    packages: Path
    folder: Path

    def run(self, *command: str) -> str:
        """Standard output of a command in the user's folder, which Python puts first."""
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.python), *command],
            cwd=self.folder,
            env=environment | {"PATH": f"{self.python.parent}:{environment['PATH']}"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy as the build changes its folder."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PARTS:
        unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / "copy" / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, folder / "copy")
    (folder / "dist").mkdir()
    code = "from setuptools import build_meta; build_meta.build_wheel('../dist')"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder / "copy",
        check=True,
        capture_output=True,
    )
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel alone in a new environment; what it depends on is looked up in this one.

    A path in a .pth file is searched, but the .pth files there are not: that of an editable install
    of the checkout does not count.
    """
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, symlinks=True)
    python = root / "bin" / "python"
    packages = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(root), "platbase": str(root)})
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # amtcore's own wheel has its own test: here a copy with the metadata of this environment.
    unwanted = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "amtcore", packages / "amtcore", ignore=unwanted)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    folder = tmp_path_factory.mktemp("user")
    _hostile_files(folder)
    _job(folder)
    return Installed(python, packages, folder)


def _hostile_files(folder: Path) -> None:
    for name in ("pipeline.py", "spec.py", "jobs/__init__.py", "tests/__init__.py"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(HOSTILE)
    (folder / "amtcore.txt").write_text("no module\n")


def _job(folder: Path) -> None:
    (folder / "audio").mkdir()
    rng = np.random.default_rng(5)
    for i in range(3):
        noise = 0.05 * rng.standard_normal(FS_HZ // 4)
        soundfile.write(folder / "audio" / f"{i}.wav", noise.astype(np.float32), FS_HZ)
    spec = {
        "source": {"kind": "files", "uri": "audio"},
        "extract": [{"model": "dau1997", "fs_hz": FS_HZ}],
        "output": {"uri": "out/command", "formats": ["zarr"]},
        "run": {"workers": 1, "threads_per_worker": 1},
    }
    (folder / "job.yaml").write_text(json.dumps(spec))  # JSON is YAML


def test_the_wheel_holds_earmill_and_nothing_else_at_the_top(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"earmill"}
    assert {"earmill/py.typed", "earmill/__init__.pyi", "earmill/jobs/folder.yaml"} <= set(names)
    assert "earmill/pipeline/operations/run_job.py" in names
    assert not [name for name in names if name.endswith(".pyc") or "/tests/" in name]


@pytest.mark.long
def test_a_job_runs_in_a_folder_with_hostile_names(installed: Installed) -> None:
    """Driver and workers, from a script beside them; then the command on what it wrote."""
    (installed.folder / "mine.py").write_text(SCRIPT)
    said = json.loads(installed.run("mine.py").splitlines()[-1])
    assert said["rows"] == ["0.wav", "1.wav", "2.wav"]
    assert said["ok"] == 3 and said["verified"]
    assert said["events"] == ["earmill.pipeline.driver.events"]
    assert all(Path(home).is_relative_to(installed.packages) for home in said["homes"])
    out = installed.run("-m", "earmill.jobs.start", "verify", "out/python", "--json")
    assert json.loads(out)["ok"]


def test_the_environment_sees_no_checkout(installed: Installed) -> None:
    code = "import earmill, amtcore, sys; print(earmill.__file__, amtcore.__file__)"
    for name in installed.run("-c", code).split():
        assert Path(name).is_relative_to(installed.packages)
    code = "import importlib.util as u; print(u.find_spec('pipeline').origin)"
    assert Path(installed.run("-c", code).strip()) == installed.folder / "pipeline.py"
