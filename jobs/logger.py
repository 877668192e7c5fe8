"""Messages of jobs for Python's `logging`, under the logger `earmill`.

A script that runs a job from Python hears of it as of any other library: nothing is printed unless
the script sets a handler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from earmill.jobs.progress import level_of, text_of
from earmill.pipeline.common.text import one_line

if TYPE_CHECKING:
    from earmill.pipeline.driver.events import Event, Sink

LOGGER = logging.getLogger("earmill")
# Without a handler of its own a warning would be printed.
LOGGER.addHandler(logging.NullHandler())


def logged(sink: Sink) -> Sink:
    """Return a sink that logs every event that has a text, and hands all on.

    A record has the event as its attribute `event`.
    """

    def take(event: Event) -> None:
        level = getattr(logging, level_of(event).upper())
        if LOGGER.isEnabledFor(level) and (text := text_of(event)):
            LOGGER.log(level, "%s", one_line(text), extra={"event": event})
        sink(event)

    return take


def logged_text(tell: Callable[[str], None] = lambda text: None) -> Callable[[str], None]:
    """Return a listener that logs each text and hands it on."""

    def take(text: str) -> None:
        LOGGER.info("%s", one_line(text))
        tell(text)

    return take
