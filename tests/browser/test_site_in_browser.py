"""Every page of the documentation site: no errors, no other host, no wider than its window."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import LOOKS, Opened

Open = Callable[..., AbstractContextManager[Opened]]
SITE = Path(__file__).parents[2] / "build" / "site"


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and prints nothing."""

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of the site on this machine."""
    if not SITE.exists():
        pytest.skip("needs the site of `make docs`")
    handler = partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("look", [look for look in LOOKS if look.endswith("light")])
def test_every_page_is_quiet_and_fits(opened: Open, site: str, look: str) -> None:
    wrong = []
    pages = sorted(page.relative_to(SITE).as_posix() for page in SITE.rglob("*.html"))
    assert pages
    # One tab for all: a new one each time takes seconds.
    with opened(site, look) as found:
        for name in pages:
            found.said.clear()
            found.asked.clear()
            found.page.goto(f"{site}/{name}")
            found.page.wait_for_load_state("networkidle")
            width = found.page.evaluate("document.documentElement.scrollWidth")
            wrong += [f"{name}: {said}" for said in found.said]
            wrong += [
                f"{name}: request to {url}"
                for url in found.asked
                if not url.startswith((site, "data:", "blob:"))
            ]
            if width > LOOKS[look][0]:
                wrong.append(f"{name}: {width} pixels wide")
    assert wrong == []
