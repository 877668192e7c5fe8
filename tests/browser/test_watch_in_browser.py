"""The page of a running job: it follows without being loaded again, and says how things stand."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.browser.conftest import LOOKS, Opened, keep_image, until
from tests.waiting import DEADLINE_S

Open = Callable[..., AbstractContextManager[Opened]]


@pytest.fixture
def running(job: Path) -> Iterator[Path]:
    """The job's output as it was before its last two shards, which lie beside it."""
    folder = job.parent / "running"
    out = Path(shutil.copytree(job, folder / "features"))
    (out / "current.json").unlink()
    for path in sorted((out / "commits").iterdir())[-2:]:
        path.rename(folder / path.name)
    yield out
    shutil.rmtree(folder)


@pytest.fixture
def watch(running: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "earmill.jobs.start", "watch", str(running), "--page", "0"]
    with subprocess.Popen(
        [*command, "--every", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            assert process.stderr is not None
            yield re.findall(r"http://\S+/", process.stderr.readline())[0], process
        finally:
            process.kill()


@pytest.mark.parametrize("look", LOOKS)
def test_it_is_accessible_quiet_and_fits(
    opened: Open, watch: tuple[str, subprocess.Popen[str]], look: str
) -> None:
    with opened(watch[0], look) as found:
        found.page.wait_for_selector("#cpu-parts")
        found.show_all()
        assert found.violations() == []
        assert found.page.evaluate("document.documentElement.scrollWidth") <= LOOKS[look][0]
        assert found.said == []
        assert {url for url in found.asked} == {watch[0]}


def test_it_follows_the_job_in_place(
    opened: Open, watch: tuple[str, subprocess.Popen[str]], running: Path, job: Path
) -> None:
    url, process = watch
    with opened(url) as found:
        page = found.page
        page.wait_for_selector("#cpu-parts")
        page.evaluate("window.here = true")
        shards = page.locator(".figures div:has(dt:text-is('shards')) .value")
        before = int(shards.inner_text())
        page.locator("#throughput-numbers summary").focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.getElementById('throughput-numbers').open")
        keep_image(found, "watch", 1000)
        kept = sorted(running.parent.glob("*.json"))
        kept[0].rename(running / "commits" / kept[0].name)
        until(lambda: int(shards.inner_text()) == before + 1)
        assert page.evaluate("document.getElementById('throughput-numbers').open")
        assert page.evaluate("document.activeElement.closest('details').id") == "throughput-numbers"
        kept[1].rename(running / "commits" / kept[1].name)
        page.wait_for_selector(".tag.closing")
        shutil.copy(job / "current.json", running / "current.json")
        page.wait_for_selector(".tag.finished")
        assert page.title().endswith(": finished")
        assert page.evaluate("window.here") is True
        assert found.said == []
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
        page.wait_for_selector("#live-lost", state="visible")
        assert found.violations() == []
