"""A few rows looked at closely: what is heard of them, and their streams as figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from earmill.jobs.report.player import Player, Sound
from earmill.jobs.report.plots import Plot, Table, seconds_text
from earmill.jobs.report.row_panels import clip_values, panels
from earmill.pipeline.common.errors import CommitError, EarmillError, SourceError, SourceOutage
from earmill.pipeline.common.text import named_line
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.storage.store_errors import is_store_error

if TYPE_CHECKING:
    from earmill.jobs.report.stored import Stored
    from earmill.pipeline.reader.features import Features
    from earmill.pipeline.sources.base import Item
    from earmill.pipeline.spec.job import JobSpec
    from earmill.pipeline.storage.layout import Layout

# Provenance of an example, in this order.
FACTS = (
    "uri", "start_s", "end_s", "container", "codec", "rate_hz", "channels", "nbytes", "decoder",
    "decoder_version", "header_size", "unterminated", "span_short_s", "resampler", "gain_db",
    "bytes_sha256", "pcm_sha256", "shard",
)  # fmt: skip


@dataclass(frozen=True)
class Example:
    """One row.

    Args:
        number: From 1. seconds: Of the clip. shown_s: Of it, what is shown and heard.
        problem: Why its features cannot be shown; empty where they can.
    """

    number: int
    row_id: str
    seconds: float
    shown_s: float
    sound: Sound
    plots: Sequence[Plot]
    values: Table | None
    facts: Sequence[tuple[str, str]]
    extra: Sequence[tuple[str, str]]
    problem: str = ""


def chosen(features: Features, count: int, row_ids: Sequence[str]) -> list[int]:
    """Positions of the rows to look at: the named ones, else of lengths from short to long.

    Raises:
        SourceError: No good row of this name.
    """
    if row_ids:
        try:
            return [features.index_of(row_id) for row_id in row_ids]
        except KeyError as error:
            raise SourceError(str(error.args[0])) from error
    if not len(features) or not count:
        return []
    order = np.argsort(features.table.column("seconds").to_numpy(), kind="stable")
    middles = (np.arange(min(count, len(order))) + 0.5) / min(count, len(order))
    return [int(order[int(len(order) * share)]) for share in middles]


def examples(
    stored: Stored,
    positions: Sequence[int],
    *,
    seconds: float,
    job: JobSpec | str,
) -> Iterator[Example]:
    """The rows at these positions, one after the other.

    Args:
        positions: In `stored.features`. seconds: Of each row, from its start.
        job: For the sound; why there is none, where that is known already.
    """
    sounds = _Sounds(stored.layout, stored.features, job, seconds)
    for number, position in enumerate(positions, 1):
        yield _example(number, stored, position, seconds, sounds)


def _example(
    number: int, stored: Stored, position: int, seconds: float, sounds: _Sounds
) -> Example:
    known = stored.features.table.slice(position, 1).to_pylist()[0]
    features, place = stored.richest(position)
    shown_s = min(seconds, known["seconds"])
    facts: Mapping[str, Any] = {}
    extra: Mapping[str, Any] = {}
    plots: list[Plot] = []
    values, problem = None, ""
    try:
        row = features.slice(place, 0.0, shown_s) if shown_s > 0 else features[place]
        facts, extra = features.provenance(place), row.extra
        plots = panels(row, features.streams, shown_s) if shown_s > 0 else []
        values = clip_values(row, features.streams)
    except Exception as error:
        if not (isinstance(error, EarmillError | ValueError) or is_store_error(error)):
            raise
        problem = named_line(error)
    return Example(
        number=number,
        row_id=known["row_id"],
        seconds=known["seconds"],
        shown_s=shown_s,
        sound=sounds.of(known, facts) if facts else Sound(why="its provenance cannot be read"),
        plots=plots,
        values=values,
        facts=[(name, _fact(facts[name])) for name in FACTS if facts.get(name) is not None],
        extra=[(name, _fact(value)) for name, value in extra.items() if value is not None],
        problem=problem,
    )


def _fact(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


class _Sounds:
    """The sounds of rows, through the plan that names their places in the source."""

    def __init__(
        self, layout: Layout, features: Features, job: JobSpec | str, seconds: float
    ) -> None:
        self._layout, self._plan_id = layout, features.dataset.plan_id
        self._plan: Plan | None = None
        self._why, self._player = (job, None) if isinstance(job, str) else ("", None)
        if not isinstance(job, str):
            try:
                self._player = Player(job, seconds)
            except EarmillError as error:
                self._why = f"the source cannot be opened: {error}"

    def of(self, row: Mapping[str, Any], facts: Mapping[str, Any]) -> Sound:
        """The sound of a row of the table."""
        if self._player is None:
            return Sound(why=self._why)
        try:
            return self._player.sound(self._item(row), row["channel"], facts)
        except CommitError as error:
            return Sound(why=str(error))
        except SourceOutage as error:  # each further row would wait as long for it
            self._player, self._why = None, f"the source is away: {error}"
            return Sound(why=self._why)

    def _item(self, row: Mapping[str, Any]) -> Item:
        self._plan = self._plan or Plan.read(self._layout, self._plan_id)
        for shard in self._plan.shards:
            if shard.shard_id == row["shard"]:
                for item in shard.items:
                    if item.row_id == row["plan_row_id"]:
                        return item
        raise CommitError(f"the plan has no row {row['plan_row_id']!r}; run `earmill verify`")


def shown_text(example: Example) -> str:
    """How much of the clip is shown."""
    if example.shown_s < example.seconds:
        return (
            f"{seconds_text(example.seconds)}, of which the first {seconds_text(example.shown_s)}"
        )
    return seconds_text(example.seconds)
