"""A dataset opened for its report, and its rows: figures, distributions, streams, a table, and
quarantined rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa

from earmill.jobs.report.plots import (
    TIMES,
    Plot,
    Table,
    Values,
    bars,
    cell_text,
    histogram,
    hours_text,
    number_text,
    percent,
    rate_text,
    seconds_text,
)
from earmill.jobs.report.work import mean_speed
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.text import bytes_text, named_line
from earmill.pipeline.dataset.commit_record import newest_generations, read_commit, reading_pool
from earmill.pipeline.dataset.snapshot import Snapshot, read_current, read_snapshot
from earmill.pipeline.dataset.watch import ShardFacts, shard_facts
from earmill.pipeline.formats.row_table import EXTRA_PREFIX, FACT_TYPES
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.reader.combined import JoinedFeatures
from earmill.pipeline.reader.features import Features
from earmill.pipeline.reader.open import open_features
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout

# Most tables of rows that are read for facts the index does not hold; most rows for summaries.
MOST_TABLES, MOST_SUMMARIES = 256, 200
MOST_SUMMARY_PLOTS = 4
# Provenance of rows behind the figures, and its types.
SHOWN = ("row_id", "rate_hz", "container", "codec", "channels", "gain_db")
FACTS = pa.schema([(name, FACT_TYPES.get(name, pa.string())) for name in SHOWN])
BAD_PART = 4  # A cut table has one quarantined row in `BAD_PART` rows, if there are any.
MOST_EXTRAS = 6  # Most columns of the source that the table shows.
# Most tables of quarantined rows that are read; most rows of each reason that are shown.
MOST_BAD_TABLES, MOST_EXAMPLES = 200, 5


@dataclass(frozen=True)
class Stored:
    """A dataset opened for its report, with the shards of the current snapshot. Before the dataset
    is closed, these are all committed shards."""

    uri: str
    storage_options: Mapping[str, Any]
    layout: Layout
    features: Features
    joined: Features | JoinedFeatures  # Rows that are good in all feature sets, additions included.
    snapshot: Snapshot | None
    shards: Mapping[str, tuple[ShardFacts, str]]  # With the path of the table of rows.

    @classmethod
    def open(cls, uri: str, storage_options: Mapping[str, Any]) -> Stored:
        layout = Layout.open(uri, storage_options)
        features = open_features(uri, storage_options=storage_options)
        joined: Features | JoinedFeatures = features
        current = read_current(layout)
        snapshot = None if current is None else read_snapshot(layout, current)
        if snapshot is None:
            commits = newest_generations(layout)
        else:
            commits = {shard: ref.generation for shard, ref in sorted(snapshot.commits.items())}
            if snapshot.additions:
                joined = open_features(uri, additions=True, storage_options=storage_options)

        def read(shard: str) -> tuple[ShardFacts, str]:
            record = read_commit(layout, shard, commits[shard])
            if record is None:
                raise CommitError(
                    f"{layout.url()}: the commit of shard {shard} is gone although the dataset "
                    "names it; run `earmill verify`"
                )
            try:
                return shard_facts(layout, record), str(record.path("rows"))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CommitError(
                    f"{layout.url()}: the commit of shard {shard} has an unknown form "
                    f"({named_line(error)}); run `earmill verify`"
                ) from error

        with reading_pool(layout, len(commits)) as pool:
            shards = dict(zip(commits, pool.map(read, commits), strict=True))
        return cls(uri, storage_options, layout, features, joined, snapshot, shards)

    @property
    def facts(self) -> list[ShardFacts]:
        return [facts for facts, _ in self.shards.values()]


def corpus(stored: Stored, facts: pa.Table) -> dict[str, Any]:
    """Return the facts about the rows of a dataset; `facts` come from `row_facts`."""
    good = len(stored.features)
    note = f"Formats are of {len(facts):,} of {good:,} rows, from shards at even distances."
    seconds = stored.features.table.column("seconds").to_numpy().astype(np.float64)
    plots = [
        histogram(seconds, "Durations", "duration", text=seconds_text),
        histogram(_levels_db(stored, facts), "Levels before scaling", "RMS level (dB re 1)"),
        *_summaries(stored),
    ]
    return {
        "figures": _figures(stored, float(seconds.sum())),
        "plots": [plot for plot in plots if plot is not None],
        "bars": _categories(facts) if len(facts) else [],
        "streams": _streams(stored),
        "note": note if len(facts) < good else "",
    }


def row_facts(stored: Stored) -> pa.Table:
    """Return row ids and provenance, from at most `MOST_TABLES` shards at even distances."""
    paths = [rows for facts, rows in stored.shards.values() if facts.rows_ok]
    with reading_pool(stored.layout, min(len(paths), MOST_TABLES)) as pool:
        read = partial(read_table, stored.layout, columns=FACTS.names)
        tables = pool.map(read, [paths[k] for k in _spread(len(paths), MOST_TABLES)])
        # Tables of earlier releases lack some columns.
        return pa.concat_tables([FACTS.empty_table(), *tables], promote_options="permissive")


def _spread(length: int, most: int) -> list[int]:
    """Return at most `most` places at even distances in a list of this length."""
    places: list[int] = np.linspace(0, length - 1, min(length, most)).round().astype(int).tolist()
    return places


def _figures(stored: Stored, total_s: float) -> list[tuple[str, str, str]]:
    good, bad = len(stored.features), sum(one.rows_bad for one in stored.facts)
    nbytes, speed = sum(one.nbytes for one in stored.facts), mean_speed(stored.facts)
    state = "complete" if stored.snapshot else "incomplete"
    of_an_hour = f"{bytes_text(3600 * nbytes / total_s)} an hour" if total_s else ""
    return [
        ("rows", f"{good:,}", "with features"),
        ("quarantined", f"{bad:,}", percent(bad / (good + bad)) if bad else "none"),
        ("audio", hours_text(total_s), f"{total_s:,.0f} s"),
        ("stored", bytes_text(nbytes), of_an_hour),
        ("shards", f"{len(stored.shards):,}", f"job {state}"),
        ("speed", f"{number_text(speed)} {TIMES}" if speed else "unknown", "of real time"),
    ]


def _levels_db(stored: Stored, facts: pa.Table) -> Values:
    """Return the levels of the clips in dB re an RMS of 1. Gains tell the levels only in jobs that
    scale every clip to one level; else there are none."""
    from amtcore.units import PA_PER_UNIT, db_to_pa

    dataset = stored.features.dataset
    scaled_to = dataset.spec.get("audio", {}).get("calibration", {}).get("level_db_spl")
    models = dataset.provenance.get("models", [])
    unit = models[0].get("input_unit") if models else None
    if scaled_to is None or unit not in PA_PER_UNIT:
        return np.empty(0)
    gains_db = facts.column("gain_db").drop_null().to_numpy()
    wanted_db: float = 20 * np.log10(db_to_pa(scaled_to) / PA_PER_UNIT[unit])
    return np.asarray(wanted_db - gains_db, np.float64)


def _summaries(stored: Stored) -> list[Plot | None]:
    """Return histograms of values of whole clips, such as loudness, over rows at even distances."""
    clips = {k: v for k, v in stored.features.streams.items() if v.frame_rate_hz == 0}
    if not clips or not len(stored.features):
        return []
    features = open_features(
        stored.uri, streams=list(clips), storage_options=stored.storage_options
    )
    rows = [features[k] for k in _spread(len(features), MOST_SUMMARIES)]
    of = "rows" if len(rows) == len(features) else f"of {len(rows):,} rows"
    plots = []
    for name, info in clips.items():
        values = np.stack([np.asarray(row.features[name][0], np.float64) for row in rows])
        for k, column in enumerate(info.columns or ()):
            title = f"{name}: {column}".replace("_", " ").capitalize()
            label = f"{column.replace('_', ' ')} ({info.unit})"
            plots.append(histogram(values[:, k], title, label, of))
    return plots[:MOST_SUMMARY_PLOTS]


def _categories(facts: pa.Table) -> list[dict[str, Any]]:
    rates, codecs, channels = Counter[str](), Counter[str](), Counter[str]()
    for row in facts.to_pylist():
        rate, count = row["rate_hz"], row["channels"]
        rates["unknown" if rate is None else rate_text(rate)] += 1
        codecs[" ".join(filter(None, (row["container"], row["codec"]))) or "unknown"] += 1
        channels[{None: "unknown", 1: "mono", 2: "stereo"}.get(count, f"{count} channels")] += 1
    return [
        bars(rates, "Sample rates of the files", "rate"),
        bars(codecs, "Formats of the files", "container and codec"),
        bars(channels, "Channels of the files", "channels"),
    ]


def _streams(stored: Stored) -> Table:
    rows = {name: _stream(stored.features, name) for name in stored.features.streams}
    added = [name for name in stored.joined.streams if name not in rows]
    rows |= {name: _stream(stored.joined, name) for name in added}
    header = ("stream", "model", "stored", "shape", "range", "mean")
    return Table(header, tuple(rows.values()), range(len(header)))


def _stream(features: Features | JoinedFeatures, name: str) -> tuple[str, ...]:
    info = features.streams[name]
    layout = layout_of(info)
    stored = int(features.table.column(f"{name}_n_frames").to_numpy().sum())
    shape = f"{info.width} {layout.columns_are} {layout.rate_text} ({info.pool}), {info.unit}"
    low_high, mean = "", ""
    with suppress(CommitError):  # an older release stored no statistics
        values = features.statistics.get(name)
        if values is not None and values.count:
            low, high = float(values.minimum.min()), float(values.maximum.max())
            low_high = f"{number_text(low)} to {number_text(high)}"
            mean = number_text(float(values.mean.mean()))
    return name, info.model, f"{stored:,} {layout.stored_rows}", shape, low_high, mean


def rows_of(
    stored: Stored, facts: pa.Table, bad: Sequence[Mapping[str, Any]], most: int
) -> dict[str, Any]:
    """Return a table of at most `most` rows, good ones first; `facts` come from `row_facts`."""
    table, n_bad = stored.features.table, sum(one.rows_bad for one in stored.facts)
    total = len(table) + n_bad
    shown_bad = list(bad[:most])
    if total > most:
        shown_bad = shown_bad[: max(most // BAD_PART, most - len(table))]
    positions = _spread(len(table), most - len(shown_bad))
    columns = [name for name in table.column_names if name.startswith(EXTRA_PREFIX)]
    names = columns[:MOST_EXTRAS]
    files = {row["row_id"]: _file(row) for row in facts.to_pylist()}
    good = [
        {
            **row,
            "status": "ok",
            "file": files.get(row["row_id"], ""),
            "extras": [cell_text(row[name]) for name in names],
            "message": "",
        }
        for row in table.take(pa.array(positions, pa.int64())).to_pylist()
    ]
    nothing = {"seconds": None, "file": "", "extras": [""] * len(names)}
    quarantined = [{**row, "status": row["error_class"], **nothing} for row in shown_bad]
    notes = []
    if len(good) < len(table) or len(shown_bad) < n_bad:
        notes.append(
            f"{len(good):,} of {len(table):,} good rows at even distances, and "
            f"{len(shown_bad):,} of {n_bad:,} quarantined ones; --rows N of the command shows "
            "more, `open_features(uri).table` and `.quarantine` have all."
        )
    if len(columns) > MOST_EXTRAS:
        notes.append(f"{len(columns) - MOST_EXTRAS:,} more columns of the source are left out.")
    return {
        "rows": good + quarantined,
        "total": total,
        "extras": [name.removeprefix(EXTRA_PREFIX) for name in names],
        "note": " ".join(notes),
    }


def _file(facts: Mapping[str, Any]) -> str:
    rate = facts["rate_hz"] and rate_text(facts["rate_hz"])
    channels = facts["channels"] and f"{facts['channels']} ch"
    return ", ".join(part for part in (facts["codec"], rate, channels) if part)


def bad_rows_of(stored: Stored, most: int) -> list[dict[str, Any]]:
    """Return at most `most` quarantined rows with their shards, in the order of the shards."""
    paths = [(k, facts.quarantine) for k, (facts, _) in stored.shards.items() if facts.quarantine]
    tables = (read_bad_rows(stored.layout, *each) for each in paths[:MOST_BAD_TABLES])
    return list(islice(chain.from_iterable(tables), most))


def read_bad_rows(layout: Layout, shard: str, path: str) -> Iterator[dict[str, Any]]:
    """Yield the quarantined rows of a shard. The page shows their URIs beside the messages."""
    for row in read_table(layout, path).to_pylist():
        message = (row["message"] or "").removeprefix(f"{row['uri']}: ")
        yield {**row, "shard": shard, "message": message}


def quarantine(reasons: Mapping[str, int], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the quarantine from counts by reason, most frequent first, and some rows."""
    examples = {name: [row for row in rows if row["error_class"] == name] for name in reasons}
    return {
        "rows": sum(reasons.values()),
        "bars": bars(reasons, "Reasons", "reason", kind="bad"),
        "reasons": [
            {"name": name, "count": count, "rows": examples[name][:MOST_EXAMPLES]}
            for name, count in Counter(reasons).most_common()
        ],
    }
