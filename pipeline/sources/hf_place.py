"""How a uri names a row of a Hugging Face dataset, and what a failure to read one means."""

from __future__ import annotations

import re
from dataclasses import dataclass

from earmill.pipeline.common.errors import Fault, UnreadableError, fault_of, http_status
from earmill.pipeline.sources.base import Item

ROW_MARK = re.compile(r"#(?:shard=(\d+)&)?row=(\d+)$")


@dataclass(frozen=True)
class Place:
    """Where a row is: its file shard when streaming, and its number there or in the dataset."""

    shard: int | None
    row: int

    def mark(self) -> str:
        return f"#row={self.row}" if self.shard is None else f"#shard={self.shard}&row={self.row}"

    @classmethod
    def of(cls, item: Item) -> Place:
        found = ROW_MARK.search(item.uri)
        if found is None:
            raise UnreadableError(f"{item.uri}: expected a uri ending in #row=N")
        return cls(None if found[1] is None else int(found[1]), int(found[2]))


def is_away(error: Exception) -> bool:
    """Whether the dataset's files could not be had, as against what is in them."""
    if isinstance(error, ValueError | IndexError | KeyError) and http_status(error) is None:
        return False  # a damaged or shorter file
    return fault_of(error) in (Fault.REFUSED, Fault.OUTAGE)
