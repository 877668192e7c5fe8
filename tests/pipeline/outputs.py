"""Small real outputs for the tests of the output side: streams, rows, plans, whole datasets.

Values are seeded noise, different in every row, so that a swapped or shifted row changes a result.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.dataset.commit_record import plan_row_of
from earmill.pipeline.dataset.description import DatasetFile, open_dataset
from earmill.pipeline.dataset.publish import publish_shard
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import plan_path
from tests.s3_stand_in import s3_stand_in

PLAN_ID = "plan0"
SPEC_SHA256 = "ab" * 32
ATTRS = {"spec_sha256": SPEC_SHA256}
CALIBRATION = {"audio": {"calibration": {"db_full_scale": 100.0}}}
INFO = {"device": "cpu", "worker": "test", "timings_s": {"extract": 1.5}}
SPEC: dict[str, Any] = {
    "source": {"kind": "files", "uri": "corpus"},
    "output": {"formats": ["parquet", "zarr"], "dtype": "float16", "row_group_profile": "random"},
    "extract": [{"model": "dau1997"}],
}


def stream(
    name: str = "modulation", channels: Sequence[int] = (1, 3, 4), rate: float = 100.0
) -> StreamInfo:
    """A stream with so many columns in each channel."""
    offsets = tuple(int(offset) for offset in np.cumsum([0, *channels]))
    return StreamInfo(
        name=name,
        model="dau1997",
        unit="model units",
        width=offsets[-1],
        frame_rate_hz=rate,
        pool="mean",
        axes=("time", "channel_modulation"),
        channel_offsets=offsets,
        fc_hz=tuple(100.0 * (k + 1) for k in range(len(channels))),
        mfc_hz=tuple(2.5 * k for k in range(offsets[-1])),
    )


STREAMS = (stream(), stream("envelope", (1, 1), 50.0))


def make_row(
    row_id: str,
    n_frames: int = 30,
    *,
    streams: Sequence[StreamInfo] = STREAMS,
    dtype: str = "float16",
    plan_row_id: str | None = None,
    channel: int = -1,
    extra: Mapping[str, Any] | None = None,
) -> FeatureRow:
    """One row; its values follow from its id."""
    rng = np.random.default_rng(list(row_id.encode()))
    return FeatureRow(
        row_id=row_id,
        plan_row_id=plan_row_id or row_id,
        channel=channel,
        seconds=n_frames / 100.0,
        facts={
            "uri": f"corpus/{row_id}",
            "rate_hz": 16000,
            "pcm_sha256": "cd" * 32,
            "gain_db": 0.5,
        },
        extra=extra if extra is not None else {"speaker": f"s{len(row_id)}", "take": 3},
        streams={
            info.name: rng.normal(0, 50, (n_frames, info.width)).astype(dtype) for info in streams
        },
    )


def make_bad(row_id: str, error_class: str = "not_audio") -> QuarantineRow:
    """One quarantine row."""
    return QuarantineRow(row_id, f"corpus/{row_id}", "decode", error_class, "expected audio", 1)


def publish(
    layout: Layout,
    shard: str = "00000",
    attempt: str = "00000001",
    rows: Sequence[FeatureRow] = (),
    bad: Sequence[QuarantineRow] = (),
    **changes: Any,
) -> bool:
    """`publish_shard` with the constants of this module, and these rows as the plan."""
    good = [row.plan_row_id for row in rows]
    planned = good + [plan_row_of(row.row_id, good) for row in bad]
    settings: dict[str, Any] = {"plan_rows": list(dict.fromkeys(planned)), "info": INFO}
    about: dict[str, Any] = {
        name: changes.pop(name)
        for name in ("plan_id", "spec_sha256", "extra_types")
        if name in changes
    }
    output = {**SPEC["output"], "formats": ("zarr", "parquet")}
    output |= {name: changes.pop(name) for name in ("formats", "dtype") if name in changes}
    about["spec"] = {**SPEC, **CALIBRATION, "output": output}
    about["streams"] = tuple(info.to_dict() for info in changes.pop("streams", STREAMS))
    return publish_shard(
        layout,
        dataset_file(**about),
        shard_id=shard,
        attempt=attempt,
        rows=rows,
        bad=bad,
        **{**settings, **changes},
    )


def write_plan(layout: Layout, shards: Mapping[str, Sequence[str]]) -> None:
    """A stored plan, with the columns the output side looks at."""
    pairs = [(shard, row_id) for shard, row_ids in shards.items() for row_id in row_ids]
    table = pa.table({"shard": [p[0] for p in pairs], "row_id": [p[1] for p in pairs]})
    table = table.replace_schema_metadata({"version": "1"})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    layout.write_bytes(plan_path(PLAN_ID), sink.getvalue().to_pybytes())


def dataset_file(**changes: Any) -> DatasetFile:
    """A plausible dataset.json."""
    settings: dict[str, Any] = {
        "name": "speech",
        "spec": SPEC,
        "spec_sha256": SPEC_SHA256,
        "plan_id": PLAN_ID,
        "streams": tuple(info.to_dict() for info in STREAMS),
        "buffers_sha256": {"dau1997": "ef" * 32},
        "provenance": {"versions": {"earmill": "0.1.0"}, "git": {"commit": "1234", "dirty": False}},
        "created": "2026-01-02T03:04:05.000+00:00",
        "parquet_form": "binary",
    }
    return DatasetFile(**{**settings, **changes})


def spec_of_formats(*formats: str) -> dict[str, Any]:
    """SPEC with these formats alone."""
    return {**SPEC, "output": {**SPEC["output"], "formats": [*formats]}}


PLAN = {"00000": ["a.wav", "b.wav", "bad.wav"], "00001": ["c.flac"], "00002": ["mute.wav"]}


def small_dataset(uri: Any, storage_options: dict[str, Any] | None = None) -> Layout:
    """Three shards: two rows and a bad one, one row, and a shard where every row is bad.

    On a local disk it is a copy of a dataset that was written before.
    """
    if storage_options is not None or "://" in str(uri):
        return _write_small_dataset(str(uri), storage_options)
    shutil.copytree(_small_template(), uri, copy_function=shutil.copyfile, dirs_exist_ok=True)
    return Layout.open(str(uri))


@functools.cache
def _small_template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="earmill-small-dataset-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _write_small_dataset(str(folder), None)
    return folder


def _write_small_dataset(uri: str, storage_options: dict[str, Any] | None) -> Layout:
    layout = Layout.open(uri, storage_options)
    write_plan(layout, PLAN)
    open_dataset(layout, dataset_file())
    rows = {
        "00000": ([make_row("a.wav"), make_row("b.wav", 7)], [make_bad("bad.wav")]),
        "00001": ([make_row("c.flac", 120)], []),
        "00002": ([], [make_bad("mute.wav", "zero_length")]),
    }
    for number, (shard, (good, bad)) in enumerate(rows.items()):
        assert publish(layout, shard, f"{number:08x}", good, bad, plan_rows=PLAN[shard])
    return layout


def contents(layout: Layout, folder: str) -> dict[str, bytes]:
    """Every file below a folder with its bytes."""
    return {name: layout.read_bytes(name) for name in layout.list(folder)}


@contextmanager
def s3_server(bucket: str = "out") -> Iterator[dict[str, Any]]:
    """A real S3 server on loopback with one empty bucket; yields fsspec storage options.

    Each filesystem without fsspec's cache of instances would build a session, in half a second.
    """
    with s3_stand_in() as address:
        options = {"key": "user-key", "secret": "user-secret", "endpoint_url": address}
        fs = fsspec.filesystem("s3", **options)
        fs.mkdir(bucket)
        yield options
        fs.invalidate_cache()
        fs.rm(bucket, recursive=True)  # all servers of one process share their buckets
        type(fs).clear_instance_cache()  # another server may have the same port


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A real filesystem of so many bytes at `folder`; skips where mounting is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs the mount command")
    if done.returncode:
        pytest.skip(f"needs the right to mount a small filesystem: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def grow_disk(folder: Path, size: str) -> None:
    """Give a `small_disk` more room."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)
