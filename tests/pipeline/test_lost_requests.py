"""What a request leaves behind in fsspec's loop when its connection goes: nothing on the terminal.

Who asked is told by the request itself. A client writes in a task of its own, whose failure nobody
asks for; asyncio prints it with a traceback when the task is collected.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable

import aiohttp
import pytest
from fsspec.asyn import get_loop

from earmill.pipeline.storage.fsspec_store import filesystem_of
from tests.waiting import DEADLINE_S

OF_THE_PLACE: dict[str, Callable[[], Exception]] = {
    "closing": lambda: aiohttp.ClientConnectionResetError("Cannot write to closing transport"),
    "reset": lambda: ConnectionResetError(104, "reset by peer"),
    "disconnected": lambda: aiohttp.ServerDisconnectedError(),
    "slow": lambda: TimeoutError(),
}


@pytest.fixture(params=["", "simplecache::"])
def loop(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoop:
    """That of a filesystem of ours."""
    found = get_loop()
    found.set_exception_handler(None)
    filesystem_of(f"{request.param}http://127.0.0.1:9/nothing")
    return found


def abandoned(loop: asyncio.AbstractEventLoop, make: Callable[[], Exception]) -> None:
    """Fail in a task that nobody asks for."""

    async def fail() -> None:
        raise make()

    async def leave() -> None:
        await asyncio.wait([asyncio.create_task(fail())])

    asyncio.run_coroutine_threadsafe(leave(), loop).result(DEADLINE_S)
    gc.collect()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(DEADLINE_S)


@pytest.mark.parametrize("name", OF_THE_PLACE)
def test_a_lost_connection_is_told_by_its_request_alone(
    name: str, loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "asyncio"):
        abandoned(loop, OF_THE_PLACE[name])
    assert [record for record in caplog.records if record.levelno > logging.DEBUG] == []


def test_a_defect_is_told(
    loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    abandoned(loop, lambda: ValueError("a defect"))
    (record,) = [each for each in caplog.records if each.name == "asyncio"]
    assert "never retrieved" in record.message and record.exc_info is not None
