"""Which rows a dataset has and which files hold them, for the reader.

Truth is what commits name. After finalise current.json names the index and the commits it was made
of; a shard's record is fetched when the shard is first needed, and refused if it is of another
attempt than the index; before finalise, every commit and its table of rows is read, so a running
job can be looked at. Either way the rows come out in one order: by shard, then position in it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from earmill.pipeline.common.errors import CLOSE_AGAIN, CommitError, SourceError
from earmill.pipeline.dataset.commit_record import (
    CommitRecord,
    bad_rows,
    commits,
    read_commit,
    reading_pool,
)
from earmill.pipeline.dataset.description import DatasetFile, datasets_below, read_description
from earmill.pipeline.dataset.history import Which, find_snapshot
from earmill.pipeline.dataset.snapshot import (
    CommitRef,
    name_of,
    read_checked,
    read_current,
    read_snapshot,
)
from earmill.pipeline.formats.format import RowsSaid, named_damage
from earmill.pipeline.formats.moments import StoredMoments, dataset_moments
from earmill.pipeline.formats.parquet.write import row_groups
from earmill.pipeline.formats.registry import chosen
from earmill.pipeline.formats.row_table import (
    quarantine_table,
)
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.reader.index_rows import check_rows, good_rows, shown_columns
from earmill.pipeline.reader.shard_paths import ShardPaths, paths_of
from earmill.pipeline.storage.documents import read_table, table_of
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import (
    DATASET_FILE,
    commit_path,
    parse_revision_path,
)

if TYPE_CHECKING:
    from amtcore.features.stream_info import StreamInfo

DTYPES, STORED = ("float16", "float32", "float64"), "stored"


@dataclass(frozen=True)
class Catalog:
    """Everything about a dataset but its features.

    Args:
        dataset: The content of dataset.json.
        streams: Every stream, by name.
        formats: In which features are stored.
        dtype: Of the stored frames, as the job has it; events are int32.
        table: One line a good row: identity, seconds, shard, row, `<stream>_start` and
            `<stream>_n_frames` (for events and int8 also `<stream>_n_steps`), carried-through
            columns as `extra_<name>`.
        paths: Known shards; after finalise it fills up as shards are opened.
        refs: The commits that the index was made of, where the dataset names them.
        records: Of shards that are likely read first, fetched beside the index.
        moments: Statistics of the streams of frames, where all commits have them.
        additions: Sets of features beside these rows, see `dataset.snapshot`.
    """

    dataset: DatasetFile
    streams: Mapping[str, StreamInfo]
    formats: tuple[str, ...]
    dtype: str
    table: pa.Table
    paths: dict[str, ShardPaths] = field(default_factory=dict)
    refs: Mapping[str, CommitRef] = field(default_factory=dict)
    records: Mapping[str, CommitRecord] = field(default_factory=dict)
    moments: Mapping[str, StoredMoments] = field(default_factory=dict)
    additions: Mapping[str, OutFile] = field(default_factory=dict)

    def shard_paths(self, layout: Layout, shard: str) -> ShardPaths:
        """The files of a shard, from its commit record.

        Raises:
            CommitError: The record is gone, is of another attempt than the index, or belongs to
                another spec.
        """
        if shard not in self.paths:
            ref = self.refs.get(shard)
            generation = ref.generation if ref else 0
            name = commit_path(shard, generation)
            record = self.records.get(shard) or read_commit(layout, shard, generation)
            if record is None:
                raise CommitError(
                    f"{layout.url(name)} is missing although the index names shard {shard}; run "
                    "`earmill verify`"
                )
            if ref is not None and record.attempt != ref.attempt:
                raise CommitError(
                    f"{layout.url(name)}: expected attempt {ref.attempt} as in the index, got "
                    f"{record.attempt}: the shard was committed anew after the index was made; "
                    f"{CLOSE_AGAIN}"
                )
            check_spec(layout, record, self.dataset.spec_sha256)
            found = paths_of(layout, record, self.streams, self.dtype)
            said = RowsSaid(self.table, *self._rows_at[shard])
            promises = {k: replace(each, said=said) for k, each in found.promises.items()}
            self.paths[shard] = replace(found, promises=promises)
        return self.paths[shard]

    @cached_property
    def _rows_at(self) -> dict[str, tuple[int, int]]:
        """The first row of each shard in the table, and how many."""
        names, counts = self.shards
        firsts = np.cumsum(counts) - counts
        return dict(zip(names, zip(firsts.tolist(), counts.tolist(), strict=True), strict=True))

    def column(self, name: str) -> np.ndarray:
        """A numeric column as an array."""
        return np.asarray(self.table.column(name).to_numpy())

    @cached_property
    def shards(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Shard ids in order, and how many good rows each has."""
        counted = self.table.column("shard").value_counts()
        return tuple(counted.field("values").to_pylist()), counted.field("counts").to_numpy()

    @cached_property
    def row_bytes(self) -> np.ndarray:
        """Stored size of each row over all streams, uncompressed."""
        size = np.zeros(len(self.table), np.int64)
        for name, stream in self.streams.items():
            size += self.column(f"{name}_n_frames") * layout_of(stream).row_bytes(self.dtype)
        return size

    @cached_property
    def block_rows(self) -> np.ndarray:
        """Rows per row group, in table order; the rule of the Parquet sink, for any format.

        Taken over all streams, so that neither a selection of streams nor the format that is read
        changes the shuffle order.
        """
        profile = self.dataset.spec["output"]["row_group_profile"]
        blocks, start = [], 0
        for n_rows in self.shards[1].tolist():
            sizes = self.row_bytes[start : start + n_rows].tolist()
            blocks += [stop - first for first, stop in row_groups(sizes, profile)]
            start += n_rows
        return np.array(blocks, np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal rows in equal shards under one spec: positions then mean the same."""
        digest = hashlib.sha256(json.dumps([self.dataset.spec_sha256, self.shards[0]]).encode())
        for values in (self.shards[1], *(self.column(f"{name}_n_frames") for name in self.streams)):
            digest.update(values.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def id_order(self) -> np.ndarray:
        """Row positions sorted by row id; UTF-8 order is Python's string order."""
        return np.asarray(pc.sort_indices(self.table.column("row_id")))

    def choose_format(self, wanted: str | None) -> str:
        """The wanted format, checked; None takes one that reads parts of rows where there is one.

        Zarr fetches chunks of 1 MB where Parquet fetches row groups of 2 to 128 MB, and decodes
        float16 twice as fast; Parquet needs fewer requests when whole row groups are wanted.

        Raises:
            ExtensionError: The format is not installed here, or none of the set's is.
        """
        writers = self.dataset.provenance.get("extensions", {}).get("formats", {})
        return chosen(self.formats, wanted, writers)

    def choose_streams(self, wanted: Sequence[str] | None) -> tuple[str, ...]:
        """The wanted streams, checked; None takes all."""
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

    def choose_dtypes(
        self, wanted: Mapping[str, np.dtype] | str | None, streams: Sequence[str]
    ) -> dict[str, np.dtype]:
        """Check the wanted dtype, and return the dtype of each stream's frames."""
        if isinstance(wanted, Mapping):
            return {name: wanted.get(name, np.dtype(np.float32)) for name in streams}
        if wanted == STORED:
            layouts = {name: layout_of(self.streams[name]) for name in streams}
            return {k: np.dtype(each.exact_dtype(self.dtype)) for k, each in layouts.items()}
        dtype = _dtype_of("float32" if wanted is None else wanted)
        if dtype is None or dtype.name not in DTYPES:
            raise ValueError(
                f"dtype is one of {[*DTYPES, STORED]}, got {wanted!r}; for bfloat16, which numpy "
                "does not have, convert batches: batch.to(torch.bfloat16)"
            )
        return dict.fromkeys(streams, dtype)


def _dtype_of(wanted: object) -> np.dtype | None:
    """Return the numpy dtype of a numpy or torch dtype or name; None for anything else."""
    for name in (wanted, str(wanted).removeprefix("torch.")):
        try:
            return np.dtype(name)  # type: ignore[call-overload,no-any-return]
        except TypeError:
            continue
    return None


def load_catalog(layout: Layout, which: Which | None = None) -> Catalog:
    """Read a dataset's catalog, from its index or else its commits.

    Args:
        which: A snapshot, as of `find_snapshot`; None takes the one that counts.
    Raises:
        SourceError: No dataset here, or nothing committed yet.
        OutputError: dataset.json is damaged or of another layout version.
        CommitError: Shards of different specs, or an index or table of rows that is damaged.
    """
    named = read_current(layout) if which is None else find_snapshot(layout, which)
    snapshot = None if named is None else read_snapshot(layout, named)
    # Side by side: in a bucket each is a round trip.
    with ThreadPoolExecutor(2) as pool:
        index = None if snapshot is None else pool.submit(read_checked, layout, snapshot.index)
        first = pool.submit(_first_record, layout, {} if snapshot is None else snapshot.commits)
        dataset = _dataset(layout, DATASET_FILE if snapshot is None else snapshot.dataset.path)
    streams = _streams(dataset)
    content = _only_index(layout, dataset.layout_version) if index is None else index.result()
    table = None
    if content is not None:
        with named_damage(layout.url(), "the index"):
            table = good_rows(table_of(content), streams)
    del index, content
    moments = {} if snapshot is None else snapshot.moments
    paths: dict[str, ShardPaths] = {}
    if table is None:
        records = commits(layout)
        for record in records.values():
            check_spec(layout, record, dataset.spec_sha256)
        dtype = dataset.spec["output"]["dtype"]
        paths = {k: paths_of(layout, record, streams, dtype) for k, record in records.items()}
        table = _rows_of(layout, paths, streams)
        ordered = [record.moments for _, record in sorted(records.items())]
        moments = dataset_moments(ordered, dataset.streams)
    check_rows(layout, table, streams)
    output = dataset.spec["output"]
    return Catalog(
        dataset=dataset,
        streams=streams,
        formats=tuple(output["formats"]),
        dtype=output["dtype"],
        table=table.combine_chunks(),
        paths=paths,
        refs={} if snapshot is None else snapshot.commits,
        records=first.result(),
        moments=moments,
        additions={} if snapshot is None else snapshot.additions,
    )


def _first_record(layout: Layout, refs: Mapping[str, CommitRef]) -> dict[str, CommitRecord]:
    """The record of the first shard, where fetching it later is a round trip more: most read it. If
    it cannot be read now, whoever needs it says why."""
    if layout.is_local or not refs:
        return {}
    shard = min(refs)
    with suppress(Exception):
        record = read_commit(layout, shard, refs[shard].generation)
        return {} if record is None else {shard: record}
    return {}


def check_spec(layout: Layout, record: CommitRecord, spec_sha256: str) -> None:
    """Refuse a shard that was made under another spec than the dataset's."""
    if record.spec_sha256 != spec_sha256:
        raise CommitError(
            f"{layout.url(commit_path(record.shard))}: expected spec {spec_sha256[:12]} as in "
            f"{DATASET_FILE}, got {str(record.spec_sha256)[:12]}; features of two specs cannot be "
            "read as one dataset, write each to its own output"
        )


def read_quarantine(layout: Layout, catalog: Catalog) -> pa.Table:
    """The quarantined rows of a dataset, in the order of its shards."""
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


def _dataset(layout: Layout, rel: str) -> DatasetFile:
    if rel != DATASET_FILE and parse_revision_path(rel) is None:
        raise CommitError(f"{layout.url()}: a snapshot names {rel!r} as its description; verify it")
    dataset = read_description(layout, rel)
    if dataset is None:
        raise SourceError(
            f"expected a feature set with a {DATASET_FILE}, found none at {layout.url()}; "
            "check the address (it is the job's output.uri) and the credentials"
            f"{datasets_below(layout)}"
        )
    return dataset


def _streams(dataset: DatasetFile) -> dict[str, StreamInfo]:
    from amtcore.features.stream_info import StreamInfo

    return {info["name"]: StreamInfo.from_dict(info) for info in dataset.streams}


def _rows_of(
    layout: Layout, paths: Mapping[str, ShardPaths], streams: Mapping[str, StreamInfo]
) -> pa.Table:
    """The good rows of all committed shards, their tables read side by side."""

    def of_shard(shard: str) -> pa.Table:
        with named_damage(layout.url(), f"the table of rows of shard {shard}"):
            table = read_table(layout, paths[shard].rows)
            names = pa.array([shard] * table.num_rows, pa.string())
            rows = pa.array(np.arange(table.num_rows))
            return shown_columns(
                table.append_column("shard", names).append_column("row", rows), streams
            )

    if not paths:
        raise SourceError(
            f"{layout.url()}: no shard is committed yet; wait for the first one or run the job"
        )
    with reading_pool(layout, len(paths)) as pool:
        return pa.concat_tables(pool.map(of_shard, sorted(paths)), promote_options="permissive")


def _only_index(layout: Layout, version: int) -> bytes | None:
    """The index of a dataset without snapshots; None before finalise.

    Of several indexes of layout version 1 nothing says which one counts: the commits are asked.
    """
    found = layout.list("index") if version == 1 else []
    if len(found) != 1:
        return None
    content = layout.read_bytes(found[0])
    if name_of(content) != Path(found[0]).stem:
        raise CommitError(
            f"{layout.url(found[0])} does not hash to its own name: it is damaged; {CLOSE_AGAIN}"
        )
    return content
