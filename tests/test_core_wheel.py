"""The wheel of amtcore in an environment of its own, without earmill, and what it imports there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from amtcore.kernels.vector.kernel_cache import FOLDER, PREBUILT, own_folder

ROOT = Path(__file__).resolve().parents[1]

#: Half a second to three each, and no part of a job needs them; operators import the compiler.
LEFT_OUT = {"torch._dynamo", "sympy", "scipy.linalg", "scipy.interpolate", "ray", "matplotlib"}
#: Loaded by those who ask for them; the interpreter is a distribution of its own.
ASKED_FOR = {"torchaudio", "amtcore.features.mel", "amtcore_interpreter"}
#: A module of the compiler. A process that finds its kernels on disk does not import it.
OF_A_COMPILER = "numba.np.arraymath"

#: Every worker pays for the modules that are imported before a process computes.
SCRIPT = """
import importlib.util, sys
import numpy as np
from amtcore.features.registry import BUILT_IN, build_extractor, list_models

assert importlib.util.find_spec("earmill") is None
streams = {"dau1997": {"modulation": {}, "spikes": {"gain": 1.0}}}
for name in BUILT_IN:
    build_extractor(name, streams=streams.get(name)).extract([np.zeros(800, np.float32)])
    print(*sys.modules)
assert [model.error for model in list_models()] == [None] * 21
(made,) = build_extractor("dau1997", fs_hz=16000).extract([np.zeros(1600, np.float32)])
assert made["modulation"].shape == (10, 248)
(info,) = build_extractor("melspectrogram").streams
print(info.width, build_extractor("melspectrogram").distribution)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; what it depends on is looked up in this one."""
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "amtcore", folder / "amtcore", ignore=unwanted)
    shutil.copytree(ROOT / "core", folder / "core", symlinks=True, ignore=unwanted)
    code = "from setuptools import build_meta; build_meta.build_wheel('..')"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder / "core",
        check=True,
        capture_output=True,
    )
    (wheel,) = folder.glob("*.whl")
    root = tmp_path_factory.mktemp("environment")
    venv.create(root, symlinks=True)
    packages = Path(
        sysconfig.get_path("purelib", "venv", {"base": str(root), "platbase": str(root)})
    )
    with zipfile.ZipFile(wheel) as archive:
        top = {name.split("/")[0] for name in archive.namelist()}
        assert {name for name in top if not name.endswith(".dist-info")} == {"amtcore"}
        assert {name for name in archive.namelist() if name.startswith("amtcore/")} == {
            path.relative_to(folder).as_posix()
            for path in (folder / "amtcore").rglob("*")
            if path.is_file()
        }
        archive.extractall(packages)
    # Links to what the models depend on, without earmill's own entry points.
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.lower().startswith(("earmill", "amtcore", "__editable__")):
            target = packages / entry.name
            if not target.exists() and entry.suffix != ".pth":
                target.symlink_to(entry)
    return root / "bin" / "python"


def test_the_models_work_without_earmill_compiler_and_scipy(python: Path, tmp_path: Path) -> None:
    # Kernels that were compiled from equal sources; without them it compiles its own.
    (tmp_path / FOLDER).symlink_to(own_folder())
    environment = {**os.environ, PREBUILT: str(tmp_path)}
    command = [str(python), "-I", "-c", SCRIPT]
    for _ in range(2):  # the first may be the first ever, and compile
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        *imported, said = done.stdout.splitlines()
        first, *_, last = (set(line.split()) for line in imported)
        if OF_A_COMPILER not in last:
            break
    assert said.split() == ["80", "amtcore", "0.2.0"]
    assert not (LEFT_OUT | {OF_A_COMPILER}) & first
    assert not ASKED_FOR & last
    # Some models interpolate.
    assert not (LEFT_OUT - {"scipy.linalg", "scipy.interpolate"}) & last
