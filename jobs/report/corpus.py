"""The rows of a dataset: figures, distributions, streams, a table, and quarantined rows."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from earmill.jobs.report.plots import (
    TIMES,
    Bars,
    Plot,
    Table,
    bars,
    cell_text,
    histogram,
    hours_text,
    number_text,
    percent,
    rate_text,
    seconds_text,
)
from earmill.jobs.report.stored import Stored, spread_over
from earmill.jobs.report.work import mean_speed
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.machine import Threads
from earmill.pipeline.common.text import bytes_text
from earmill.pipeline.dataset.commit_record import READ_THREADS
from earmill.pipeline.formats.row_table import EXTRA_PREFIX, FACT_TYPES
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.storage.documents import read_table

if TYPE_CHECKING:
    from amtcore.features.stream_info import StreamInfo
    from earmill.pipeline.reader.combined import JoinedFeatures
    from earmill.pipeline.reader.features import Features

# Most tables of rows that are read for facts the index does not hold; most rows for summaries.
MOST_TABLES, MOST_SUMMARIES = 256, 200
MOST_SUMMARY_PLOTS = 4
FACTS = ("rate_hz", "container", "codec", "channels", "gain_db")


@dataclass(frozen=True)
class Figure:
    """One number of the overview."""

    name: str
    value: str
    more: str = ""


@dataclass(frozen=True)
class Corpus:
    """Facts about the rows of a dataset.

    Args:
        note: Number of rows behind the counts; empty for all rows.
    """

    figures: Sequence[Figure]
    plots: Sequence[Plot]
    bars: Sequence[Bars]
    streams: Table
    note: str


def corpus(stored: Stored, facts: pa.Table) -> Corpus:
    """Return the facts about the rows of a dataset; `facts` come from `row_facts`."""
    good = len(stored.features)
    return Corpus(
        figures=_figures(stored),
        plots=_histograms(stored, facts),
        bars=_categories(facts),
        streams=_streams(stored),
        note=f"Formats are of {len(facts):,} of {good:,} rows, from shards at even distances."
        if len(facts) < good
        else "",
    )


def row_facts(stored: Stored) -> pa.Table:
    """Return row ids and provenance, from at most `MOST_TABLES` shards at even distances."""
    filled = [shard for shard in stored.shards.values() if shard.rows_ok]
    columns = ["row_id", *FACTS]

    def read(path: str) -> pa.Table:
        table = read_table(stored.layout, path, columns)
        known = {name: FACT_TYPES.get(name, pa.string()) for name in columns}
        missing = [name for name in columns if name not in table.column_names]
        for name in missing:
            table = table.append_column(name, pa.nulls(len(table), known[name]))
        return table.select(columns).cast(pa.schema(list(known.items())))

    with Threads(READ_THREADS) as pool:
        tables = list(pool.map(read, [one.rows for one in spread_over(filled, MOST_TABLES)]))
    empty = pa.schema([(name, FACT_TYPES.get(name, pa.string())) for name in columns])
    return pa.concat_tables(tables) if tables else empty.empty_table()


def _figures(stored: Stored) -> list[Figure]:
    features, bad = stored.features, stored.rows_bad
    seconds = features.table.column("seconds").to_numpy()
    total_s, good = float(seconds.sum()), len(features)
    shards, speed = len(stored.shards), mean_speed(stored.facts)
    nbytes = sum(one.nbytes for one in stored.facts)
    state = "closed" if stored.entry is not None else "not closed"
    return [
        Figure("rows", f"{good:,}", "with features"),
        Figure("quarantined", f"{bad:,}", percent(bad / (good + bad)) if bad else "none"),
        Figure("audio", hours_text(total_s), f"{total_s:,.0f} s"),
        Figure(
            "stored",
            bytes_text(nbytes),
            f"{bytes_text(3600 * nbytes / total_s)} an hour" if total_s else "",
        ),
        Figure("shards", f"{shards:,}", state),
        Figure("speed", f"{number_text(speed)} {TIMES}" if speed else "unknown", "of real time"),
    ]


def _histograms(stored: Stored, facts: pa.Table) -> list[Plot]:
    """Return histograms of durations, of levels if known, and of values of whole clips."""
    seconds = stored.features.table.column("seconds").to_numpy().astype(np.float64)
    levels_db = _levels_db(stored.features.dataset, facts)
    plots = [
        histogram(seconds, "Durations", "duration", text=seconds_text),
        histogram(levels_db, "Levels before scaling", "RMS level (dB re 1)"),
        *_summaries(stored),
    ]
    return [plot for plot in plots if plot is not None]


def _levels_db(dataset: Any, facts: pa.Table) -> np.ndarray:
    """Return the levels of the clips in dB re an RMS of 1.

    Gains tell the levels only in jobs that scale every clip to one level; else there are none.
    """
    from amtcore.units import PA_PER_UNIT, db_to_pa

    calibration = dataset.spec.get("audio", {}).get("calibration", {})
    models = dataset.provenance.get("models", [])
    scaled_to = calibration.get("level_db_spl")
    unit = models[0].get("input_unit") if models else None
    if scaled_to is None or unit not in PA_PER_UNIT:
        return np.empty(0)
    gains_db = facts.column("gain_db").drop_null().to_numpy()
    wanted_db: float = 20 * np.log10(db_to_pa(scaled_to) / PA_PER_UNIT[unit])
    return np.asarray(wanted_db - gains_db, np.float64)


def _summaries(stored: Stored) -> list[Plot | None]:
    """Return histograms of values of whole clips, such as loudness, over rows at even distances."""
    from earmill.pipeline.reader.open import open_features

    clips = {k: v for k, v in stored.features.streams.items() if v.frame_rate_hz == 0}
    if not clips or not len(stored.features):
        return []
    features = open_features(
        stored.uri, streams=list(clips), storage_options=stored.storage_options
    )
    chosen = spread_over(range(len(features)), MOST_SUMMARIES)
    rows = [features[position] for position in chosen]
    of = "rows" if len(rows) == len(features) else f"of {len(rows):,} rows"
    plots = []
    for name, info in clips.items():
        values = np.stack([np.asarray(row.features[name][0], np.float64) for row in rows])
        for k, column in enumerate(info.columns or ()):
            title = f"{name}: {column}".replace("_", " ").capitalize()
            label = f"{column.replace('_', ' ')} ({info.unit})"
            plots.append(histogram(values[:, k], title, label, of))
    return plots[:MOST_SUMMARY_PLOTS]


def _categories(facts: pa.Table) -> list[Bars]:
    if not len(facts):
        return []
    rates = Counter(facts.column("rate_hz").to_pylist())
    pairs = zip(*(facts.column(n).to_pylist() for n in ("container", "codec")), strict=True)
    codecs = Counter(" ".join(str(t) for t in pair if t) or "unknown" for pair in pairs)
    channels = Counter(facts.column("channels").to_pylist())
    return [
        bars(_texts(rates, rate_text), "Sample rates of the files", "rate"),
        bars(dict(codecs), "Formats of the files", "container and codec"),
        bars(_texts(channels, _channels_text), "Channels of the files", "channels"),
    ]


def _texts(counts: Mapping[Any, int], text: Any) -> dict[str, int]:
    by_text = Counter[str]()
    for value, count in counts.items():
        by_text["unknown" if value is None else text(value)] += count
    return dict(by_text)


def _channels_text(channels: int) -> str:
    return {1: "mono", 2: "stereo"}.get(channels, f"{channels} channels")


def _streams(stored: Stored) -> Table:
    """Return the table of the streams, first the rows' own, then added ones."""
    header = ("stream", "model", "stored", "shape", "range", "mean")
    own, joined = stored.features, stored.joined
    rows = [_stream(own, name, info) for name, info in own.streams.items()]
    if joined is not None:
        beside = {name: info for name, info in joined.streams.items() if name not in own.streams}
        rows += [_stream(joined, name, info) for name, info in beside.items()]
    return Table(header, tuple(rows))


def _stream(features: Features | JoinedFeatures, name: str, info: StreamInfo) -> tuple[str, ...]:
    layout = layout_of(info)
    stored = int(features.table.column(f"{name}_n_frames").to_numpy().sum())
    shape = f"{info.width} {layout.columns_are} {layout.rate_text} ({info.pool}), {info.unit}"
    low_high, mean = "", ""
    try:
        values = features.statistics.get(name)
    except CommitError:  # an older release stored no statistics
        values = None
    if values is not None and values.count:
        low, high = float(values.minimum.min()), float(values.maximum.max())
        low_high, mean = (
            f"{number_text(low)} to {number_text(high)}",
            number_text(float(values.mean.mean())),
        )
    return name, info.model, f"{stored:,} {layout.stored_rows}", shape, low_high, mean


# A cut table has one quarantined row in `BAD_PART` rows, if there are any.
BAD_PART = 4
# Most columns of the source that the table shows.
MOST_EXTRAS = 6


@dataclass(frozen=True)
class TableRow:
    """One row of the table.

    Args:
        status: ok, or the error class.
        seconds: Duration; None for a quarantined row.
        duration: Duration in words.
        file: Format of its file.
        extras: Cells of the source's own columns.
        message: Why it is quarantined.
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
    """The table of rows.

    Args:
        total: Number of rows of the dataset.
        extras: Names of the source's columns.
        note: Which rows and columns are left out; empty for none.
    """

    rows: Sequence[TableRow]
    total: int
    extras: Sequence[str]
    note: str


def rows_of(stored: Stored, facts: pa.Table, bad: Sequence[Mapping[str, Any]], most: int) -> Rows:
    """Return a table of at most `most` rows, good ones first; `facts` come from `row_facts`."""
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
            extras=[cell_text(row[name]) for name in names[:MOST_EXTRAS]],
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
    """Map row ids to the formats of their files."""
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


def _note(good: int, all_good: int, bad: int, all_bad: int, columns: int) -> str:
    notes = []
    if good < all_good or bad < all_bad:
        notes.append(
            f"{good:,} of {all_good:,} good rows at even distances, and {bad:,} of {all_bad:,} "
            "quarantined ones; --rows N of the command shows more, `open_features(uri).table` and "
            "`.quarantine` have all."
        )
    if columns > MOST_EXTRAS:
        notes.append(f"{columns - MOST_EXTRAS:,} more columns of the source are left out.")
    return " ".join(notes)


# Most tables of quarantined rows that are read; most rows of each reason that are shown.
MOST_BAD_TABLES, MOST_EXAMPLES = 200, 5


@dataclass(frozen=True)
class Reason:
    """One class of errors, its number of rows, and some of the rows."""

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
    """Return at most `most` quarantined rows with their shards, in the order of the shards."""
    bad: list[dict[str, Any]] = []
    paths = [(k, one.quarantine) for k, one in stored.shards.items() if one.quarantine]
    for shard, path in paths[:MOST_BAD_TABLES]:
        if len(bad) >= most:
            break
        rows = read_table(stored.layout, str(path)).to_pylist()
        bad += [shown_bad_row(row, shard) for row in rows]
    return bad[:most]


def shown_bad_row(row: Mapping[str, Any], shard: str) -> dict[str, Any]:
    """Return a quarantined row for the page.

    Its message loses the URI at its beginning, because the page shows the URI beside it.
    """
    message = (row["message"] or "").removeprefix(f"{row['uri']}: ")
    return {**row, "shard": shard, "message": message}


def quarantine(reasons: Mapping[str, int], rows: Iterable[Mapping[str, Any]]) -> Quarantine:
    """Return the quarantine from counts by reason and some rows."""
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
