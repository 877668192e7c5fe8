"""A command that is stopped before one of its calls to the output, until others have worked there.

Its heartbeats are made as old as after minutes. The others work in the same process, so the moment
is exact; a test with real processes and signals is in `tests/chaos/test_stopped.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from earmill.pipeline.dataset.driver_lock import (
    STALE_S,
    DriverLock,
    DriverMembership,
    read_holder,
    stored_text,
)
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import CREW, DRIVER_FILE

# Methods that reach the store.
CALLS = (
    *("exists", "read_bytes", "write_bytes", "put_if_absent", "_replace", "remove_own", "sizes"),
    *("entries", "everything", "delete", "upload_file", "upload_dir"),
)


class Stop:
    """Counts the calls of a command to the output; `others` work there before call `number`.

    Args:
        number: 1 for the first call.
        others: What happens meanwhile.
    Attributes:
        came: The command got as far. calls: All calls so far, as text.
    """

    def __init__(self, number: int, others: Callable[[], object]) -> None:
        self.number, self.others = number, others
        self.came, self.calls = False, list[str]()
        self._away = False

    def before(self, layout: Layout, name: str, rel: str) -> None:
        """Note a call, and let the others work if it is the one."""
        if self._away:
            return
        self.calls.append(f"{name} {rel}")
        if len(self.calls) == self.number:
            self._away = self.came = True
            let_minutes_pass(layout)
            self.others()
            self._away = False


@contextmanager
def stopped(number: int, others: Callable[[], object]) -> Iterator[Stop]:
    """Commands inside are stopped as `Stop` says.

    Nobody gives a sign of life after the first one: a stopped process would not either, and on a
    busy machine a heartbeat would count as a call.
    """
    stop = Stop(number, others)
    with pytest.MonkeyPatch.context() as patch:
        for holder in (DriverLock, DriverMembership):
            patch.setattr(holder, "_beat", lambda self: None)
        for name in CALLS:
            patch.setattr(Layout, name, _watched(stop, name))
        yield stop


def _watched(stop: Stop, name: str) -> Callable[..., Any]:
    method = getattr(Layout, name)

    def call(self: Layout, *args: Any, **kwargs: Any) -> Any:
        stop.before(self, name, str(args[-1] if name.startswith("upload") else args[:1]))
        return method(self, *args, **kwargs)

    return call


def let_minutes_pass(layout: Layout) -> None:
    """Make every sign of life in an output older than a holder may be."""
    for name in (DRIVER_FILE, *layout.list(CREW)):
        holder = read_holder(layout, name)
        if holder is not None:
            old = replace(holder, heartbeat_unix_s=time.time() - 3 * STALE_S)
            layout.write_bytes(name, stored_text(old))
