"""A driver that is stopped as by a laptop's lid, with its workers, while others go on.

The others find its signs of life as old as after minutes. It wakes when all is done, says in one
line that it was overtaken, and leaves the output as it found it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import ROOT, assert_whole, write_corpus, write_job
from tests.pipeline import audio_factory
from tests.pipeline.stopped import let_minutes_pass

pytestmark = pytest.mark.chaos
CLIPS = 12
EARMILL = (sys.executable, "-m", "earmill.jobs.start")
LOCAL = ("--set", "run.executor=local", "--set", "run.workers=1")


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a group of processes of its own, which is gone when the block ends."""
    process = subprocess.Popen(
        [*EARMILL, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(*arguments: str) -> None:
    done = subprocess.run([*EARMILL, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def files(out: Path) -> dict[str, bytes]:
    """Every file of an output, unfinished ones too."""
    return {str(path): path.read_bytes() for path in out.rglob("*") if path.is_file()}


@pytest.mark.long  # the same in one process, at every call, is in tests/pipeline/test_overtaken.py
@pytest.mark.parametrize("how", [("--join",), ()], ids=["joining", "alone"])
def test_a_driver_that_wakes_after_an_update_says_that_it_was_overtaken(
    how: tuple[str, ...], tmp_path: Path
) -> None:
    corpus, out = write_corpus(tmp_path / "corpus", CLIPS), tmp_path / "out"
    job = str(write_job(tmp_path / "job.yaml", corpus, out))
    layout = Layout.open(str(out))
    with started("extract", job, *LOCAL, *how, "--json") as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if '"shard_done"' in line:
                break
        os.killpg(driver.pid, signal.SIGSTOP)
        let_minutes_pass(layout)
        run("extract", job, *LOCAL, "--resume")
        name = sorted(corpus.iterdir())[CLIPS - 1].name
        (corpus / name).write_bytes(audio_factory.clip("wav", 1.0, seed=99))
        (corpus / sorted(corpus.iterdir())[1].name).unlink()
        run("extract", job, *LOCAL, "--update")
        run("gc", str(out), "--keep", "1", "--grace", "0s")
        before = files(out)
        os.killpg(driver.pid, signal.SIGCONT)
        _, errors = driver.communicate(timeout=120)
    (said,) = [line for line in errors.splitlines() if line.startswith("earmill: ")]
    assert driver.returncode == 1 and "another command took" in said
    assert files(out) == before
    assert_whole(out)
