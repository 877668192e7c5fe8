"""How `dataset/` was made: by the last release that wrote layout version 1 (commit 87cced9).

    python -m tests.data.layout1.make FOLDER

Kept to show what is in it, not to be run again: a newer release writes a newer version. Two shards,
both formats, one stream of three columns; value[frame, column] = 100 row + 10 frame + column.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.dataset.description import DatasetFile, open_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.publish import publish_shard
from earmill.pipeline.formats.rows import FeatureRow, QuarantineRow
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.sources.base import Item
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout

STREAM = StreamInfo(
    name="modulation",
    model="dau1997",
    unit="model units",
    width=3,
    frame_rate_hz=100.0,
    pool="mean",
    axes=("time", "channel_modulation"),
    channel_offsets=(0, 1, 3),
    fc_hz=(100.0, 200.0),
    mfc_hz=(0.0, 0.0, 5.0),
)
NAMES = ("a.wav", "b.wav", "bad.wav", "c.wav")
N_FRAMES = {"a.wav": 4, "b.wav": 1, "c.wav": 2}
SPEC = JobSpec.load(
    {
        "source": {"kind": "files", "uri": "corpus"},
        "extract": [{"model": "dau1997"}],
        "output": {"uri": "out", "formats": ["parquet", "zarr"], "shard_rows": 3},
    }
)


class Corpus:
    """The source whose listing became the plan."""

    def items(self) -> list[Item]:
        return [
            Item(name, f"corpus/{name}", size=100, mtime=1.0, extra={"take": i}, position=i)
            for i, name in enumerate(NAMES)
        ]


def values(row: int, n_frames: int) -> np.ndarray:
    """What the stream of a row holds."""
    frames, columns = np.arange(n_frames)[:, None], np.arange(3)
    return (100 * row + 10 * frames + columns).astype("float16")


def good(name: str) -> FeatureRow:
    number, n_frames = NAMES.index(name), N_FRAMES[name]
    facts = {"uri": f"corpus/{name}", "rate_hz": 16000.0, "pcm_sha256": f"{number:064x}"}
    streams = {"modulation": values(number, n_frames)}
    return FeatureRow(name, name, -1, n_frames / 100, facts, {"take": number}, streams)


def main(folder: Path) -> None:
    layout = Layout.open("memory://layout1")  # a card names its place, and no machine has this one
    plan = make_plan(Corpus(), SPEC)
    plan.write(layout)
    open_dataset(
        layout,
        DatasetFile(
            name="layout1",
            spec=SPEC.canonical(),
            spec_sha256=SPEC.sha256(),
            plan_id=plan.plan_id,
            streams=(STREAM.to_dict(),),
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
            rows=[good(name) for name in names if name in N_FRAMES],
            bad=[
                QuarantineRow(name, f"corpus/{name}", "decode", "not_audio", "expected audio", 1)
                for name in names
                if name not in N_FRAMES
            ],
            streams=[STREAM],
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
