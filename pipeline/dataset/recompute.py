"""Shards that are committed once more: because files are damaged, or to try bad rows again.

Which ones is decided while the driver's lock is held. Their new attempt is published as the next
generation, put-if-absent like any commit; until the dataset is closed again, the snapshot of before
counts. So a run that is killed leaves a whole dataset, and `extract --resume` or the same command
closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from earmill.pipeline.dataset.commit_record import bad_rows, commits, generations
from earmill.pipeline.dataset.description import raise_version, read_dataset
from earmill.pipeline.dataset.snapshot import is_closed
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.dataset.where import Predicate
from earmill.pipeline.formats.row_table import QUARANTINE_SCHEMA
from earmill.pipeline.formats.rows import QuarantineRow
from earmill.pipeline.storage.layout import Layout


@dataclass(frozen=True)
class Again:
    """How a shard is committed once more.

    Args:
        generation: Of the new record.
        keep: Rows that stay in quarantine as they are, without another try.
    """

    generation: int = 0
    keep: tuple[QuarantineRow, ...] = ()


# Shards to commit again, with the rows that stay in quarantine.
Choice = Mapping[str, tuple[QuarantineRow, ...]]
Chooser = Callable[[Layout], Choice]


def damaged(layout: Layout) -> Choice:
    """Shards of which a file or the record is missing or damaged; reads every byte."""
    return dict.fromkeys(verify(layout).damaged, ())


def quarantined(where: Predicate) -> Chooser:
    """Chooses the shards with bad rows that fulfil a condition; the other bad rows stay."""

    def choose(layout: Layout) -> Choice:
        found: dict[str, tuple[QuarantineRow, ...]] = {}
        for shard, record in commits(layout).items():
            rows = bad_rows(layout, record).to_pylist()
            others = [row for row in rows if not where(row)]
            if len(others) < len(rows):
                found[shard] = tuple(
                    QuarantineRow(**{name: row[name] for name in QUARANTINE_SCHEMA.names})
                    for row in others
                )
        return found

    return choose


def was_cut_off(layout: Layout) -> bool:
    """Whether commits were replaced or a revision was begun, but the run that did it ended before
    it closed the dataset."""
    records, dataset = commits(layout), read_dataset(layout)
    begun = dataset is not None and dataset.change is not None
    again = begun or any(record.generation for record in records.values())
    return again and not is_closed(layout, records)


def open_again(layout: Layout, choice: Choice) -> dict[str, Again]:
    """The new generations of the chosen shards; an older release must not meet them unwarned."""
    newest = {shard: numbers[-1] for shard, numbers in generations(layout).items()}
    again = {
        shard: Again(newest[shard] + 1, keep) for shard, keep in choice.items() if shard in newest
    }
    if again:
        raise_version(layout)
    return again
