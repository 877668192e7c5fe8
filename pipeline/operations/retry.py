"""Shards that are committed once more: because files are damaged, or to try bad rows again. Their
new attempt is published as the next generation; until the dataset is closed again, by `extract
--resume` or the same command, the earlier snapshot counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.dataset.commit_record import (
    Recommit,
    commits,
    newest_generations,
    quarantined_rows,
)
from earmill.pipeline.dataset.description import raise_version, require_dataset
from earmill.pipeline.dataset.snapshot import is_closed
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.formats.rows import QuarantineRow
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.retrying import store_errors

# Shards to commit again, with the rows that stay in quarantine.
Choice = Mapping[str, tuple[QuarantineRow, ...]]
Chooser = Callable[[Layout], Choice]
Job = str | os.PathLike[str] | Mapping[str, Any] | JobSpec

_EXAMPLES = {"error": "unreadable", "stage": "fetch", "uri": "*/2019/*"}


def damaged(layout: Layout) -> Choice:
    """Choose shards of which a file or the record is missing or damaged; reads every byte."""
    return dict.fromkeys(verify(layout).damaged, ())


@dataclass(frozen=True)
class RowFilter:
    """Filter of quarantined rows. A row passes if every list that is not empty has a match. In
    `uri`, `*` stands for any text with any `/`, and `?` for a character; brackets are literal."""

    error: tuple[str, ...] = ()  # Error classes, such as `unreadable`.
    stage: tuple[str, ...] = ()  # Stages where rows failed, such as `fetch`.
    uri: tuple[str, ...] = ()  # Patterns of whole uris.

    @classmethod
    def of(cls, **given: str | Iterable[str]) -> RowFilter:
        """Build a filter from one or several texts for each name; SpecError for an empty text."""
        lists: dict[str, tuple[str, ...]] = {}
        for name, value in given.items():
            one = isinstance(value, str) or not isinstance(value, Iterable)
            lists[name] = (value,) if one else tuple(value)  # type: ignore[assignment]
            for text in lists[name]:
                if not isinstance(text, str) or not text:
                    raise SpecError(
                        f"{name}: expected a text such as {_EXAMPLES[name]!r}, got {text!r}"
                    )
        return cls(**lists)

    def __call__(self, row: QuarantineRow) -> bool:
        globs = [glob.replace("[", "[[]") for glob in self.uri]
        return (
            (not self.error or row.error_class in self.error)
            and (not self.stage or row.stage in self.stage)
            and (not globs or any(fnmatchcase(row.uri, glob) for glob in globs))
        )

    def choose(self, layout: Layout) -> Choice:
        """Choose shards with a row that passes; their other rows stay in quarantine."""
        found: dict[str, tuple[QuarantineRow, ...]] = {}
        for shard, record in commits(layout).items():
            rows = quarantined_rows(layout, record)
            others = tuple(row for row in rows if not self(row))
            if len(others) < len(rows):
                found[shard] = others
        return found


def open_again(layout: Layout, choice: Choice) -> dict[str, Recommit]:
    """Return the new generations of the chosen shards. Raises the layout version first, so that
    releases that know no generations refuse the dataset."""
    newest = newest_generations(layout)
    again = {
        shard: Recommit(newest[shard] + 1, keep)
        for shard, keep in choice.items()
        if shard in newest
    }
    if again:
        raise_version(layout)
    return again


def stored_job(
    layout: Layout,
    uri: str,
    storage_options: Mapping[str, Any],
    *,
    job: Job | None = None,
    overrides: Iterable[str] = (),
) -> JobSpec:
    """Return the job of a dataset, with `uri`, as the caller wrote it, as its output. The job file
    gives the keys that dataset.json does not hold: credentials and `run`."""
    known: Mapping[str, Any] = {}
    if job is not None:  # a wrong job file is reported before the dataset is looked at
        spec = JobSpec.load(job, overrides=overrides)
        known = spec.output.storage_options
        require_dataset(layout)
    else:
        dataset = require_dataset(layout)
        output = {**dataset.spec["output"], "uri": uri}
        stored = {**dataset.spec, "name": dataset.name, "output": output}
        spec = JobSpec.load(stored, overrides=overrides)
        _check_no_code(spec, layout)
    options = dict(storage_options or known)
    place = spec.output.model_copy(update={"uri": uri, "storage_options": options})
    return spec.model_copy(update={"output": place})


def _check_no_code(spec: JobSpec, layout: Layout) -> None:
    """Refuse a dataset that names code to import, because it may come from anyone."""
    from amtcore.features.registry import get_model  # loads torch, which only such a job needs

    for index, entry in enumerate(spec.extract):
        if get_model(entry.model).names_code:
            raise SpecError(
                f"extract.{index}: {layout.url()}/dataset.json names code to import for model "
                f"{entry.model!r}, which is only taken from the job's own file; give it with --job"
            )


def find_retry(
    uri: str,
    storage_options: Mapping[str, Any],
    *,
    rows: RowFilter,
    job: Job | None,
    overrides: Iterable[str],
) -> JobSpec | None:
    """Return the job that retries quarantined rows; None if no row matches and no earlier retry was
    cut off."""
    layout = Layout.open(uri, storage_options)
    with store_errors(layout.url()):
        spec = stored_job(layout, uri, storage_options, job=job, overrides=overrides)
        if rows.choose(layout):
            return spec
        # A run may have replaced commits or begun a revision, and ended before it closed it.
        records = commits(layout)
        begun = require_dataset(layout).change is not None
        again = begun or any(record.generation for record in records.values())
        return spec if again and not is_closed(layout, records) else None
