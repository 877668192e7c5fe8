"""Feature sets to read in benchmarks: real Dau1997 features of generated speech, as a job commits
them, without running one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from amtcore.features.build import build_extractor
from earmill.jobs.demo_audio import speech
from earmill.pipeline.dataset.description import DatasetFile, open_dataset
from earmill.pipeline.dataset.publish import publish_shard
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout

FS_HZ = 16000
VOICES, VOICE_S = 12, 20.0
SHORTEST_S, LONGEST_S = 2.0, 15.0
ROWS_PER_SHARD = 40


def write_features(place: Path, *, hours: float, formats: Sequence[str]) -> int:
    """Write a set of clips of 2 to 15 s in float16; returns its number of rows.

    Every clip is a stretch of one of a few voices, at a level of its own.
    """
    extractor = build_extractor("dau1997", fs_hz=FS_HZ, threads=1)
    waves = [speech(np.random.default_rng(i), FS_HZ, VOICE_S) for i in range(VOICES)]
    voices = [dict(found) for found in extractor.extract([w.astype(np.float32) for w in waves])]
    spec = JobSpec.load(
        {
            "source": {"kind": "files", "uri": "corpus"},
            "extract": [{"model": "dau1997", "fs_hz": FS_HZ}],
            "output": {"uri": str(place), "formats": list(formats)},
        }
    )
    layout = Layout.open(str(place), None)
    dataset = DatasetFile(
        name="benchmark",
        spec=spec.canonical(),
        spec_sha256=spec.sha256(),
        plan_id="0123abcd",
        streams=tuple(info.to_dict() for info in extractor.streams),
        buffers_sha256={"dau1997": "0" * 64},
        provenance={},
        created="2025-01-01T00:00:00Z",
    )
    open_dataset(layout, dataset)
    rng, left_s, rows, n_rows, shard = np.random.default_rng(0), hours * 3600, [], 0, 0
    while left_s > 0 or rows:
        if left_s > 0:
            seconds = round(float(rng.uniform(SHORTEST_S, LONGEST_S)), 2)
            left_s -= seconds
            rows.append(_row(n_rows, seconds, voices, extractor.streams, rng))
            n_rows += 1
        if len(rows) == ROWS_PER_SHARD or left_s <= 0:
            publish_shard(
                layout,
                shard_id=f"{shard:05d}",
                attempt=f"{shard:08x}",
                plan_id="0123abcd",
                rows=rows,
                bad=[],
                streams=extractor.streams,
                formats=formats,
                attrs={"spec_sha256": spec.sha256()},
                info={},
            )
            rows, shard = [], shard + 1
    return n_rows


def _row(number, seconds, voices, streams, rng) -> FeatureRow:
    voice, level = voices[number % VOICES], rng.uniform(0.5, 1.5)
    begin_s = rng.uniform(0, VOICE_S - seconds)
    cut = {}
    for info in streams:
        first = int(begin_s * info.frame_rate_hz)
        n_frames = int(seconds * info.frame_rate_hz + 1e-6)
        cut[info.name] = (voice[info.name][first : first + n_frames] * level).astype(np.float16)
    name = f"clip_{number:05d}.wav"
    facts = {"uri": f"corpus/{name}", "rate_hz": float(FS_HZ)}
    return FeatureRow(name, name, -1, seconds, facts, {"label": number % 5}, cut)
