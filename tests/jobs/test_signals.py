"""Signals that end a command, sent to real processes while they import, plan and work."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import FEW, write_corpus, write_job
from tests.pipeline.again_jobs import shards_run_here
from tests.short import only, spread

LINES = {
    signal.SIGINT: "earmill: interrupted",
    signal.SIGTERM: "earmill: ended by SIGTERM",
    signal.SIGHUP: "earmill: ended by SIGHUP",
}


@contextmanager
def started(
    folder: Path, *arguments: str, before: Callable[[], object] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A command that tells on standard error what it imports; gone when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "earmill.jobs.start", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], word: str) -> None:
    """Read standard error up to a line with this word."""
    assert process.stderr is not None
    for line in process.stderr:
        if word in line:
            return
    raise AssertionError(f"{word} never came")


def end_of(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Return the exit code and the last lines of standard error."""
    _, errors = process.communicate()
    said = [line for line in errors.splitlines() if not line.startswith("import time:")]
    return process.returncode, [line for line in said if not line.endswith(" ...")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished dataset and a job that nobody has run."""
    folder = tmp_path_factory.mktemp("signals")
    corpus, few = write_corpus(folder / "corpus", 2), {"params": FEW, "formats": ["parquet"]}
    with shards_run_here():
        run_job(JobSpec.load(write_job(folder / "job.yaml", corpus, folder / "out", **few)))
    write_job(folder / "job.yaml", corpus, folder / "new", **few)
    return folder


@pytest.mark.parametrize(("number", "word"), spread(2, LINES, ["typer", "pyarrow"]))
def test_a_signal_while_a_command_imports_ends_it_in_one_line(
    number: signal.Signals, word: str, place: Path
) -> None:
    with started(place, "verify", "out") as process:
        wait_for(process, word)
        process.send_signal(number)
        assert end_of(process) == (128 + number, [LINES[number]])


LONG = {
    "plan": ("plan", "job.yaml"),
    "extract": ("extract", "job.yaml", "--set", "run.executor=local"),
    "update": ("extract", "job.yaml", "--set", "run.executor=local", "--update"),
    "compact": ("compact", "out"),
    "gc": ("gc", "out"),
    "report": ("report", "out", "--out", "page.html"),
    "push": ("push", "out", "me/set"),
    "watch": ("watch", "nothing", "--wait"),
    "doctor": ("doctor",),
    "kernels": ("kernels", "folder"),
    "demo": ("demo", "--out", "demo"),
}
# The last module that a command imports before its work begins.
BEGUN = {"doctor": "torch", "kernels": "numba", "plan": "soxr"}


@pytest.mark.parametrize("command", only(["plan", "extract", "watch", "doctor"], LONG))
def test_a_long_command_ends_with_the_code_of_the_signal(command: str, place: Path) -> None:
    with started(place, *LONG[command]) as process:
        wait_for(process, BEGUN.get(command, "pyarrow"))
        process.send_signal(signal.SIGTERM)
        assert end_of(process) == (143, [LINES[signal.SIGTERM]])
    if command in ("extract", "update"):
        assert not Layout.open(str(place / "new")).exists("driver.json")


def test_what_is_to_outlive_its_terminal_does(place: Path) -> None:
    def ignore_hang_ups() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    with started(place, "verify", "out", before=ignore_hang_ups) as process:
        wait_for(process, "pyarrow")
        process.send_signal(signal.SIGHUP)
        assert end_of(process) == (0, [])


def test_sigterm_ends_a_page(place: Path) -> None:
    """test_watch_page.py closes a page by Ctrl-C."""
    with started(place, "watch", "out", "--page", "0") as process:
        wait_for(process, "Ctrl-C ends it")
        process.send_signal(signal.SIGTERM)
        code, said = end_of(process)
        assert (code, said[0]) == (143, "the page is closed")


def test_a_second_signal_ends_a_command_at_once(place: Path) -> None:
    """Some code has swallowed the first one."""
    swallows = (
        "import os, signal, sys\n"
        "from earmill.jobs.console import process\n"
        "process.catch_signals()\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "except KeyboardInterrupt:\n"
        "    pass\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('still there')\n"
    )
    done = subprocess.run([sys.executable, "-c", swallows], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "")


def test_a_command_that_does_not_leave_is_ended(place: Path) -> None:
    """A thread that nobody can interrupt keeps the process."""
    waits = (
        "import os, signal, threading, time\n"
        "from earmill.jobs.console import process\n"
        "process.LEAVES_WITHIN_S = 0.1\n"
        "process.catch_signals()\n"
        "threading.Thread(target=time.sleep, args=(3600,)).start()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
    )
    done = subprocess.run([sys.executable, "-c", waits], capture_output=True, text=True)
    assert done.returncode == 129 and done.stderr.endswith("earmill: ended by SIGHUP\n")
