"""A request to stop a run, made by a signal handler or another thread and polled by the driver."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StopRequest:
    """Set from a signal handler: once to drain, twice to leave at once.

    Attributes:
        watched: Somebody polls it. Before that a request would only be noticed late.
    """

    reason: str = ""
    requests: int = 0
    watched: bool = False

    def __call__(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.requests += 1
