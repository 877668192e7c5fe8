"""The rows of a dataset as a table of bounded size: all of them, or some at even distances."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from earmill.jobs.report.plots import rate_text, seconds_text
from earmill.jobs.report.stored import Stored, spread_over
from earmill.pipeline.formats.row_table import EXTRA_PREFIX

# Of rows that are too many, at least this part of those shown are quarantined ones, if there are.
BAD_PART = 4
# Columns of the source that are shown.
MOST_EXTRAS = 6


@dataclass(frozen=True)
class TableRow:
    """One row.

    Args:
        seconds: None where it is quarantined. status: ok, or the error class.
        extras: Cells of the source's own columns.
    """

    row_id: str
    status: str
    seconds: float | None
    duration: str
    file: str
    shard: str
    extras: Sequence[str]
    message: str = ""


@dataclass(frozen=True)
class Rows:
    """The table.

    Args:
        extras: Names of the source's columns that it has.
        note: Which rows these are, where not all; which columns are left out.
    """

    rows: Sequence[TableRow]
    total: int
    extras: Sequence[str]
    note: str


def rows_of(stored: Stored, facts: pa.Table, bad: Sequence[Mapping[str, Any]], most: int) -> Rows:
    """At most so many rows, good ones first.

    Args:
        facts: As of `corpus.row_facts`. bad: Quarantined rows that are known.
    """
    table, n_bad = stored.features.table, stored.rows_bad
    total = len(table) + n_bad
    shown_bad = list(bad[:most])
    if total > most:
        shown_bad = shown_bad[: max(most // BAD_PART, most - len(table))]
    positions = spread_over(range(len(table)), most - len(shown_bad))
    names = [name for name in table.column_names if name.startswith(EXTRA_PREFIX)]
    files = _files(facts)
    chosen = table.take(pa.array(positions, pa.int64())).to_pylist()
    good = [
        TableRow(
            row_id=row["row_id"],
            status="ok",
            seconds=row["seconds"],
            duration=seconds_text(row["seconds"]),
            file=files.get(row["row_id"], ""),
            shard=row["shard"],
            extras=[_cell(row[name]) for name in names[:MOST_EXTRAS]],
        )
        for row in chosen
    ]
    return Rows(
        rows=[*good, *(_bad(row, len(names[:MOST_EXTRAS])) for row in shown_bad)],
        total=total,
        extras=[name.removeprefix(EXTRA_PREFIX) for name in names[:MOST_EXTRAS]],
        note=_note(len(good), len(table), len(shown_bad), n_bad, len(names)),
    )


def _bad(row: Mapping[str, Any], extras: int) -> TableRow:
    return TableRow(
        row_id=row["row_id"],
        status=row["error_class"],
        seconds=None,
        duration="",
        file="",
        shard=row["shard"],
        extras=[""] * extras,
        message=row["message"],
    )


def _files(facts: pa.Table) -> dict[str, str]:
    """Row id to what its file is."""
    columns = (facts.column(n).to_pylist() for n in ("row_id", "codec", "rate_hz", "channels"))
    return {
        row_id: ", ".join(
            part
            for part in (
                codec,
                rate_hz and rate_text(rate_hz),
                channels and f"{channels} ch",
            )
            if part
        )
        for row_id, codec, rate_hz, channels in zip(*columns, strict=True)
    }


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _note(good: int, all_good: int, bad: int, all_bad: int, columns: int) -> str:
    said = []
    if good < all_good or bad < all_bad:
        said.append(
            f"{good:,} of {all_good:,} good rows at even distances, and {bad:,} of {all_bad:,} "
            "quarantined ones; --rows N of the command shows more, `open_features(uri).table` and "
            "`.quarantine` have all."
        )
    if columns > MOST_EXTRAS:
        said.append(f"{columns - MOST_EXTRAS:,} more columns of the source are left out.")
    return " ".join(said)
