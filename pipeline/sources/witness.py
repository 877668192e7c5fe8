"""Whether a missing row is missing, or the place it should be in.

A mount that is gone, a renamed folder and credentials that ran out all look like one missing file
after another. So a no to one name counts only while a witness stands: a row whose bytes were had
before is read again, and only then, and after a second look, is the missing one called missing.

    rows --> fetch --> bytes: remember the row       no: a doubt
                                                      |  at the end of the shard
              witness cannot be had, or there is none -+- witness stands, second look
              SourceOutage: nothing is blamed             still no: the rows stay bad
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import BinaryIO

from earmill.pipeline.common.errors import AbsentError, RowError, SourceOutage
from earmill.pipeline.sources.base import Fetched, Item, Source

FOLDERS_KEPT = 64
WITNESSES_ASKED = 4


class Witnesses:
    """Rows whose bytes were had in this process, the smallest of each of the last folders."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, Item] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, item: Item) -> None:
        """These bytes were had."""
        folder = item.uri.rpartition("/")[0]
        with self._lock:
            known = self._rows.pop(folder, item)
            self._rows[folder] = min(known, item, key=lambda row: (row.size is None, row.size or 0))
            if len(self._rows) > FOLDERS_KEPT:
                self._rows.popitem(last=False)

    def near(self, uri: str, others: Sequence[Item] = ()) -> list[Item]:
        """Those that share most of the way to `uri`, best first."""
        with self._lock:
            rows = [*reversed(self._rows.values()), *others]
        rows.sort(key=lambda item: -_shared(item.uri, uri))
        return rows[:WITNESSES_ASKED]


def fetch_confirmed(
    source: Source, items: Sequence[Item], known: Witnesses, given: Sequence[Item] = ()
) -> Iterator[Fetched]:
    """`source.fetch`, its missing rows confirmed before the last one is handed out.

    Args:
        known: What this process has read; grows here.
        given: Rows that another process has read, for a process that has read nothing yet.
    Raises:
        SourceOutage: Rows are missing, and it cannot be told from the whole source being away.
    """
    doubts: list[tuple[Item, AbsentError]] = []
    for item, stream in source.fetch(items):
        if isinstance(stream, AbsentError):
            doubts.append((item, stream))
        else:
            known.add(item)
        yield item, stream
    if doubts:
        _confirm(source, doubts, len(items), known.near(doubts[0][0].uri, given))


def _confirm(
    source: Source,
    doubts: Sequence[tuple[Item, AbsentError]],
    rows: int,
    witnesses: Sequence[Item],
) -> None:
    item, said = doubts[0]
    which = f"{len(doubts)} of {rows} rows cannot be had (first: {said})"
    if not witnesses:
        raise SourceOutage(
            f"{which}, and no row of this source was read so far; is it still there?", "missing"
        )
    if not any(_is_there(source, witness) for witness in witnesses):
        raise SourceOutage(f"{which}, nor can {witnesses[0].uri}, which was read before")
    for (item, _), (_, again) in zip(
        doubts, source.fetch([item for item, _ in doubts]), strict=True
    ):
        if not isinstance(again, AbsentError):
            _close(again)
            raise SourceOutage(f"{item.uri}: was missing for a moment")


def _is_there(source: Source, item: Item) -> bool:
    (_, stream), *_ = source.fetch([item])
    _close(stream)
    return not isinstance(stream, AbsentError)


def _close(stream: BinaryIO | RowError) -> None:
    if not isinstance(stream, RowError):
        stream.close()


def _shared(one: str, other: str) -> int:
    """Leading parts that two uris have in common."""
    pairs = zip(one.split("/"), other.split("/"), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
