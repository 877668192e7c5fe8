"""The command, and what it asked of the hub."""

from __future__ import annotations

from werkzeug.wrappers import Request

from earmill.jobs.cli import run
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.hub.stand_in import HubStandIn

ID = "me/speech"


def pushed(layout: Layout, *more: str) -> int:
    return run(["push", layout.url(), ID, *more])


def puts(server: HubStandIn) -> list[int]:
    return sorted(server.puts.values())


def is_put(request: Request) -> bool:
    return request.method == "PUT"


def is_commit(request: Request) -> bool:
    return "/commit/" in request.path
