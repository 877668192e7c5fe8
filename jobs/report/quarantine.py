"""Rows that could not be processed: reasons, and some rows of each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from earmill.jobs.report.plots import Bars, bars
from earmill.jobs.report.stored import Stored
from earmill.pipeline.storage.arrow_tables import read_table

# Tables of quarantined rows that are read, and rows of each reason that are shown.
MOST_TABLES, MOST_EXAMPLES = 200, 5


@dataclass(frozen=True)
class Reason:
    """One class of errors: how many rows, and some of them."""

    name: str
    count: int
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Quarantine:
    """All reasons, most frequent first."""

    rows: int
    bars: Bars
    reasons: Sequence[Reason]


def bad_rows_of(stored: Stored, most: int) -> list[dict[str, Any]]:
    """Quarantined rows in the order of the shards, at most so many; each with its shard."""
    found: list[dict[str, Any]] = []
    paths = [(k, one.quarantine) for k, one in stored.shards.items() if one.quarantine]
    for shard, path in paths[:MOST_TABLES]:
        if len(found) >= most:
            break
        rows = read_table(stored.layout, str(path)).to_pylist()
        found += [shown_bad_row(row, shard) for row in rows]
    return found[:most]


def shown_bad_row(row: Mapping[str, Any], shard: str) -> dict[str, Any]:
    """A row of a quarantine table for the page: its message without the place that it begins with,
    which stands beside it."""
    message = (row["message"] or "").removeprefix(f"{row['uri']}: ")
    return {**row, "shard": shard, "message": message}


def quarantine(reasons: Mapping[str, int], rows: Iterable[Mapping[str, Any]]) -> Quarantine:
    """From counts by reason and the rows that are known."""
    examples: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if len(examples[row["error_class"]]) < MOST_EXAMPLES:
            examples[row["error_class"]].append(row)
    counts = Counter(dict(reasons))
    return Quarantine(
        rows=sum(counts.values()),
        bars=bars(counts, "Reasons", "reason", kind="bad"),
        reasons=[
            Reason(name, count, examples.get(name, ())) for name, count in counts.most_common()
        ],
    )
