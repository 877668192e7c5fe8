"""What is worth saying of a plan before work starts."""

from __future__ import annotations

from collections.abc import Mapping

from earmill.pipeline.common.text import one_line, quantity
from earmill.pipeline.sources.walk import BLANK_ROW

NAMED_KINDS = 6


def notes(
    skipped: Mapping[str, int],
    dropped: Mapping[str, str],
    estimated: int,
    split: int,
    in_order: int,
) -> list[str]:
    """One line each; the arguments are fields of `Plan`."""
    lines = [skipped_text(skipped)] if skipped else []
    if dropped:
        kept = [f"{name} ({why})" for name, why in sorted(dropped.items())]
        lines.append(f"columns not carried through: {', '.join(kept)}")
    if estimated:
        lines.append(f"durations of {estimated:,} rows are estimated from their bytes")
    if split:
        lines.append(
            f"{split:,} of the shards begin within a row group, which each of its shards fetches "
            "whole: write smaller row groups, or raise output.shard_seconds and output.shard_rows"
        )
    if in_order:
        lines.append(
            f"{in_order:,} long recordings are computed in order, each by one worker: their length "
            "is not known, they begin within a second, or they cannot be read in parts (use WAV or "
            "FLAC in a folder, a bucket or a manifest)"
        )
    return [line for line in lines if line]


def copied_text(rows: int) -> list[str]:
    """A line where rows are copies of equal ones."""
    return (
        [f"{rows:,} rows are files equal to others: they are copied, not computed"] if rows else []
    )


def missing_text(missing: int, rows: int, first: str) -> list[str]:
    """Return a line where files are not there that rows name, the first of them by name."""
    if not missing:
        return []
    return [
        f"{missing:,} of {rows:,} rows name a file that cannot be found, first {one_line(first)}: "
        "they will be in quarantine; check the paths (source.prefix of a manifest) and what is "
        "mounted"
    ]


def skipped_text(skipped: Mapping[str, int]) -> str:
    """`12 files skipped: .txt 10, .jpg 2`; empty where none was."""
    total = sum(skipped.values())
    if total == 0:
        return ""
    # The most frequent first, also where a stored plan has them by name.
    ordered = sorted(skipped.items(), key=lambda entry: (-entry[1], entry[0]))
    kinds = [f"{kind} {count:,}" for kind, count in ordered]
    more = f", {len(kinds) - NAMED_KINDS} more kinds" if len(kinds) > NAMED_KINDS else ""
    if set(skipped) == {BLANK_ROW}:
        return f"{quantity(total, 'blank row')} skipped"
    return f"{quantity(total, 'file')} skipped: {', '.join(kinds[:NAMED_KINDS])}{more}"
