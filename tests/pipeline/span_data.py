"""Jobs with spans, and recordings for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from earmill import open_features
from earmill.pipeline.spec.job import JobSpec
from tests.chaos.jobs import FEW
from tests.pipeline import audio_factory

FS_HZ = 16000
MEL = {"model": "melspectrogram", "fs_hz": FS_HZ, "params": {"n_fft": 512}}
# A recording in spans: the first, two between, and the last, which is shorter.
SPANS, SPAN_S, SECONDS = 4, 13, 13 * 3 + 11.37
SPIKES = {"adaptation": {}, "spikes": {}}


def spanned(folder: Path, seconds: int, *models: dict[str, Any], **changes: Any) -> JobSpec:
    """A job in float32 with spans."""
    job = {
        "source": {"kind": "files", "uri": str(folder)},
        "audio": {"spans": {"seconds": seconds}},
        "extract": list(models) or [{"model": "dau1997", "fs_hz": FS_HZ}],
        "output": {"uri": str(folder / "out"), "dtype": "float32"},
    }
    return JobSpec.load(job, [f"{k.replace('__', '.')}={v}" for k, v in changes.items()])


def without_spans(spec: JobSpec) -> JobSpec:
    return JobSpec.load(spec, ["audio.spans=null"])


def write(folder: Path, seconds: float, kind: str = "flac", **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"day.{kind}"
    path.write_bytes(audio_factory.clip(kind, seconds, **options))
    return path


def spec_of(corpus: Path, out: Path, **changes: Any) -> JobSpec:
    """Dau1997, a span a shard; `a__b=c` changes one value."""
    job = {
        "name": "job",
        "source": {"kind": "files", "uri": str(corpus)},
        "audio": {"spans": {"seconds": SPAN_S}},
        "extract": [{"model": "dau1997", "fs_hz": 16000, "params": FEW, "streams": SPIKES}],
        "output": {"uri": str(out), "dtype": "float32", "shard_seconds": SPAN_S},
        "run": {"max_bad_fraction": 1},
    }
    return JobSpec.load(job, [f"{key.replace('__', '.')}={v}" for key, v in changes.items()])


def ids(name: str = "day.flac") -> list[str]:
    return [f"{name}#span{k}of{SPANS}" for k in range(1, SPANS + 1)]


def assert_same(got: Any, wanted: Any, near: float = 0.0) -> None:
    """Frames within a part of the largest value; events equal."""
    if not isinstance(wanted, np.ndarray):
        assert (got.first_frame, got.n_frames) == (wanted.first_frame, wanted.n_frames)
        np.testing.assert_array_equal(got.to_columns(), wanted.to_columns())
        return
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max() <= near * np.abs(wanted).max()


def assert_equal_values(out: Path, other: Path) -> None:
    one, two = open_features(out), open_features(other)
    assert len(one) == len(two)
    for row in two:
        for name, values in row.features.items():
            assert_same(one.by_id(row.row_id).features[name], values)
