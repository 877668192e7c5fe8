"""What a user's own typed script does with earmill; strict mypy checks it in `make lint`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

import numpy as np
import torch

import earmill


def run_a_job() -> earmill.JobFinished:
    seen: list[earmill.events.Event] = []
    cost = earmill.plan("job.yaml", overrides=["run.workers=2"])
    assert_type(cost, earmill.JobCost)
    assert_type(cost.estimate.hours, float)
    stop = earmill.StopRequest()
    try:
        return earmill.extract("job.yaml", resume=True, progress=seen.append, stop=stop)
    except earmill.JobFailedError as error:
        return error.end


def run_a_spec() -> None:
    spec = earmill.JobSpec.load({"source": {"kind": "files", "uri": "speech"}})
    earmill.extract(spec, progress=True)
    again = earmill.retry("features", error="unreadable", uri=["*.wav"])
    assert_type(again, earmill.JobFinished | None)
    report = earmill.verify("features", hashes=False)
    assert_type(report, earmill.Report)
    assert_type(report.problems, list[str])


def read_rows() -> Iterator[str]:
    ds = earmill.open_features("features", dtype="float32")
    assert_type(ds, earmill.Features)
    both = earmill.open_features(["features", "more"])
    assert_type(both, earmill.ConcatenatedFeatures)
    row: earmill.Row = ds[0]
    info: earmill.StreamInfo = ds.streams["modulation"]
    assert_type(info.frame_rate_hz, float)
    yield row.row_id
    batch: earmill.Batch = earmill.collate([ds[0], ds[1]])
    assert_type(batch.to("cpu"), earmill.Batch)
    for row in ds:
        yield row.row_id


def load_batches() -> earmill.FeatureLoader:
    stream = earmill.open_features("features").iterable(batch_size=16, seed=0)
    assert_type(stream, earmill.FeatureStream)
    return earmill.FeatureLoader(stream, num_workers=2)


def use_a_model() -> earmill.Extractor:
    model = earmill.models.Dau1997(fs=16000)
    assert_type(model, earmill.models.Dau1997)
    stage = earmill.stages.AdaptLoop(16000.0)
    assert isinstance(stage, torch.nn.Module)
    names: list[str] = [each.name for each in earmill.list_models()]
    extractor = earmill.build_extractor(names[0], fs_hz=16000)
    extractor.extract([np.zeros(16000, np.float32)])
    return extractor
