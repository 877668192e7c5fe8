"""A pool of threads whose block ends soon when it is interrupted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor


class Threads(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` that drops what nobody has begun when its `with` block raises.

    Python's own carries out all that was submitted first: after Ctrl-C, hours of it.
    """

    def __exit__(self, kind: object, *raised: object) -> None:
        self.shutdown(wait=True, cancel_futures=kind is not None)
