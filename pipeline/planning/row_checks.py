"""Rows that cannot be told apart are refused before any work."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.sources.base import Item
from earmill.pipeline.spec.spans import SPAN_ID

NAMED_DUPLICATES = 3
CHANNEL_ROW = re.compile(r"(.+)#ch[0-9]+", re.DOTALL)


class RowIds:
    """Row ids as they come, eight bytes each: enough to tell whether something may be wrong.

    Args:
        channels: Whether channels of a row become rows, `<id>#ch<k>`.
    """

    def __init__(self, *, channels: bool) -> None:
        self._channels = channels
        self._seen, self._parents = array("q"), array("q")

    def add(self, row_id: str) -> None:
        self._seen.append(hash(row_id))
        if self._channels and (found := CHANNEL_ROW.fullmatch(row_id)) is not None:
            self._parents.append(hash(found[1]))

    @property
    def may_clash(self) -> bool:
        """Whether two ids have one hash, or a channel's row may be another row."""
        seen = np.sort(np.frombuffer(self._seen, np.int64))
        if (seen[1:] == seen[:-1]).any():
            return True
        return bool(np.isin(np.frombuffer(self._parents, np.int64), seen).any())


def check_text(items: Iterable[Item]) -> Iterator[Item]:
    """The items as they come: a file name is bytes to the system, and a row id is text."""
    for item in items:
        try:
            item.row_id.encode(), item.uri.encode()
        except UnicodeEncodeError:
            raise SourceError(f"{item.row_id!a}: the name is not UTF-8; rename the file") from None
        yield item


def names_of(item: Item) -> Iterator[str]:
    """What no other row may be called: a row's id, and with its first span that of a recording."""
    yield item.row_id
    if item.part_of is not None:
        found = SPAN_ID.fullmatch(item.row_id)
        if found is not None and found[2] == "1":
            yield found[1]


def check_unique(items: Sequence[Item]) -> None:
    names = [name for item in items for name in names_of(item)]
    counts = Counter(names)
    if len(counts) == len(names):
        return
    twice = [row_id for row_id, count in counts.items() if count > 1]
    named = ", ".join(repr(row_id) for row_id in twice[:NAMED_DUPLICATES])
    more = f" and {len(twice) - NAMED_DUPLICATES} more" if len(twice) > NAMED_DUPLICATES else ""
    raise SourceError(f"row ids must be unique, but these occur more than once: {named}{more}")


def check_channel_ids(items: Sequence[Item]) -> None:
    """Policy `each` names the channels of a row; none of them may be another row of the plan."""
    row_ids = {name for item in items for name in names_of(item)}
    for row_id in row_ids:
        found = CHANNEL_ROW.fullmatch(row_id)
        if found is not None and found[1] in row_ids:
            raise SourceError(
                f"audio.channels: each calls a channel of row {found[1]!r} {row_id!r}, which is "
                "another row of the source; rename one of them"
            )
