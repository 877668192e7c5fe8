"""Shards that are committed once more: because files are damaged, or to try bad rows again.

Which ones is decided while the driver's lock is held. Their new attempt is published as the next
generation, put-if-absent like any commit; until the dataset is closed again, the snapshot of before
counts. So a run that is killed leaves a whole dataset, and `extract --resume` or the same command
closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.dataset.commit_record import Recommit, bad_rows, commits, generations
from earmill.pipeline.dataset.description import raise_version, read_dataset
from earmill.pipeline.dataset.snapshot import is_closed
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.formats.row_table import QUARANTINE_SCHEMA
from earmill.pipeline.formats.rows import QuarantineRow
from earmill.pipeline.storage.layout import Layout

# Shards to commit again, with the rows that stay in quarantine.
Choice = Mapping[str, tuple[QuarantineRow, ...]]
Chooser = Callable[[Layout], Choice]


def damaged(layout: Layout) -> Choice:
    """Shards of which a file or the record is missing or damaged; reads every byte."""
    return dict.fromkeys(verify(layout).damaged, ())


@dataclass(frozen=True)
class RowFilter:
    """Which quarantined rows are tried again; all rows where nothing is given.

    A row passes if each list that is not empty has a match.

    Args:
        error: Error classes, such as `unreadable`.
        stage: Stages where rows failed, such as `fetch`.
        uri: Patterns of whole uris: `*` stands for any text with any `/`, `?` for a character.
    """

    error: tuple[str, ...] = ()
    stage: tuple[str, ...] = ()
    uri: tuple[str, ...] = ()

    @classmethod
    def of(cls, **given: str | Iterable[str]) -> RowFilter:
        """Build a filter of a text or several for each name.

        Raises:
            SpecError: A value that is no text, or empty.
        """
        lists = {
            name: (value,)
            if isinstance(value, str) or not isinstance(value, Iterable)
            else (*value,)
            for name, value in given.items()
        }
        for name, values in lists.items():
            for value in values:
                if not isinstance(value, str) or not value:
                    raise SpecError(
                        f"{name}: expected a text such as {_SUCH[name]!r}, got {value!r}"
                    )
        return cls(**lists)

    def __call__(self, row: Mapping[str, Any]) -> bool:
        """Return True if a row of the quarantine table passes."""
        return (
            (not self.error or row["error_class"] in self.error)
            and (not self.stage or row["stage"] in self.stage)
            and (not self.uri or any(_matches(row["uri"], glob) for glob in self.uri))
        )


def _matches(uri: str, glob: str) -> bool:
    """Return True if a uri matches a pattern; brackets are literal, as in the names of files."""
    return fnmatchcase(uri, glob.replace("[", "[[]"))


_SUCH = {"error": "unreadable", "stage": "fetch", "uri": "*/2019/*"}


def quarantined(chosen: RowFilter) -> Chooser:
    """Choose the shards with bad rows that pass a filter; the other bad rows stay."""

    def choose(layout: Layout) -> Choice:
        found: dict[str, tuple[QuarantineRow, ...]] = {}
        for shard, record in commits(layout).items():
            rows = bad_rows(layout, record).to_pylist()
            others = [row for row in rows if not chosen(row)]
            if len(others) < len(rows):
                found[shard] = tuple(
                    QuarantineRow(**{name: row[name] for name in QUARANTINE_SCHEMA.names})
                    for row in others
                )
        return found

    return choose


def was_cut_off(layout: Layout) -> bool:
    """Return True if a run replaced commits or began a revision, and ended before it closed the
    dataset."""
    records, dataset = commits(layout), read_dataset(layout)
    begun = dataset is not None and dataset.change is not None
    again = begun or any(record.generation for record in records.values())
    return again and not is_closed(layout, records)


def open_again(layout: Layout, choice: Choice) -> dict[str, Recommit]:
    """The new generations of the chosen shards; an older release must not meet them unwarned."""
    newest = {shard: numbers[-1] for shard, numbers in generations(layout).items()}
    again = {
        shard: Recommit(newest[shard] + 1, keep)
        for shard, keep in choice.items()
        if shard in newest
    }
    if again:
        raise_version(layout)
    return again
