"""What a commit that replaces another must not lose.

A shard is processed again because some of its rows were bad or its files are damaged. Its good rows
come out of the same audio once more; where they do not, because the source is away or has changed,
the record of before stays and the reason is told.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset.commit_record import CommitRecord, generations, read_commit
from earmill.pipeline.dataset.row_coverage import some
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout

AUDIO = "pcm_sha256"


def check_replacement(
    layout: Layout, shard_id: str, generation: int, rows: Sequence[FeatureRow]
) -> str | None:
    """Refuse good rows that would replace better ones; the attempt that is replaced, if known.

    Args:
        generation: Of the record to be written, 1 or more.

    Raises:
        CommitError: There is nothing to replace, a good row is not good any more, or its audio is
            another.
    """
    if generation - 1 not in generations(layout).get(shard_id, ()):
        raise CommitError(
            f"expected {paths.commit_path(shard_id, generation - 1)}, which this attempt is to "
            "replace, got none; run `earmill extract` with --resume"
        )
    try:
        before = read_commit(layout, shard_id, generation - 1)
    except CommitError:
        before = None
    if before is None:
        return None
    audio = _good_audio(layout, before)
    if audio is None:
        if len(rows) < before.rows_ok:
            raise CommitError(
                f"{before.rows_ok} rows were good, now {len(rows)} are; the commit stays as it is"
            )
        return before.attempt
    now = {row.row_id: row.facts.get(AUDIO) for row in rows}
    if lost := set(audio) - set(now):
        raise CommitError(
            f"good before, not any more: {some(lost)}; the commit stays as it is: make the source "
            "readable and run this again"
        )
    if changed := [row_id for row_id, was in audio.items() if was and now[row_id] != was]:
        raise CommitError(
            f"the audio has changed since: {some(changed)}; the commit stays as it is: restore the "
            "source, or extract it into another output"
        )
    return before.attempt


def _good_audio(layout: Layout, record: CommitRecord) -> dict[str, str | None] | None:
    """Row id to the hash of its audio, or None where the table of rows is damaged as well."""
    try:
        table = read_table(layout, str(record.path("rows")), ["row_id", AUDIO])
        pairs = zip(table["row_id"].to_pylist(), table[AUDIO].to_pylist(), strict=True)
    except (OSError, KeyError, pa.ArrowException):
        return None
    return dict(pairs)
