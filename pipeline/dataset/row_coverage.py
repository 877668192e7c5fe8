"""Rules that tie a shard's good and bad rows to the rows of its plan.

A plan row is covered by one or more good rows (channels may be rows of their own) or by one
quarantine row; a quarantine row `<id>#ch<k>` stands for one channel. Publishing, finalising and
verifying all use these rules, so they cannot disagree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow
from earmill.pipeline.formats.stream_layout import layout_of

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo

_CHANNEL = re.compile(r"(.+)#ch[0-9]+", re.DOTALL)
NAMED = 5


def some(names: Iterable[str]) -> str:
    """Return the first few names and the number of the others."""
    names = sorted(names)
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(repr(name) for name in names[:NAMED]) + more


def plan_row_of(row_id: str, plan_rows: Mapping[str, int] | frozenset[str]) -> str:
    """Return the plan row of a quarantine row; the id itself where the plan has it."""
    match = _CHANNEL.fullmatch(row_id)
    if row_id in plan_rows or match is None:
        return row_id
    return match.group(1)


def row_problems(
    ok: Sequence[tuple[str, str]], bad: Sequence[str], plan_rows: Sequence[str]
) -> list[str]:
    """Find the problems of one shard's rows, one readable line each.

    Args:
        ok: (row id, plan row id) of every good row.
        bad: Row ids of the quarantine table.
        plan_rows: The row ids planned for the shard.
    """
    planned = frozenset(plan_rows)
    bad_plan = {row_id: plan_row_of(row_id, planned) for row_id in bad}
    good_plan = {plan_row for _, plan_row in ok}
    covered = good_plan | set(bad_plan.values())
    counts = Counter([row_id for row_id, _ in ok] + list(bad))
    found = {
        "row twice": [row_id for row_id, count in counts.items() if count > 1],
        "row not in the plan": covered - planned,
        "row missing": planned - covered,
        "row both good and in quarantine": good_plan & set(bad) & planned,
    }
    return [f"{what}: {some(names)}" for what, names in found.items() if names]


def check_rows(
    rows: Sequence[FeatureRow],
    bad: Sequence[QuarantineRow],
    streams: Sequence[StreamInfo],
    *,
    dtype: str,
    plan_rows: Sequence[str] | None,
) -> None:
    """Refuse rows that do not add up or do not fit their streams, before anything is written."""
    layouts = [layout_of(info) for info in streams]
    named = {layout.name for layout in layouts}
    counted = {layout.name for layout in layouts if layout.row_counts}
    for row in rows:
        if set(row.streams) != named:
            raise CommitError(
                f"row {row.row_id!r}: expected the streams {sorted(named)}, got "
                f"{sorted(row.streams)}"
            )
        if set(row.steps) != counted:
            raise CommitError(
                f"row {row.row_id!r}: expected the steps of {sorted(counted)}, got those of "
                f"{sorted(row.steps)}"
            )
        for layout in layouts:
            layout.check(row, dtype)
    if plan_rows is None:
        planned = frozenset(row.plan_row_id for row in rows)
        plan_rows = sorted(planned | {plan_row_of(row.row_id, planned) for row in bad})
    pairs = [(row.row_id, row.plan_row_id) for row in rows]
    problems = row_problems(pairs, [row.row_id for row in bad], plan_rows)
    if problems:
        raise CommitError("; ".join(problems))


def plan_rows_covered(
    rows: Sequence[FeatureRow], bad: Sequence[QuarantineRow], plan_rows: Sequence[str] | None
) -> int:
    """Return how many rows of the plan are covered."""
    good = frozenset(row.plan_row_id for row in rows)
    planned = good if plan_rows is None else frozenset(plan_rows)
    return len(good | {plan_row_of(row.row_id, planned) for row in bad})


def in_plan_order(
    rows: Sequence[FeatureRow], bad: Sequence[QuarantineRow], plan_rows: Sequence[str] | None
) -> tuple[list[FeatureRow], list[QuarantineRow]]:
    """Sort both in the plan's order, then by channel; unchanged where no plan is given."""
    if plan_rows is None:
        return list(rows), list(bad)
    position = {row_id: number for number, row_id in enumerate(plan_rows)}
    return (
        sorted(rows, key=lambda row: (position[row.plan_row_id], row.channel)),
        sorted(bad, key=lambda row: (position[plan_row_of(row.row_id, position)], row.row_id)),
    )
