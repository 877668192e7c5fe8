"""What a listing that was cut off had found out, in the output it was for; see `sources.kept`.

It lies in a folder that begins with a dot, as all unfinished work, until the plan is stored.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.storage.layout import Layout

FOLDER = ".listing"


@dataclass(frozen=True)
class KeptListing:
    """Small files of a listing, in an output.

    Args:
        layout: The output. One that cannot be written to keeps nothing; what it lacks is told when
            the job writes to it.
    """

    layout: Layout

    def get(self, name: str) -> bytes | None:
        with suppress(OSError, OutputError):
            return self.layout.read_bytes(f"{FOLDER}/{name}")
        return None

    def put(self, name: str, data: bytes) -> None:
        with suppress(OSError, OutputError):
            self.layout.write_bytes(f"{FOLDER}/{name}", data)

    def forget(self) -> None:
        """The plan is stored: nothing of it is needed any more."""
        with suppress(OSError, OutputError):
            self.layout.delete(FOLDER)
