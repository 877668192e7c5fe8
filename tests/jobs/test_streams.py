"""Standard streams that are closed, full or not read: real processes, of every kind of command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from earmill.jobs.console import process
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from tests.chaos.jobs import FEW, assert_whole, write_corpus, write_job
from tests.pipeline.again_jobs import shards_run_here
from tests.short import only

EARMILL = f"{sys.executable} -m earmill.jobs.start"
#: The command with workers that are threads. Workers that are processes have streams of their own,
#: and each of them and the process that builds the models would import torch.
ONE_PROCESS = (
    f"PYTHONPATH={Path(__file__).parents[2]} {sys.executable} -c 'import torch; "
    "from earmill.jobs.start import main; from tests.pipeline.workers_here import workers_here\n"
    "with workers_here(): main()'"
)
COMMANDS = (
    *("--version", "--help", "models --json", "spec", "log out --json", "inspect out"),
    *("verify out", "gc out --dry-run", "watch out --once", "report out --out page.html"),
)
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished dataset."""
    folder = tmp_path_factory.mktemp("streams")
    corpus = write_corpus(folder / "corpus", 2)
    job = write_job(folder / "job.yaml", corpus, folder / "out", params=FEW, formats=["parquet"])
    with shards_run_here():
        run_job(JobSpec.load(job))
    return folder


def shell(line: str, folder: Path) -> tuple[int, list[str]]:
    """Exit code and lines on standard error of a line for bash."""
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"], cwd=folder, capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr, done.stderr
    lines = [one for one in done.stderr.splitlines() if not one.endswith(" ...")]
    return done.returncode, lines


@pytest.mark.parametrize("command", only(["--version", "watch out --once"], COMMANDS))
def test_a_command_that_cannot_show_anything_says_so_and_fails(command: str, place: Path) -> None:
    assert shell(f"{EARMILL} {command} >&-", place) == (
        1,
        ["earmill: cannot write to standard output: it is closed"],
    )


@needs_full
@pytest.mark.parametrize(
    "command",
    only(["log out --json"], ["--help", "log out --json", "watch out --once --json"]),
)
def test_a_full_disk_is_named(command: str, place: Path) -> None:
    assert shell(f"{EARMILL} {command} >{FULL}", place) == (
        1,
        ["earmill: cannot write to standard output: No space left on device"],
    )


@pytest.mark.parametrize(
    "command", only(["inspect out"], ["--help", "inspect out", "watch out --once"])
)
def test_a_pipe_that_nobody_reads_ends_a_command_quietly(command: str, place: Path) -> None:
    assert shell(f"{EARMILL} {command} | exec true", place) == (process.NOT_READ, [])


@pytest.mark.parametrize(
    "command", only(["verify out"], ["log out", "verify out", "report out --out page.html"])
)
def test_a_closed_standard_error_changes_nothing(command: str, place: Path) -> None:
    assert shell(f"{EARMILL} {command} 2>&- >said", place) == (0, [])
    assert (place / "said").read_text()


def test_no_file_takes_the_number_of_a_closed_stream(place: Path) -> None:
    """The messages of a library would land in that file."""
    look = (
        "import os, sys; from earmill.jobs.console import process; process.guard_streams(); "
        "file = open('first', 'w'); os.write(2, b'of a library'); sys.stderr.write('news'); "
        "file.write(str(file.fileno()))"
    )
    code, _ = shell(f"""{sys.executable} -c "{look}" 0<&- 1>&- 2>&-""", place)
    assert code == 0 and int((place / "first").read_text()) > 2


@pytest.mark.parametrize(
    ("command", "how"),
    [
        pytest.param(ONE_PROCESS, f"--json >{FULL}", marks=needs_full, id="full, one process"),
        pytest.param(EARMILL, f"--json >{FULL}", marks=[needs_full, pytest.mark.long], id="full"),
        pytest.param(EARMILL, "--json | exec true", marks=pytest.mark.long, id="not read"),
        pytest.param(EARMILL, ">&- 2>&-", marks=pytest.mark.long, id="closed"),
    ],
)
def test_a_job_goes_on_where_nobody_reads_it(command: str, how: str, tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "corpus", 2), tmp_path / "out"
    job = write_job(tmp_path / "job.yaml", corpus, out, params=FEW, formats=["parquet"])
    local = "--set run.executor=local --set run.workers=1"
    code, said = shell(f"{command} extract {job} {local} {how}", tmp_path)
    assert code == 0
    assert_whole(out)
    if "2>" not in how:
        (line,) = said
        assert line.startswith("earmill: cannot write") and "the run goes on" in line


def test_text_streams_are_handed_on_as_they_are() -> None:
    """The real stream answers what libraries ask."""
    with open(os.devnull, "w") as inner:
        stream = process._Stream(inner, is_output=True)
        assert stream.fileno() == inner.fileno() and stream.encoding == inner.encoding
        assert not stream.isatty()
