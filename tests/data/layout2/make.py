"""How `dataset/` was made: by the last release that wrote layout version 2 (commit db1605b).

    python -m tests.data.layout2.make FOLDER

Kept to show what is in it, not to be run again: a newer release writes a newer version. Two shards,
both formats, a stream of frames and one of events, whose values `frames` and `events` give. Sizes
are scaled down, so that chunks, objects and row groups are several and one row is divided.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from amtcore.features.spike_events import SpikeEvents
from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.dataset.description import DatasetFile, open_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.publish import publish_shard
from earmill.pipeline.formats.parquet import format as parquet_write
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow
from earmill.pipeline.formats.zarr import write as zarr_write
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.sources.base import Columns, Item
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout

FRAME_HZ, STEP_HZ, N_NEURONS = 100.0, 200.0, 2
SHARED = {
    "model": "dau1997",
    "pool": "mean",
    "channel_offsets": (0, 1, 3),
    "fc_hz": (100.0, 200.0),
}
FRAMES = StreamInfo(
    name="modulation",
    unit="model units",
    width=3,
    frame_rate_hz=FRAME_HZ,
    axes=("time", "channel_modulation"),
    mfc_hz=(0.0, 0.0, 5.0),
    **SHARED,
)
SPIKES = StreamInfo(
    name="spikes",
    unit="spikes",
    width=N_NEURONS,
    frame_rate_hz=STEP_HZ,
    axes=("time", "channel"),
    mfc_hz=(),
    layout="events",
    **SHARED | {"channel_offsets": (0, 1, 2)},
)
STREAMS = (FRAMES, SPIKES)
NAMES = ("a.wav", "b.wav", "bad.wav", "long.wav", "c.wav")
SECONDS = {"a.wav": 0.04, "b.wav": 0.2, "long.wav": 0.9, "c.wav": 0.01}
SPEC = JobSpec.load(
    {
        "source": {"kind": "files", "uri": "corpus"},
        "extract": [{"model": "dau1997"}],
        "output": {"uri": "out", "formats": ["parquet", "zarr"], "shard_rows": 4},
    }
)


class Corpus:
    """The source whose listing became the plan."""

    def columns(self) -> Columns:
        """None are known before the items."""
        return Columns()

    def skipped(self) -> dict[str, int]:
        """Nothing was left out."""
        return {}

    def items(self) -> list[Item]:
        return [
            Item(name, f"corpus/{name}", size=100, mtime=1.0, extra={"take": i}, position=i)
            for i, name in enumerate(NAMES)
        ]


def frames(name: str) -> np.ndarray:
    """What the modulation stream of a row holds: 100 row + 10 frame + column."""
    rows, columns = np.arange(round(SECONDS[name] * FRAME_HZ))[:, None], np.arange(3)
    return (100 * NAMES.index(name) + 10 * rows + columns).astype("float16")


def counts(name: str) -> np.ndarray:
    """The spikes of a row, (step, neuron): none, one or two, by a rule."""
    steps = np.arange(round(SECONDS[name] * STEP_HZ))[:, None]
    return ((steps + NAMES.index(name) + np.arange(N_NEURONS)) % 3).astype("int32")


def good(name: str) -> FeatureRow:
    number, spikes = NAMES.index(name), counts(name)
    facts = {"uri": f"corpus/{name}", "rate_hz": 16000.0, "pcm_sha256": f"{number:064x}"}
    streams = {"modulation": frames(name), "spikes": SpikeEvents.from_dense(spikes).to_columns()}
    extra, steps = {"take": number}, {"spikes": len(spikes)}
    return FeatureRow(name, name, -1, SECONDS[name], facts, extra, streams, steps)


def scale_down() -> None:
    """Chunks of 128 bytes, three of them in an object, row groups and rows of half a kilobyte."""
    zarr_write.CHUNK_BYTES, zarr_write.CHUNKS_PER_OBJECT = 128, 3
    parquet_write.ROW_GROUP_BYTES["random"] = (256, 512)
    parquet_write.LIMIT_BYTES, parquet_write.PART_BYTES = 512, 256


def main(folder: Path) -> None:
    scale_down()
    layout = Layout.open("memory://layout2")  # a card names its place, and no machine has this one
    plan = make_plan(Corpus(), SPEC)
    plan.write(layout)
    open_dataset(
        layout,
        DatasetFile(
            name="layout2",
            spec=SPEC.canonical(),
            spec_sha256=SPEC.sha256(),
            plan_id=plan.plan_id,
            streams=tuple(info.to_dict() for info in STREAMS),
            buffers_sha256={"dau1997": "ef" * 32},
            provenance={"versions": {"earmill": "0.1.0"}},
            created="2026-01-02T03:04:05+00:00",
            extra_types={"take": "int64"},
        ),
    )
    for number, shard in enumerate(plan.shards):
        names = [item.row_id for item in shard.items]
        publish_shard(
            layout,
            shard_id=shard.shard_id,
            attempt=f"{number + 0xA0:08x}",
            plan_id=plan.plan_id,
            rows=[good(name) for name in names if name in SECONDS],
            bad=[
                QuarantineRow(name, f"corpus/{name}", "decode", "not_audio", "expected audio", 1)
                for name in names
                if name not in SECONDS
            ],
            streams=[*STREAMS],
            formats=("parquet", "zarr"),
            attrs={"spec_sha256": SPEC.sha256()},
            info={"device": "cpu"},
            plan_rows=names,
            extra_types={"take": "int64"},
        )
    finalise(layout)
    for name in layout.everything():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(layout.read_bytes(name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
