"""Feature sets to store and read: Dau1997 features of generated speech and music, without a job.

Clips are cut from a few sounds, each at its own level, so that an hour takes a minute to make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from amtcore.features.registry import build_extractor
from amtcore.features.stream_info import StreamInfo
from earmill.jobs.demo_audio import music, speech
from earmill.pipeline.dataset.description import DatasetFile, open_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.publish import publish_shard
from earmill.pipeline.formats.format import stored_streams
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.values import Caster
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import plan_path

FS_HZ = 16000
SOUNDS, SOUND_S = 16, 20.0
SHORTEST_S, LONGEST_S = 3, 17
SHARD_S, PLAN_ID = 600.0, "0123abcd"
FORMATS = ("parquet", "zarr")
STREAMS = ("modulation", "adaptation", "envelope", "spikes")


def sounds(fs_hz: int, count: int) -> list[np.ndarray]:
    """Return speech, and music every fourth time, at 74 dB SPL if an RMS of 1 is 100 dB SPL."""
    made = []
    for number in range(count):
        wave = (music if number % 4 == 3 else speech)(np.random.default_rng(number), fs_hz, SOUND_S)
        made.append((0.05 * wave / np.sqrt(np.mean(wave**2))).astype(np.float32))
    return made


def features(hours: float, names: Iterable[str]) -> tuple[list[StreamInfo], Iterator[FeatureRow]]:
    """Return streams of Dau1997 as stored in float16, and their rows."""
    extractor = build_extractor("dau1997", fs_hz=FS_HZ, streams={name: {} for name in names})
    streams = stored_streams(extractor.streams, "float16", FORMATS)
    made = extractor.extract(sounds(FS_HZ, SOUNDS))
    return streams, _rows(streams, made, Caster("float16", streams), 3600 * hours)


def hour() -> tuple[list[StreamInfo], Iterator[FeatureRow]]:
    """Return an hour of all streams."""
    return features(1.0, STREAMS)


def _rows(streams, made, cast, wanted_s) -> Iterator[FeatureRow]:
    rng, number, total_s = np.random.default_rng(1), 0, 0.0
    while total_s < wanted_s:
        seconds = float(rng.integers(SHORTEST_S, LONGEST_S + 1))
        begin_s = float(rng.integers(0, int(SOUND_S - seconds) + 1))
        level, values, steps = rng.uniform(0.5, 1.5), {}, {}
        for info in streams:
            whole = made[number % len(made)][info.name]
            first, count = (int(x * info.frame_rate_hz) for x in (begin_s, seconds))
            if info.layout == "events":
                table = whole.to_columns()
                table = table[(table[:, 0] >= first) & (table[:, 0] < first + count)]
                values[info.name], steps[info.name] = table - [first, 0, 0], count
                values[info.name] = values[info.name].astype(np.int32)
            else:
                frames = (whole[first : first + count] * level).astype(np.float32)
                values[info.name] = cast(info.name, frames)[0]
        name = f"clip_{number:05d}.wav"
        facts = {"uri": f"corpus/{name}", "rate_hz": float(FS_HZ)}
        yield FeatureRow(name, name, -1, seconds, facts, {"label": number % 5}, values, steps)
        number, total_s = number + 1, total_s + seconds


def write_set(
    place: Path,
    streams: Sequence[StreamInfo],
    rows: Iterable[FeatureRow],
    formats: Sequence[str] = FORMATS,
) -> None:
    """Write a closed feature set, ten minutes a shard."""
    names = {info.name: {} for info in streams}
    spec = JobSpec.load(
        {
            "source": {"kind": "files", "uri": "corpus"},
            "extract": [{"model": "dau1997", "fs_hz": FS_HZ, "streams": names}],
            "output": {"uri": str(place), "formats": list(formats)},
        }
    )
    layout = Layout.open(str(place))
    dataset = DatasetFile(
        name="benchmark",
        spec=spec.canonical(),
        spec_sha256=spec.sha256(),
        plan_id=PLAN_ID,
        streams=tuple(info.to_dict() for info in streams),
        buffers_sha256={"dau1997": "0" * 64},
        provenance={},
        created="2025-01-01T00:00:00Z",
        parquet_form="binary",
    )
    open_dataset(layout, dataset)
    planned: list[tuple[str, str]] = []
    for shard, chosen in _shards(rows):
        publish_shard(
            layout,
            dataset,
            shard_id=shard,
            attempt=f"{int(shard):08x}",
            rows=chosen,
            bad=[],
            info={},
            plan_rows=[row.plan_row_id for row in chosen],
        )
        planned += [(shard, row.plan_row_id) for row in chosen]
    _close(layout, planned)


def _shards(rows: Iterable[FeatureRow]) -> Iterator[tuple[str, list[FeatureRow]]]:
    """Yield rows by shard, one shard in memory at a time."""
    end_s = 0.0

    def shard_of(row: FeatureRow) -> str:
        nonlocal end_s
        end_s += row.seconds
        return f"{int((end_s - 1e-6) // SHARD_S):05d}"

    for shard, chosen in groupby(rows, shard_of):
        yield shard, list(chosen)


def _close(layout: Layout, planned: Sequence[tuple[str, str]]) -> None:
    """Store a plan of these rows and the index."""
    names, row_ids = zip(*planned, strict=True)
    plan = pa.table({"shard": names, "row_id": row_ids}).replace_schema_metadata({"version": "1"})
    sink = pa.BufferOutputStream()
    pq.write_table(plan, sink)
    layout.put_if_absent(plan_path(PLAN_ID), sink.getvalue().to_pybytes())
    finalise(layout)
