"""Rows that were read before tell a missing row from a missing source.

If a mount is gone, a folder is renamed or credentials have expired, every file looks missing. A
probe is a row that was read before. A missing row counts only if a probe can be read again now, and
if a second look does not find the missing row either.

    rows --> fetch --> bytes: remember the row       missing: a doubt
                                                      |  at the end of the shard
                 no probe can be read, or there is none -+- a probe is read, second look
                 SourceOutage: no row is blamed              still missing: the rows are bad
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile

from earmill.pipeline.common.errors import AbsentError, RowError, SourceOutage
from earmill.pipeline.sources.base import Fetched, Item, Source, fetch

FOLDERS_KEPT = 64
WITNESSES_ASKED = 4


class SourceProbes:
    """Rows that this process has read: the smallest row of each of the last folders."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, Item] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, item: Item) -> None:
        """Note that a row was read."""
        folder = item.uri.rpartition("/")[0]
        with self._lock:
            known = self._rows.pop(folder, item)
            self._rows[folder] = min(known, item, key=lambda row: (row.size is None, row.size or 0))
            if len(self._rows) > FOLDERS_KEPT:
                self._rows.popitem(last=False)

    def near(self, uri: str, others: Sequence[Item] = ()) -> list[Item]:
        """Return the rows that share the longest path with `uri`, best first."""
        with self._lock:
            rows = [*reversed(self._rows.values()), *others]

        def shared(item: Item) -> int:
            pairs = zip(item.uri.split("/"), uri.split("/"), strict=False)
            return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

        return sorted(rows, key=shared, reverse=True)[:WITNESSES_ASKED]


def fetch_confirmed(
    source: Source, items: Sequence[Item], known: SourceProbes, given: Sequence[Item] = ()
) -> Iterator[Fetched]:
    """Yield `source.fetch`, and confirm missing rows before it ends; SourceOutage if in doubt. Rows
    that are read are added to `known`. `given` are rows that another process has read."""
    doubts: list[tuple[Item, AbsentError]] = []
    for item, stream in fetch(source, items):
        if isinstance(stream, AbsentError):
            doubts.append((item, stream))
        else:
            known.add(item)
        yield item, stream
    if not doubts:
        return
    which = f"{len(doubts)} of {len(items)} rows cannot be had (first: {doubts[0][1]})"
    witnesses = known.near(doubts[0][0].uri, given)
    if not witnesses:
        raise SourceOutage(
            f"{which}, and no row of this source was read so far; is it still there?", "missing"
        )
    if not any(is_there for witness in witnesses for is_there in _are_there(source, [witness])):
        raise SourceOutage(f"{which}, nor can {witnesses[0].uri}, which was read before")
    missing = [item for item, _ in doubts]
    for item, is_there in zip(missing, _are_there(source, missing), strict=True):
        if is_there:
            raise SourceOutage(f"{item.uri}: was missing for a moment")


def _are_there(source: Source, items: Sequence[Item]) -> Iterator[bool]:
    for _, stream in fetch(source, items):
        if not isinstance(stream, RowError):
            stream.close()
        yield not isinstance(stream, AbsentError)
