"""The catalog of a dataset: its rows, where they lie, and the files that hold them.

The record of a shard of a closed dataset is read when the shard is first needed, and is refused if
its attempt differs from the index. A dataset that is not closed has no index: every commit and its
table of rows is read. Rows come by shard, then by position in the shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common.errors import CLOSE_AGAIN, CommitError, SourceError
from earmill.pipeline.common.text import one_line
from earmill.pipeline.dataset.commit_record import (
    CommitRecord,
    bad_rows,
    commits,
    promise_of,
    read_commit,
    reading_pool,
)
from earmill.pipeline.dataset.description import DatasetFile, datasets_below, read_description
from earmill.pipeline.dataset.snapshot import (
    CommitRef,
    Which,
    find_snapshot,
    moments_of,
    name_of,
    read_checked,
    read_current,
    read_snapshot,
)
from earmill.pipeline.formats.block_cache import FrameSpan
from earmill.pipeline.formats.format import Format, Promise, chosen, explain_damage, format_of
from earmill.pipeline.formats.moments import StoredMoments
from earmill.pipeline.formats.parquet.format import row_groups
from earmill.pipeline.formats.row_table import (
    EXTRA_PREFIX,
    VARIANT_COLUMNS,
    columns_of,
    quarantine_table,
)
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.loader.rows import Span, short
from earmill.pipeline.reader.read_ahead import Spans, Wanted
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.documents import read_table, table_of
from earmill.pipeline.storage.layout import Layout

SHOWN = ("row_id", "plan_row_id", "channel", "seconds", "uri", "shard", "row")


def check_rows(layout: Layout, table: pa.Table, streams: Mapping[str, StreamInfo]) -> None:
    """Refuse a table in which a row has no name, valid shard or place; reading checks its end."""
    layouts = map(layout_of, streams.values())
    places = ["row", *(column for layout in layouts for column in layout.place_columns)]
    kinds = {name: pa.types.is_integer for name in places}
    kinds |= {"row_id": pa.types.is_string, "shard": pa.types.is_string}
    kinds |= {"seconds": pa.types.is_floating}
    columns = {name: table.column(name) for name in kinds}
    strange = [name for name, is_kind in kinds.items() if not is_kind(columns[name].type)]
    empty = [name for name, column in columns.items() if column.null_count]
    if strange or empty:
        raise CommitError(
            f"{layout.url()}: expected a name, a shard and places of every row, the index has none "
            f"in its column {(strange or empty)[0]!r}; run `earmill verify`"
        )
    strange = [
        name for name in columns["shard"].unique().to_pylist() if not paths.is_shard_id(name)
    ]
    negative = [name for name in places if (pc.min(columns[name]).as_py() or 0) < 0]
    if strange or negative:
        raise CommitError(
            f"{layout.url()}: expected shard ids and places from 0, the index holds "
            f"{strange[:1] or negative}; run `earmill verify`"
        )


def good_rows(table: pa.Table, streams: Mapping[str, StreamInfo]) -> pa.Table:
    """Return the good rows of an index, in the order of shards; copied only if they change."""
    good, shown = pc.equal(table.column("status"), "ok"), shown_columns(table, streams)
    del table
    if not pc.all(good, min_count=0, skip_nulls=False).as_py():
        shown = shown.filter(good)
    order = pc.sort_indices(shown, [("shard", "ascending"), ("row", "ascending")])
    if not np.array_equal(order, np.arange(len(shown))):
        shown = shown.take(order)
    return shown


def shown_columns(table: pa.Table, streams: Mapping[str, StreamInfo]) -> pa.Table:
    extras = sorted(filter(is_extra, table.column_names))
    variants = [name for name in VARIANT_COLUMNS if name in table.column_names]
    of_streams = [column for info in streams.values() for column in columns_of(info)]
    return table.select([*SHOWN, *variants, *of_streams, *extras])


def is_extra(name: str) -> bool:
    return name.startswith(EXTRA_PREFIX)


DTYPES, STORED = ("float16", "float32", "float64"), "stored"


@dataclass(frozen=True)
class Catalog:
    """The description, rows and files of a dataset."""

    dataset: DatasetFile
    streams: Mapping[str, StreamInfo]
    dtype: str  # Type of the stored frames, as the job sets it. Events are int32.
    # One line for each good row: identity, seconds, shard, row, and the columns of the source as
    # `extra_<name>`. Each stream has `<stream>_start` and `<stream>_n_frames`. Events and int8 also
    # have `<stream>_n_steps`, and streams with one row a clip have their values.
    table: pa.Table
    all_rows: pa.Table  # All good rows; `table` may be a choice of them.
    # By shard, as far as they were read.
    records: dict[str, CommitRecord] = field(default_factory=dict)
    # The commits from which the index was made; empty if the dataset names none.
    refs: Mapping[str, CommitRef] = field(default_factory=dict)
    # Stored statistics of the streams of frames, if all commits have them.
    moments: Mapping[str, StoredMoments] = field(default_factory=dict)
    # Feature sets beside these rows, see `dataset.snapshot`.
    additions: Mapping[str, OutFile] = field(default_factory=dict)
    outdated: Sequence[str] = ()  # Names of sets beside earlier rows.
    finished: bool = True  # False: the job has not finished; these are the shards it committed.

    def where(self, expression: pc.Expression) -> Catalog:
        """Return the catalog of the rows that an expression over `table` selects."""
        table = filtered(self.table, expression)
        return replace(self, table=table.combine_chunks(), moments={})

    def record(self, layout: Layout, shard: str) -> CommitRecord:
        """Return the commit record of a shard; refuse one of another dataset or index."""
        ref = self.refs.get(shard)
        generation = ref.generation if ref else 0
        name = paths.commit_path(shard, generation)
        record = self.records.get(shard) or read_commit(layout, shard, generation)
        if record is None:
            raise CommitError(
                f"{layout.url(name)} is missing although the index names shard {shard}; run "
                "`earmill verify`"
            )
        if ref is not None and record.attempt != ref.attempt:
            raise CommitError(
                f"{layout.url(name)}: expected attempt {ref.attempt} as in the index, got "
                f"{record.attempt}: the shard was committed again after the index was made; "
                f"{CLOSE_AGAIN}"
            )
        check_record(layout, record, self.dataset.spec_sha256, self.streams)
        self.records[shard] = record
        return record

    def shard_file(self, layout: Layout, shard: str, name: str) -> tuple[str, Promise]:
        """Return the path of a shard's feature file in a format, and what its commit states."""
        record, fmt = self.record(layout, shard), format_of(name)
        if name not in record.formats:
            raise CommitError(
                f"{layout.url()}: expected shard {shard!r} in the format {name!r}, got "
                f"{list(record.formats)}; run `earmill verify`"
            )
        promise = promise_of(record, self.streams, self.dtype, fmt)
        if self.refs:
            promise = replace(promise, said=self.all_rows.slice(*self._rows_at[shard]))
        return paths.data_path(shard, record.attempt, fmt.suffix), promise

    @cached_property
    def _rows_at(self) -> dict[str, tuple[int, int]]:
        names, counts = _counted(self.all_rows)
        firsts = np.cumsum(counts) - counts
        return dict(zip(names, zip(firsts.tolist(), counts.tolist(), strict=True), strict=True))

    def column(self, name: str) -> np.ndarray:
        return np.asarray(self.table.column(name).to_numpy())

    @cached_property
    def shards(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Shard ids in order, and the number of good rows of each."""
        return _counted(self.table)

    @cached_property
    def row_bytes(self) -> np.ndarray:
        """Stored size of each row over all streams, uncompressed."""
        size = np.zeros(len(self.table), np.int64)
        for name, stream in self.streams.items():
            size += self.column(f"{name}_n_frames") * layout_of(stream).row_bytes(self.dtype)
        return size

    @cached_property
    def block_rows(self) -> np.ndarray:
        """Rows per row group, by the rule of the Parquet writer for all streams, so that the order
        depends on neither the format nor the streams that are read."""
        profile = self.dataset.spec["output"]["row_group_profile"]
        blocks, start = [], 0
        for n_rows in self.shards[1].tolist():
            sizes = self.row_bytes[start : start + n_rows].tolist()
            blocks += [stop - first for first, stop in row_groups(sizes, profile)]
            start += n_rows
        return np.array(blocks, np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the spec, the shards and the lengths of rows; positions depend on these."""
        facts = [self.dataset.spec_sha256, self.shards[0]]
        digest = hashlib.sha256(json.dumps(facts).encode())
        names = [f"{name}_n_frames" for name in self.streams]
        if len(self.table) < len(self.all_rows):
            names.append("row")  # the text of a filter shortens long lists of values
        for values in (self.shards[1], *map(self.column, names)):
            digest.update(values.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def id_order(self) -> np.ndarray:
        """Row positions sorted by row id. UTF-8 bytes sort as Python strings."""
        return np.asarray(pc.sort_indices(self.table.column("row_id")))

    def choose_format(self, wanted: str | None) -> str:
        """Check the wanted format; None chooses one that reads parts of rows, if there is one."""
        writers = self.dataset.provenance.get("extensions", {}).get("formats", {})
        return chosen(self.dataset.spec["output"]["formats"], wanted, writers)

    def choose_streams(self, wanted: Sequence[str] | None) -> tuple[str, ...]:
        if wanted is None:
            return tuple(self.streams)
        if isinstance(wanted, str):
            raise TypeError(f"streams takes a list of names, got the string {wanted!r}")
        unknown = [name for name in wanted if name not in self.streams]
        if unknown or not wanted:
            raise ValueError(
                f"expected streams out of {list(self.streams)}, got {list(wanted)}; "
                "leave it out for all"
            )
        return tuple(dict.fromkeys(wanted))

    def choose_dtypes(self, wanted: str | None, streams: Sequence[str]) -> dict[str, np.dtype]:
        """Check the wanted dtype, and return the dtype of each stream's frames."""
        if wanted == STORED:
            layouts = {name: layout_of(self.streams[name]) for name in streams}
            return {k: np.dtype(each.exact_dtype(self.dtype)) for k, each in layouts.items()}
        # A numpy or torch dtype, or its name.
        name = "float32" if wanted is None else getattr(wanted, "__name__", str(wanted))
        dtype = None
        with suppress(TypeError):
            dtype = np.dtype(name.removeprefix("torch.")).newbyteorder("=")
        if dtype is None or dtype.name not in DTYPES:
            raise ValueError(
                f"dtype is one of {[*DTYPES, STORED]}, got {wanted!r}; for bfloat16, which numpy "
                "does not have, convert batches: batch.to(torch.bfloat16)"
            )
        return dict.fromkeys(streams, dtype)


def filtered(table: pa.Table, where: pc.Expression) -> pa.Table:
    """Return the rows of a table that an expression selects."""
    try:
        if not isinstance(where, pc.Expression):
            raise TypeError(type(where).__name__)
        return table.filter(where)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ValueError(
            "filter: expected a pyarrow expression over columns of ds.table, such as "
            f"pyarrow.compute.field('seconds') > 2, got {short(where)}: {one_line(error)}; the "
            f"columns are {table.column_names}"
        ) from error


def _counted(table: pa.Table) -> tuple[tuple[str, ...], np.ndarray]:
    counted = table.column("shard").value_counts()
    return tuple(counted.field("values").to_pylist()), counted.field("counts").to_numpy()


def load_catalog(layout: Layout, which: Which | None = None) -> Catalog:
    """Read a dataset's catalog, from its index or else its commits; `which` is a snapshot."""
    named = read_current(layout) if which is None else find_snapshot(layout, which)
    snapshot = None if named is None else read_snapshot(layout, named)
    refs = {} if snapshot is None else snapshot.commits
    rel = paths.DATASET_FILE if snapshot is None else snapshot.dataset.path
    if rel != paths.DATASET_FILE and paths.parse_revision_path(rel) is None:
        raise CommitError(f"{layout.url()}: a snapshot names {rel!r} as its description; verify it")
    # Concurrently, as each is a round trip to a bucket.
    with ThreadPoolExecutor(2) as pool:
        index = None if snapshot is None else pool.submit(read_checked, layout, snapshot.index)
        first = pool.submit(_first_record, layout, refs)
        dataset = read_description(layout, rel)
    if dataset is None:
        raise SourceError(
            f"expected a feature set with a {paths.DATASET_FILE}, found none at {layout.url()}; "
            "check the address (it is the job's output.uri) and the credentials"
            f"{datasets_below(layout)}"
        )
    streams = {info["name"]: StreamInfo.from_dict(info) for info in dataset.streams}
    content = None if index is None else index.result()
    # A closed dataset of layout version 1 has one index, and nothing names it.
    known = layout.list("index") if index is None and dataset.layout_version == 1 else []
    if len(known) == 1:
        content = layout.read_bytes(known[0])
        if name_of(content) != Path(known[0]).stem:
            raise CommitError(
                f"{layout.url(known[0])} does not hash to its own name: it is damaged; "
                f"{CLOSE_AGAIN}"
            )
    finished = content is not None
    if content is not None:
        with explain_damage(layout.url(), "the index"):
            table = good_rows(table_of(content), streams)
        records, moments = first.result(), {} if snapshot is None else snapshot.moments
    else:
        records = dict(commits(layout))
        for record in records.values():
            check_record(layout, record, dataset.spec_sha256, streams)
        table = _rows_of(layout, records, streams)
        moments = moments_of(records, dataset.streams)
    # The bytes of an index of millions of rows are not kept while its columns are joined.
    del index, content
    check_rows(layout, table, streams)
    table = table.combine_chunks()
    return Catalog(
        dataset=dataset,
        streams=streams,
        dtype=dataset.spec["output"]["dtype"],
        table=table,
        all_rows=table,
        records=records,
        refs=refs,
        moments=moments,
        additions={} if snapshot is None else snapshot.additions,
        outdated=() if snapshot is None else snapshot.outdated,
        finished=finished,
    )


def _first_record(layout: Layout, refs: Mapping[str, CommitRef]) -> dict[str, CommitRecord]:
    """Return the first shard's record of a remote dataset, if readable; it saves a round trip."""
    if layout.is_local or not refs:
        return {}
    shard = min(refs)
    with suppress(Exception):
        record = read_commit(layout, shard, refs[shard].generation)
        return {} if record is None else {shard: record}
    return {}


def check_record(
    layout: Layout, record: CommitRecord, spec_sha256: str, streams: Iterable[str]
) -> None:
    """Refuse a commit record of another spec, or one that lacks a stream of the dataset."""
    if record.spec_sha256 != spec_sha256:
        raise CommitError(
            f"{layout.url(paths.commit_path(record.shard))}: expected spec {spec_sha256[:12]} as "
            f"in {paths.DATASET_FILE}, got {str(record.spec_sha256)[:12]}; features of two specs "
            "cannot be read as one dataset, write each to its own output"
        )
    missing = [name for name in streams if name not in record.frames]
    if missing:
        raise CommitError(
            f"{layout.url()}: the commit record of shard {record.shard!r} does not belong to this "
            f"dataset: it has no frames of {missing}; run `earmill verify`"
        )


def read_quarantine(layout: Layout, catalog: Catalog) -> pa.Table:
    if catalog.refs:
        found = (read_commit(layout, k, ref.generation) for k, ref in catalog.refs.items())
        records = {record.shard: record for record in found if record is not None}
    else:
        records = commits(layout)
    tables, shards = [quarantine_table([])], []
    for shard, record in sorted(records.items()):
        tables.append(bad_rows(layout, record).select(tables[0].column_names))
        shards += [shard] * len(tables[-1])
    return pa.concat_tables(tables).append_column("shard", pa.array(shards, pa.string()))


def _rows_of(
    layout: Layout, records: Mapping[str, CommitRecord], streams: Mapping[str, StreamInfo]
) -> pa.Table:
    """Return the good rows of all committed shards. Their tables are read concurrently."""

    def of_shard(shard: str) -> pa.Table:
        with explain_damage(layout.url(), f"the table of rows of shard {shard}"):
            table = read_table(layout, paths.rows_path(shard, records[shard].attempt))
            names = pa.array([shard] * table.num_rows, pa.string())
            table = table.append_column("shard", names)
            table = table.append_column("row", pa.array(np.arange(table.num_rows)))
            return shown_columns(table, streams)

    if not records:
        raise SourceError(
            f"{layout.url()}: no shard is committed yet; wait for the first one or run the job"
        )
    with reading_pool(layout, len(records)) as pool:
        return pa.concat_tables(pool.map(of_shard, sorted(records)), promote_options="permissive")


class RowLocations:
    """The places of a set's rows in their shards, and their lengths, by position in the set."""

    def __init__(self, catalog: Catalog, streams: Sequence[str], fmt: Format) -> None:
        self._table = catalog.table
        self.layouts = {name: fmt.layout_of(catalog.streams[name]) for name in streams}
        self.starts = {name: catalog.column(f"{name}_start") for name in streams}
        self.sizes = {name: catalog.column(f"{name}_n_frames") for name in streams}
        # Frames, or steps of events, of each clip: the unit of slices.
        self.lengths = {k: catalog.column(v.length_column) for k, v in self.layouts.items()}
        self.rows, self.seconds = catalog.column("row"), catalog.column("seconds")
        self.decoded_bytes = np.zeros(len(self.rows), np.int64)
        for name, layout in self.layouts.items():
            self.decoded_bytes += self.sizes[name] * layout.row_bytes(catalog.dtype)
        self._columns: dict[str, Any] = {}

    def cell(self, column: str, position: int) -> Any:
        # Looking up a column by name, in chunks, takes ten times as long as indexing one array.
        if column not in self._columns:
            self._columns[column] = self._table.column(column).combine_chunks()
        return self._columns[column][position].as_py()

    def shard(self, position: int) -> str:
        if "shard" not in self._columns:
            column = self._table.column("shard").combine_chunks().dictionary_encode()
            self._columns["shard"] = column.dictionary.to_pylist(), column.indices.to_numpy()
        names, numbers = self._columns["shard"]
        return str(names[numbers[position]])

    def frames(self, position: int, span_s: Span | None) -> dict[str, tuple[int, int]]:
        """Return the frames [first, last) of each stream in a span of a row; None is the row."""
        lengths = {name: int(values[position]) for name, values in self.lengths.items()}
        if span_s is None:
            return {name: (0, length) for name, length in lengths.items()}
        return {k: self.layouts[k].frame_range(length, *span_s) for k, length in lengths.items()}

    def stored(self, position: int, name: str, first: int, last: int) -> FrameSpan:
        """Return where stored rows [first, last) of a stream of a row lie in the shard."""
        row_id, row = self.cell("row_id", position), int(self.rows[position])
        return FrameSpan(row_id, row, int(self.starts[name][position]), first, last)

    def known_ahead(self, wanted: Wanted) -> dict[str, FrameSpan]:
        """Return where the stored rows of a span of a row lie, but of events and int8 frames, whose
        places inside a row are known only when it is read."""
        position, span_s = wanted
        frames = {name: (0, int(sizes[position])) for name, sizes in self.sizes.items()}
        if span_s is not None:
            spans = self.frames(position, span_s)
            frames = {k: spans[k] for k, layout in self.layouts.items() if not layout.row_counts}
        return {name: self.stored(position, name, *span) for name, span in frames.items()}

    def nbytes(self, rows: Sequence[int], spans_s: Spans | None) -> np.ndarray:
        at = np.asarray(rows, np.int64)
        if spans_s is None:
            return np.asarray(self.decoded_bytes[at])
        taken = np.array([np.inf if span is None else span[1] - span[0] for span in spans_s])
        return np.asarray(self.decoded_bytes[at] * np.minimum(1.0, taken / self.seconds[at]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_columns": {}}
