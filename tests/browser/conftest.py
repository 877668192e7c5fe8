"""Headless Chromium, and a real job's pages to look at.

`make browser` installs what is needed (Playwright's client, axe-core) into build/browser; Chromium
is the machine's own. Without one of them all tests here are skipped, with one reason.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from earmill.jobs.cli import run
from earmill.jobs.demo_audio import write_corpus

# Names of Chromium, by distributions and by its maker.
NAMES = ("chromium", "chromium-browser", "google-chrome")
BUILD = Path(__file__).parents[2] / "build" / "browser"
AXE = BUILD / "node_modules" / "axe-core" / "axe.min.js"
# Where pictures for the documentation go.
IMAGES = Path(os.environ.get("EARMILL_IMAGES", BUILD / "images"))
LOOKS = {
    f"{width} px, {scheme}": (width, scheme)
    for width in (1280, 390)
    for scheme in ("light", "dark")
}
JOB = """\
name: speech-and-music
source: {{kind: files, uri: {folder}/audio}}
audio: {{calibration: {{rms1_db_spl: 100}}}}
licenses: {{source: CC0-1.0, features: CC0-1.0}}
extract:
  - model: dau1997
    streams:
      modulation: {{frame_rate_hz: 100}}
      envelope: {{frame_rate_hz: 100}}
      spikes: {{step_rate_hz: 1000}}
  - model: glasberg2002
    streams:
      short_term_loudness: {{frame_rate_hz: 100}}
      long_term_loudness: {{frame_rate_hz: 100}}
      loudness_summary: {{}}
output: {{uri: {folder}/features, formats: [zarr], shard_seconds: 12}}
run: {{executor: local, workers: 2, max_bad_fraction: 0.2}}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@dataclass
class Opened:
    """A page in the browser, and what it said and asked for meanwhile."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def violations(self) -> list[str]:
        """What axe-core finds, one line each."""
        # Not as a script of the page: its policy forbids that.
        found = self.page.evaluate(AXE.read_text() + "\naxe.run()")
        return [
            f"{one['id']}: {one['help']}: {node['target']}: {node['failureSummary']}"
            for one in found["violations"]
            for node in one["nodes"]
        ]

    def show_all(self) -> None:
        """Open whatever is folded."""
        self.page.evaluate(
            "for (const one of document.querySelectorAll('details')) one.open = true"
        )


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    if not AXE.exists():
        pytest.skip("needs the packages of `make browser`")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"needs one of {', '.join(NAMES)}: apt-get install chromium")
    sys.path.append(str(BUILD / "python"))
    from playwright.sync_api import sync_playwright

    # Its sandbox refuses to run as root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=arguments)
        yield launched
        launched.close()


@pytest.fixture
def opened(browser: Any) -> Callable[..., AbstractContextManager[Opened]]:
    """Opens an address at a width, in light or dark; offline on request."""

    @contextmanager
    def open_page(
        url: str, look: str = "1280 px, light", offline: bool = False, height: int = 900
    ) -> Iterator[Opened]:
        width, scheme = LOOKS[look]
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, color_scheme=scheme, offline=offline)
        page = context.new_page()
        found = Opened(page)
        page.on("console", lambda message: found.said.append(message.text))
        page.on("pageerror", lambda error: found.said.append(str(error)))
        page.on("dialog", lambda dialog: found.said.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: found.asked.append(request.url[:100]))
        try:
            page.goto(url)
            yield found
        finally:
            context.close()

    return open_page


@pytest.fixture(scope="session")
def job(browser: Any) -> Iterator[Path]:
    """The output of a job on two minutes of sound, two of whose files are damaged."""
    # Pictures show its name.
    with tempfile.TemporaryDirectory(prefix="sounds-") as name:
        folder = Path(name)
        write_corpus(folder / "audio")
        (folder / "job.yaml").write_text(JOB.format(folder=folder))
        assert run(["extract", str(folder / "job.yaml")]) == 0
        yield folder / "features"


def until(holds: Callable[[], Any]) -> None:
    """Wait for something; Playwright's own waiting for functions needs a page that allows eval."""
    for _ in range(300):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come about in 30 s")


def keep_image(opened: Opened, name: str, height: int, top: float = 0) -> None:
    """A picture of a part of a page, in few colours."""
    from PIL import Image

    IMAGES.mkdir(parents=True, exist_ok=True)
    path = IMAGES / f"{name}.png"
    width = opened.page.viewport_size["width"]
    clip = {"x": 0, "y": top, "width": width, "height": height}
    opened.page.screenshot(path=path, full_page=True, clip=clip)
    with Image.open(path) as image:
        image.convert("RGB").quantize(192, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size < 300_000, f"{path} has {path.stat().st_size} bytes"
