"""Every page of the built site in headless Chromium: no errors, nothing from another host.

    python -m docs.builder.browser                 # all of build/site; exit code 1 for a complaint
    python -m docs.builder.browser --shots FOLDER  # and pictures of some, for desktop and phone

Needs Chromium (apt-get install chromium). Talks to it over its DevTools protocol. A page is wrong
when it logs an error, when an exception is thrown, when a request goes elsewhere or fails, or when
it is wider than the window of a phone.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.server
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
SHOWN = ("index.html", "science/dau1997.html", "tutorials/classifier.html")
#: Width and height in CSS pixels, and what of it a picture shows.
DESKTOP, PHONE = (1280, 1000), (390, 844)
#: What Chromium is called, by distributions and by its maker.
NAMES = ("chromium", "chromium-browser", "google-chrome")
_QUIET_S, _LONGEST_S = 0.4, 20.0
_OPTIONS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0",
)  # fmt: skip


class Tab:
    """One tab, over its websocket: commands with answers, and events as they come."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.events: list[dict[str, Any]] = []

    async def read(self) -> None:
        """Take what comes, until the socket closes; runs beside the rest."""
        async for message in self._socket:
            await self._messages.put(message.json())

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events meanwhile are kept."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await asyncio.wait_for(self._messages.get(), _LONGEST_S)
            if message.get("id") == self._number:
                return dict(message.get("result", {}))
            self.events.append(message)

    async def wait(self) -> None:
        """Take events until the page is loaded and nothing more comes."""
        loaded = any(event.get("method") == "Page.loadEventFired" for event in self.events)
        with contextlib.suppress(TimeoutError):
            while True:
                limit_s = _QUIET_S if loaded else _LONGEST_S
                message = await asyncio.wait_for(self._messages.get(), limit_s)
                self.events.append(message)
                loaded |= message.get("method") == "Page.loadEventFired"


def complaints(events: Sequence[dict[str, Any]], own: str) -> list[str]:
    """What the events of a page say that should not be."""
    found = []
    for event in events:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            found.append(f"exception: {params['exceptionDetails'].get('text')}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            found.append(f"console: {params['args'][0].get('value')}")
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            found.append(f"log: {params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith((own, "data:", "blob:")):
                found.append(f"request to {url}")
        elif method == "Network.responseReceived" and params["response"]["status"] >= 400:
            found.append(f"{params['response']['status']} for {params['response']['url']}")
    return found


async def check(tab: Tab, own: str, page: str, shots: Path | None) -> list[str]:
    """Open a page as a desktop and as a phone show it."""
    found = []
    for name, (width, height) in (("desktop", DESKTOP), ("phone", PHONE)):
        tab.events.clear()
        await tab.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=name == "phone",
        )  # fmt: skip
        await tab.call("Page.navigate", url=f"{own}/{page}")
        await tab.wait()
        said = await tab.call("Runtime.evaluate", expression="document.documentElement.scrollWidth")
        if said["result"]["value"] > width:
            found.append(f"{said['result']['value']} pixels wide on a {name} of {width}")
        if shots is not None and page in SHOWN:
            picture = await tab.call("Page.captureScreenshot", format="png")
            file = shots / f"{page.replace('/', '-').removesuffix('.html')}-{name}.png"
            file.write_bytes(base64.b64decode(picture["data"]))
        found += complaints(tab.events, own)
    return found


def chromium() -> str:
    """The browser of this machine.

    Raises:
        FileNotFoundError: There is none.
    """
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        raise FileNotFoundError(f"none of {', '.join(NAMES)} is there: apt-get install chromium")
    return path


@contextlib.asynccontextmanager
async def opened_tab() -> AsyncIterator[Tab]:
    """A Chromium of its own, ended at the end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = subprocess.Popen(
            [chromium(), *_OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
                url = tabs[0]["webSocketDebuggerUrl"]
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    tab = Tab(socket)
                    reading = asyncio.create_task(tab.read())
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await tab.call(f"{domain}.enable")
                    yield tab
                    reading.cancel()
        finally:
            browser.terminate()
            browser.wait(10)


async def _port(file: Path) -> int:
    for _ in range(300):
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        await asyncio.sleep(0.1)
    raise TimeoutError("chromium did not say its port within 30 s")


class _Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing of each request."""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder on this machine."""
    handler = partial(_Handler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


async def main(arguments: Sequence[str]) -> int:
    """Check every page; say what is wrong."""
    shots = Path(arguments[1]) if arguments[:1] == ["--shots"] else None
    if shots is not None:
        shots.mkdir(parents=True, exist_ok=True)
    pages = sorted(page.relative_to(SITE).as_posix() for page in SITE.rglob("*.html"))
    wrong = 0
    with served(SITE) as own:
        async with opened_tab() as tab:
            for page in pages:
                for said in await check(tab, own, page, shots):
                    wrong += 1
                    print(f"{page}: {said}", flush=True)
    print(f"{len(pages)} pages, {wrong} complaints")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
