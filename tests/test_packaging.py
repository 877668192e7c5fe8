"""What leaves this repository: the source archive, the pins and the cluster files."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from amtcore.numba_internals import TRIED

ROOT = Path(__file__).resolve().parents[1]
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
# The links in src/ that make the packages, relative to the root.
LINKS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("core/src", "src", "src/earmill")
    for path in (ROOT / folder).iterdir()
    if path.is_symlink()
)
OURS = ("earmill", "amtcore")
LOCKS = ("requirements.lock", "requirements-uv.lock", "requirements-browser.lock")


def pins(text: str) -> dict[str, str]:
    """Package to version."""
    return {re.sub("[-_.]+", "-", name).lower(): version for name, version in PIN.findall(text)}


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in the source archive, built from a copy as the build changes its folder."""
    folder = tmp_path_factory.mktemp("sdist")
    parts = ("pipeline", "jobs", "docs", "infra", "tests", "benchmarks")
    unwanted = shutil.ignore_patterns("__pycache__", "golden", "dataset")
    for name in parts:
        shutil.copytree(ROOT / name, folder / "copy" / name, ignore=unwanted)
    shutil.copytree(ROOT / "src", folder / "copy" / "src", symlinks=True)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder / "copy")
    code = "from setuptools import build_meta; build_meta.build_sdist('../dist')"
    (folder / "dist").mkdir()
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder / "copy",
        check=True,
        capture_output=True,
    )
    (built,) = (folder / "dist").glob("*.tar.gz")
    with tarfile.open(built) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}


def test_the_source_archive_holds_what_belongs_to_it(archive: set[str]) -> None:
    kept = [*ROOT.glob("docs/*.md"), *(path for path in ROOT.glob("infra/*") if path.is_file())]
    wanted = {path.relative_to(ROOT).as_posix() for path in kept}
    wanted |= {"README.md", "CHANGELOG.md", "LICENSE", "constraints.txt", "Makefile", *LOCKS}
    wanted |= {"mkdocs.yml", "docs/builder/hooks.py", "docs/assets/site.css"}
    wanted |= {
        "src/earmill/jobs/folder.yaml",
        "src/earmill/jobs/errors.md",
        "src/earmill/jobs/report/templates/page.css",
        "src/earmill/pipeline/operations/run_job.py",
    }
    assert wanted <= archive
    assert [name for name in archive if name.startswith("tests") or name.endswith(".pyc")] == []


def test_files_that_are_equal_but_newer_install_nothing(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "setup.py", *LOCKS):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "interpreter", tmp_path / "interpreter")
    (tmp_path / "core").mkdir()
    shutil.copy(ROOT / "core" / "pyproject.toml", tmp_path / "core")
    for folder in (*LINKS, ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("python", "uv"):
        program = tmp_path / ".venv" / "bin" / name
        program.write_text(f"#!/bin/sh\necho {name} >> installed\n")
        program.chmod(0o755)
    installed = tmp_path / "installed"
    environment = {name: value for name, value in os.environ.items() if name[:4] != "MAKE"}

    def lines_after_setup() -> int:
        subprocess.run(["make", "--quiet", "setup"], cwd=tmp_path, env=environment, check=True)
        return len(installed.read_text().splitlines())

    first = lines_after_setup()
    now = time.time() + 10
    os.utime(tmp_path / "pyproject.toml", (now, now))
    assert lines_after_setup() == first > 0
    with (tmp_path / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    os.utime(tmp_path / "pyproject.toml", (now + 10, now + 10))
    assert lines_after_setup() == 2 * first


@pytest.mark.parametrize("link", LINKS)
def test_a_checkout_without_links_is_refused_at_once(link: str, tmp_path: Path) -> None:
    """Half a package was installed without a word."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "README.md", "LICENSE", *LOCKS):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "interpreter", tmp_path / "interpreter")
    (tmp_path / "core").mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / "core" / name, tmp_path / "core")
    for each in LINKS:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        if each == link:  # as git writes it where core.symlinks is false
            (tmp_path / each).write_text(os.readlink(ROOT / each))
        else:
            (tmp_path / each).mkdir()
    hook = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])()"
    hooks = ("get_requires_for_build_wheel", "get_requires_for_build_editable")
    # Not as a part of the make that runs the tests.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    commands = [["make", "setup", "PYTHON=false"]]
    commands += [[sys.executable, "-W", "ignore", "-c", hook, name] for name in hooks]
    project = tmp_path / "core" if link.startswith("core/") else tmp_path
    for command in commands:
        folder = tmp_path if command[0] == "make" else project
        done = subprocess.run(
            command, cwd=folder, env=alone, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        told = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
        assert len(told) == 1 and told[0].startswith("expected a symbolic link"), done.stderr
        assert f"at {link}, got" in told[0] and "git config core.symlinks true" in told[0]
    assert not (tmp_path / ".venv").exists()


def test_every_pin_has_its_hashes() -> None:
    locked: dict[str, str] = {}
    for name in LOCKS:
        text = (ROOT / name).read_text()
        assert "://" not in text, "a lock names no package index"
        for entry in re.split(r"\n(?=\S)", text.strip()):
            assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry.splitlines()[0]
        locked |= pins(text)
    constrained = pins((ROOT / "constraints.txt").read_text())
    assert {name: locked.get(name) for name in constrained} == constrained, "run: make lock"


def requirements() -> list[Requirement]:
    """Return the requirements of an installation with tests and documentation."""
    found: list[Requirement] = []
    for folder, extras in ((ROOT, ("test", "docs", "all")), (ROOT / "core", ("models", "nir"))):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        optional = project["optional-dependencies"]
        # `all` and the extras that it names hold the rest.
        named = [
            n for extra in extras for line in optional[extra] for n in Requirement(line).extras
        ]
        lines = [*project["dependencies"]]
        for extra in {*extras, *named}:
            lines += optional.get(extra, [])
        found += [Requirement(line) for line in lines]
    return [one for one in found if one.name not in OURS]


def test_the_three_distributions_have_one_version_and_ask_for_each_other_by_it() -> None:
    projects = {
        folder: tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for folder in (".", "core", "interpreter")
    }
    (number,) = {project["version"] for project in projects.values()}
    assert f"amtcore=={number}" in projects["."]["dependencies"]
    assert f"amtcore[models]=={number}" in projects["."]["optional-dependencies"]["extract"]
    assert projects["interpreter"]["dependencies"] == [f"amtcore[models]=={number}"]
    assert f"## [{number}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_base_has_no_torch_no_ray_and_no_compiler() -> None:
    names = set()
    for folder in (ROOT, ROOT / "core"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        names |= {Requirement(line).name for line in project["dependencies"]}
    assert not names & {"torch", "ray", "numba", "llvmlite", "scipy", "datasets", "av", "s3fs"}


def test_every_dependency_is_locked_within_its_bounds() -> None:
    locked = pins((ROOT / "requirements.lock").read_text())
    for wanted in requirements():
        assert any(bound.operator == ">=" for bound in wanted.specifier), wanted
        pin = locked[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(pin), f"{wanted}: {pin} is locked; run: make lock"


def test_a_lock_outside_of_the_bounds_is_seen() -> None:
    (obstore,) = {wanted.specifier for wanted in requirements() if wanted.name == "obstore"}
    assert obstore.contains("0.12.1")
    assert not any(obstore.contains(version) for version in ("0.12.0", "0.13.0", "1.0"))


def test_the_models_packages_have_lower_bounds_alone_and_these_are_within() -> None:
    """`amtcore.numba_internals` refuses a release of numba that it cannot work with."""
    core = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]
    for line in [*core["dependencies"], *core["optional-dependencies"]["models"]]:
        wanted = Requirement(line)
        assert {bound.operator for bound in wanted.specifier} == {">="}, line
        assert wanted.specifier.contains(version(wanted.name)), f"{line}: run: make setup"


def test_a_package_has_the_same_bounds_in_both_projects() -> None:
    bounds: dict[str, str] = {}
    for wanted in requirements():
        assert bounds.setdefault(wanted.name, str(wanted.specifier)) == str(wanted.specifier)


def test_the_tests_run_with_the_release_of_numba_that_messages_name() -> None:
    assert version("numba") == TRIED


def test_what_a_machine_without_gpu_leaves_out_is_what_we_pin() -> None:
    left_out = re.findall(r"^([\w-]+) ;", (ROOT / "infra" / "cpu-only.txt").read_text(), re.M)
    assert left_out and set(left_out) <= set(pins((ROOT / "constraints.txt").read_text()))


def test_the_image_has_one_user_and_a_private_cache_of_kernels() -> None:
    lines = (ROOT / "infra" / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER ${UID}"]
    text = "\n".join(lines)
    (number,) = re.findall(r"^ARG UID=(\d+)$", text, re.MULTILINE)
    assert int(number) >= 1000 and 'useradd --create-home --uid "${UID}" earmill' in text
    (cache,) = re.findall(r"^ENV NUMBA_CACHE_DIR=(\S+)$", text, re.MULTILINE)
    assert f"mkdir -m 0700 {cache}" in text and "chmod" not in text
    assert text.index("USER ${UID}") < text.index(f"mkdir -m 0700 {cache}")
    assert "--require-hashes" in text and "-c requirements.lock" in text


def test_every_cluster_checks_a_token() -> None:
    assert "RAY_AUTH_MODE=token" in (ROOT / "infra" / "slurm.sh").read_text()
    assert "RAY_AUTH_MODE=token" in (ROOT / "infra" / "README.md").read_text()
    up = yaml.safe_load((ROOT / "infra" / "ray-cluster.yaml").read_text())
    assert "RAY_AUTH_MODE=token" in " ".join(up["docker"]["run_options"])
    assert any(target.endswith(".ray/auth_token") for target in up["file_mounts"])
    job = yaml.safe_load((ROOT / "infra" / "kuberay-rayjob.yaml").read_text())
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
