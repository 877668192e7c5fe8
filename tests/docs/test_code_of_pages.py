"""Code of README, docs/ and infra/: commands parse, job files are valid, quick pages run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tomllib
import types
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
import yaml

from docs.builder.blocks import Block, blocks_of, meta_of
from earmill import FeatureLoader, open_features
from earmill.jobs.cli import app, run
from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import validate_models
from tests.docs import page_code
from tests.docs.page_code import commands_of
from tests.pipeline.reader_data import write_set
from tests.pipeline.workers_here import workers_here

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "infra" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]
LANGUAGES = {
    "",
    "console",
    "python",
    "pycon",
    "yaml",
    "toml",
    "bash",
    "text",
    "json",
    "sql",
    "check",
}
#: Commands of others, which pages may show and nobody here can check.
OUTSIDE = {"pip", "uv", "docker", "kubectl", "helm", "ray", "srun", "sbatch", "export", "cd", "aws"}
OUTSIDE |= {"terraform", "sky", "modal", "sed"}
OUTSIDE |= {"id=$", "jq", "unzip", "ls", "cat", "cp", "rm", "python", "python3", ".", "echo"}
#: Pages whose `>>>` examples other tests run: test_api_pages, test_training_page, test_gpu_page.
DOCTESTED = ("docs/api", "docs/training.md", "docs/gpu.md")
#: Pages without a head of their own whose Python is run by `make test-long`, or by tests below.
PREPARED = (*page_code.PREPARED, "docs/training.md", "docs/extending.md")
FRAGMENT = {
    "source": {"kind": "files", "uri": "in"},
    "extract": [{"model": "dau1997"}],
    "output": {"uri": "out"},
}


def complaint(words: list[str]) -> str | None:
    """What is wrong with a command line; None where nothing is."""
    name, arguments = words[0], words[1:]
    if name == "earmill":
        return _earmill_complaint(arguments)
    if name == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
        asked = {word for word in arguments if "=" not in word}
        return f"no target {sorted(asked - targets)}" if asked - targets else None
    if name == "python" and arguments[:1] == ["-m"] and "." in arguments[1]:
        file = ROOT / (arguments[1].replace(".", "/") + ".py")
        return None if file.exists() else f"no module {arguments[1]}"
    if name in ("sbatch", "bash"):
        scripts = [word for word in arguments if word.endswith(".sh")]
        return next((f"no file {s}" for s in scripts if not (ROOT / s).exists()), None)
    return None if name in OUTSIDE or name == "#" else f"unknown command {name}"


@cache
def _group() -> tuple[Any, Any]:
    """The command line's commands and their context; building them takes a tenth of a second."""
    group: Any = typer.main.get_command(app)
    return group, group.make_context("earmill", [], resilient_parsing=True)


def _earmill_complaint(arguments: list[str]) -> str | None:
    group, top = _group()
    if arguments[0].startswith("-"):
        known = {name for param in group.get_params(top) for name in param.opts}
        return None if arguments[0] in known else f"no option {arguments[0]}"
    command = group.get_command(top, arguments[0])
    if command is None:
        return f"no command {arguments[0]}"
    if arguments[1:] in ([], ["..."]):  # the command as such
        return None
    rest = [word for word in arguments[1:] if word != "..."]
    try:
        command.make_context(arguments[0], rest, parent=top)
    except Exception as error:
        said = error.format_message() if hasattr(error, "format_message") else repr(error)
        return None if "does not exist" in said or "Missing argument" in said else said
    return None


def check_yaml(block: Block, monkeypatch: pytest.MonkeyPatch) -> str:
    """Check a block by what it is; what it was taken for."""
    values = yaml.safe_load(block.text)
    if isinstance(values, list) or not set(values) & set(JobSpec.model_fields):
        return "other"
    net = types.SimpleNamespace(Encoder=type("Encoder", (torch.nn.Identity,), {}))
    monkeypatch.setitem(sys.modules, "mypackage", types.ModuleType("mypackage"))
    monkeypatch.setitem(sys.modules, "mypackage.nets", net)  # type: ignore[arg-type]
    spec = JobSpec.model_validate(FRAGMENT | values)
    if all(entry.model != "torch_module" for entry in spec.extract):
        validate_models(spec)
    return "job"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_of_the_page_parse(page: Path) -> None:
    wrong = {" ".join(words): complaint(words) for words in commands_of(page.read_text())}
    assert {line: said for line, said in wrong.items() if said} == {}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("earmill extrat job.yaml", "no command extrat"),
        ("earmill extract job.yaml --resum", "--resum"),
        ("earmill --versoin", "no option"),
        ("make testt", "testt"),
        ("python -m benchmarks.nothing", "no module"),
        ("sbatch infra/slurmm.sh", "no file"),
        ("earmil plan", "unknown command"),
    ],
)
def test_a_wrong_command_is_found(line: str, said: str) -> None:
    (words,) = commands_of(f"```bash\n{line}  # why\n```\n")
    assert said in (complaint(words) or "")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_blocks_of_the_page_are_what_they_say(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = page.relative_to(ROOT).as_posix()
    text = page.read_text()
    for block in blocks_of(text):
        assert block.language in LANGUAGES, f"{name}:{block.line}"
        if block.language == "yaml":
            check_yaml(block, monkeypatch)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language in ("python", "pycon"):
            run_by_somebody = "run" in meta_of(text) or name in PREPARED
            if ">>>" in block.text:
                run_by_somebody = name.startswith(DOCTESTED)
            assert run_by_somebody, f"{name}:{block.line}: say `run: quick` or `run: long` on top"


def test_a_wrong_job_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("audio: {chanels: mean}", "extract: [{model: dau1997, streams: {mod: {}}}]"):
        with pytest.raises((ValueError, SpecError), match=r"chanels|mod"):
            check_yaml(Block("yaml", text, 1), monkeypatch)


@pytest.mark.parametrize("page", page_code.pages("quick"), ids=lambda page: page.stem)
def test_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    with workers_here():
        assert page_code.run(page, shell=run_commands) > 0


def run_commands(text: str, where: str) -> str:
    """Run a shell block in this process if `earmill` is its only command.

    A job of a new process takes 12 CPU seconds: three processes import their modules. Tests in
    tests/jobs run jobs in new processes, and so does the notebook of `make test`.
    """
    lines = list(commands_of(f"```bash\n{text}\n```\n"))
    if {words[0] for words in lines} != {"earmill"}:
        return page_code.run_shell(text, where)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for words in lines:
            assert run(words[1:]) == 0, f"{where}: {words}"
    return out.getvalue()


@pytest.mark.pages
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name",
    [*page_code.PREPARED, *(page.relative_to(ROOT).as_posix() for page in page_code.pages("long"))],
)
def test_the_page_runs_in_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    run_alone(name, tmp_path)


@pytest.mark.integrations
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", page_code.pages("integrations"), ids=lambda page: page.stem)
def test_the_page_runs_with_large_packages(page: Path, tmp_path: Path) -> None:
    run_alone(page.relative_to(ROOT).as_posix(), tmp_path)


def run_alone(name: str, folder: Path) -> None:
    """Run a page in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.docs import page_code; page_code.run_named({name!r})"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_the_page_on_extending_defines(tmp_path: Path) -> None:
    assert page_code.run(ROOT / "docs" / "extending.md") > 5


def test_the_loop_of_the_page_on_training(tmp_path: Path) -> None:
    write_set(tmp_path / "set", n_rows=6, finalised=True)
    loader = FeatureLoader(open_features(tmp_path / "set").iterable(seed=1, batch_size=2))
    plain = [
        block
        for block in blocks_of((ROOT / "docs" / "training.md").read_text())
        if block.language == "python" and ">>>" not in block.text
    ]
    assert len(plain) == 1
    names: dict[str, Any] = {"loader": loader}
    exec(plain[0].text, names)
    assert names["checkpoint"]["data"] == loader.state_dict()


def test_a_page_that_says_what_is_not_so_is_found(tmp_path: Path) -> None:
    page = ROOT / "docs" / "index.md"
    for text in (
        "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n",
        "```python\nn = 2\n```\n\n<!-- check: n == 3 -->\n",
        "```bash\nfalse\n```\n",
        "```python\n1 / 0\n```\n",
    ):
        with pytest.raises(page_code.PageError, match=r"docs/index\.md:"):
            page_code.run(page, text=text)
    assert page_code.run(page, text="```python\nprint(2)\n```\n\n```text\n...\n```\n") == 1
