"""Real feature sets for the reader's tests: written by the sinks, committed by publish_shard.

Every value says where it belongs, so a test can tell a wrong frame or row without a stored copy:
value[frame, column] = (17 row + 3 frame + column) mod 1021, exact in float16.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import earmill.pipeline.formats.parquet.format as parquet_sink
import earmill.pipeline.formats.zarr.write as zarr_sink
from amtcore.features.stream_info import StreamInfo
from earmill import Batch, Row
from earmill.pipeline.dataset.description import DatasetFile, open_dataset
from earmill.pipeline.dataset.publish import publish_shard
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow
from earmill.pipeline.reader.read_ahead import ReadAhead
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import plan_path
from tests.waiting import nothing_is_left

PLAN_ID = "0123abcd"
MODULATION_HZ, LOUDNESS_HZ = 100.0, 50.0
N_ROWS = 20
LOADED_ROWS = 26
ROWS_PER_GROUP = 4
GROUPED_ROWS = 160
# Beside its numbers a decoded column of n cells of Parquet has n + 1 places, int64.
PAGE_BYTES, CELL_BYTES = 8, 8
FORMATS = ("zarr", "parquet", None)

# Python 3.12 warns about forking a process with threads; readers open anew in the child.
forks = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def stream(name: str, channel_sizes: Sequence[int], frame_rate_hz: float) -> StreamInfo:
    """A stream whose channels have the given numbers of columns."""
    offsets = tuple(np.cumsum([0, *channel_sizes]).tolist())
    return StreamInfo(
        name=name,
        model="dau1997",
        unit="model units",
        width=offsets[-1],
        frame_rate_hz=frame_rate_hz,
        pool="mean",
        axes=("time", "channel_modulation"),
        channel_offsets=offsets,
        fc_hz=tuple(100.0 * (i + 1) for i in range(len(channel_sizes))),
        mfc_hz=tuple(float(i) for i in range(offsets[-1])),
    )


STREAMS = (
    stream("modulation", (1, 3, 3), MODULATION_HZ),
    stream("loudness", (1,), LOUDNESS_HZ),
)


def values(row: int, n_frames: int, width: int, dtype: str = "float16") -> np.ndarray:
    """What a stream of a row holds."""
    frames, columns = np.arange(n_frames)[:, None], np.arange(width)
    return ((17 * row + 3 * frames + columns) % 1021).astype(dtype)


def make_row(
    row: int, seconds: float, streams: Sequence[StreamInfo] = STREAMS, dtype: str = "float16"
) -> FeatureRow:
    """Row number `row` of a set."""
    row_id = f"speaker {row % 3}/clip_{row:04d}.wav"
    return FeatureRow(
        row_id=row_id,
        plan_row_id=row_id,
        channel=-1,
        seconds=seconds,
        facts={
            "uri": f"corpus/{row_id}",
            "rate_hz": 16000.0,
            "pcm_sha256": f"{row:064x}",
            "gain_db": -float(row),
            "calibration": "rms1_db_spl=100",
        },
        extra={"label": row % 5, "text": f"utterance {row}" if row % 4 else None},
        streams={
            info.name: values(row, int(seconds * info.frame_rate_hz + 1e-6), info.width, dtype)
            for info in streams
        },
    )


def mixed_seconds(row: int) -> float:
    """Lengths from 0.02 s up, no two neighbours alike."""
    return 0.02 + 0.13 * (row * 7 % 11)


def job_spec(formats: Sequence[str], dtype: str, profile: str = "random") -> JobSpec:
    """A valid spec with these output settings."""
    output = {"formats": list(formats), "dtype": dtype, "row_group_profile": profile}
    return JobSpec.load(
        {
            "source": {"kind": "files", "uri": "corpus"},
            "extract": [{"model": "dau1997"}],
            "output": {"uri": "out", **output},
        }
    )


class Writer:
    """Begins a feature set at `uri`; `shard` publishes into it.

    Args:
        uri: Local path or fsspec URI.
    """

    def __init__(
        self,
        uri: Any,
        *,
        formats: Sequence[str] = ("parquet", "zarr"),
        dtype: str = "float16",
        parquet_form: str = "binary",
        streams: Sequence[StreamInfo] = STREAMS,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self.layout = Layout.open(str(uri), storage_options)
        self.dtype, self.streams = dtype, streams
        self.spec = job_spec(formats, dtype)
        self.planned: list[tuple[str, str]] = []
        self.dataset = DatasetFile(
            name="job",
            spec=self.spec.canonical(),
            spec_sha256=self.spec.sha256(),
            plan_id=PLAN_ID,
            streams=tuple(info.to_dict() for info in streams),
            buffers_sha256={"dau1997": "0" * 64},
            provenance={},
            created="2025-01-01T00:00:00Z",
            parquet_form=parquet_form,
        )
        open_dataset(self.layout, self.dataset)

    def shard(
        self,
        number: int,
        rows: Sequence[FeatureRow],
        bad: Sequence[str] = (),
        spec_sha256: str | None = None,
    ) -> None:
        """Publish one shard."""
        shard_id = f"{number:05d}"
        plan_rows = [row.plan_row_id for row in rows] + list(bad)
        self.planned += [(shard_id, row_id) for row_id in plan_rows]
        won = publish_shard(
            self.layout,
            replace(self.dataset, spec_sha256=spec_sha256 or self.spec.sha256()),
            shard_id=shard_id,
            attempt=f"{number:08x}",
            rows=rows,
            bad=[QuarantineRow(i, i, "decode", "not_audio", "no", 1) for i in bad],
            info={},
            plan_rows=plan_rows,
        )
        if not won:
            raise ValueError(f"shard {shard_id} exists already")

    def finalise(self) -> None:
        """Store the plan and close the set."""
        from earmill.pipeline.dataset.finalise import finalise

        shards, row_ids = zip(*self.planned, strict=True)
        sink = pa.BufferOutputStream()
        table = pa.table({"shard": shards, "row_id": row_ids})
        pq.write_table(table.replace_schema_metadata({"version": "1"}), sink)
        self.layout.put_if_absent(plan_path(PLAN_ID), sink.getvalue().to_pybytes())
        finalise(self.layout)


def write_set(
    uri: Any,
    *,
    n_rows: int = N_ROWS,
    rows_per_shard: int = 6,
    seconds: Callable[[int], float] = mixed_seconds,
    finalised: bool = False,
    **options: Any,
) -> Writer:
    """A set of `n_rows` rows; the second shard also has a quarantined row."""
    writer = Writer(uri, **options)
    rows = [make_row(i, seconds(i), writer.streams, writer.dtype) for i in range(n_rows)]
    for number, first in enumerate(range(0, n_rows, rows_per_shard)):
        bad = ["broken.wav"] if number == 1 else []
        writer.shard(number, rows[first : first + rows_per_shard], bad)
    if finalised:
        writer.finalise()
    return writer


def chunked_seconds(row: int) -> float:
    """1 to 9.5 s."""
    return 1.0 + 1.7 * row


def write_chunked(uri: Any) -> None:
    """Rows of `chunked_seconds` over many small chunks, objects and row groups (scaled down)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_sink, "CHUNK_BYTES", 512)
        patch.setattr(zarr_sink, "CHUNKS_PER_OBJECT", 3)
        patch.setitem(parquet_sink.ROW_GROUP_BYTES, "random", (4096, 8192))
        write_set(uri, n_rows=6, rows_per_shard=3, seconds=chunked_seconds)


def in_memory(folder: Path, name: str) -> str:
    """Copy a set into fsspec's memory, which is read as a remote store; return the copy's URI."""
    memory = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"/{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return f"memory://{name}"


def n_frames(row: int, rate_hz: float) -> int:
    """Frames of row `row` of a set with `mixed_seconds`."""
    return int(mixed_seconds(row) * rate_hz + 1e-6)


def check_row(row: Row, number: int, dtype: str = "float32") -> None:
    """Row `number` of the set that `write_set` writes, every value of it."""
    wanted = make_row(number, mixed_seconds(number))
    assert row.row_id == wanted.row_id
    assert row.seconds == wanted.seconds
    assert row.extra == wanted.extra
    for info in STREAMS:
        got = row.features[info.name]
        assert got.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(got, wanted.streams[info.name])


@contextmanager
def small_row_groups() -> Iterator[None]:
    """Parquet row groups of 4 rows of 0.5 s."""
    row_bytes = 2 * sum(int(0.5 * info.frame_rate_hz) * info.width for info in STREAMS)
    limits = (ROWS_PER_GROUP * row_bytes, ROWS_PER_GROUP * row_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(parquet_sink.ROW_GROUP_BYTES, "random", limits)
        yield


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    """Workers end with the loader that started them."""
    before = set(multiprocessing.active_children())
    yield
    nothing_is_left(lambda: {*multiprocessing.active_children()} - before)


@pytest.fixture
def no_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are read by whoever needs them: how many does not hang on when threads run."""
    monkeypatch.setattr(ReadAhead, "want", lambda *_: None)


def ids(rows: Any) -> list[int]:
    """Positions of rows, or of the rows of batches, in the order they come."""
    found: list[int] = []
    for item in rows:
        found += item.indices.tolist() if isinstance(item, Batch) else [item.index]
    return found


def loaded(loader: Any) -> list[list[int]]:
    """Positions of the rows of each batch."""
    return [batch.indices.tolist() for batch in loader]


def finish(features: Any) -> None:
    """Wait until nothing is under way."""
    ahead = features._process.ahead
    while ahead._plans or features._process.cache._loading:
        Event().wait(0.001)
