"""The example job on real speech: spikes beside Dau1997 features, read back in every form."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
import torch
from torch.utils.data import DataLoader

from amtcore.features.registry import build_extractor
from amtcore.features.spike_events import SpikeEvents
from earmill import open_features
from earmill.jobs.cli import run
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.loader.collate import collate_padded
from earmill.pipeline.operations.run_job import run_job
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout

from ..pipeline.again_jobs import shards_run_here
from ..pipeline.source_helpers import SPEECH, SPEECH_IDS

JOB = Path(__file__).parents[2] / "jobs" / "spikes.yaml"
FS_HZ = 16000


@pytest.fixture(scope="module")
def spec() -> JobSpec:
    overrides = [f"source.uri={SPEECH}", f"extract.0.fs_hz={FS_HZ}"]
    return JobSpec.load(JOB, overrides=[*overrides, "output.shard_seconds=8"])


@pytest.fixture(scope="module")
def extracted(spec: JobSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of the job."""
    output = tmp_path_factory.mktemp("spikes")
    place = spec.output.model_copy(update={"uri": str(output)})
    with shards_run_here():
        end = run_job(spec.model_copy(update={"output": place}))
    assert (end.exit_code, end.rows_ok, end.rows_bad) == (0, len(SPEECH_IDS), 0)
    return output


def by_hand(spec: JobSpec, row_id: str) -> SpikeEvents:
    """The recording decoded, resampled in one go, and through the model."""
    wave, rate_hz = soundfile.read(SPEECH / row_id, dtype="float32", always_2d=True)
    streams = {"spikes": (spec.extract[0].streams or {})["spikes"]}
    extractor = build_extractor("dau1997", fs_hz=FS_HZ, streams=streams)
    clip = soxr.resample(wave.mean(1), rate_hz, FS_HZ, quality="VHQ")
    return extractor.extract([clip])[0]["spikes"]


@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
def test_speech_comes_back_as_the_models_spikes(extracted: Path, spec: JobSpec, fmt: str) -> None:
    """Rounding of the resampler may move a spike by a step: counts over 20 ms tell of more."""
    ds = open_features(extracted, format=fmt)
    for row_id in SPEECH_IDS:
        events, expected = ds.by_id(row_id).features["spikes"], by_hand(spec, row_id)
        assert (events.n_frames, events.n_channels) == (expected.n_frames, expected.n_channels)
        assert events.n_spikes > 100
        differing = (events.dense() != expected.dense()).sum()
        assert differing <= 0.01 * len(expected), row_id


def test_the_dataset_is_whole_and_both_formats_agree(extracted: Path) -> None:
    report = verify(Layout.open(str(extracted)))
    assert report.problems == [] and report.rows_ok == len(SPEECH_IDS)
    zarr, parquet = (open_features(extracted, format=fmt) for fmt in ("zarr", "parquet"))
    for one, other in zip(zarr, parquet, strict=True):
        events, same = one.features["spikes"], other.features["spikes"]
        assert np.array_equal(events.to_columns(), same.to_columns())
        assert np.array_equal(one.features["modulation"], other.features["modulation"])
        dense = torch.from_numpy(events.dense())
        assert torch.equal(events.sparse_tensor().to_dense(), dense)
        half_s = one.seconds / 2
        parts = [zarr.slice(one.index, 0.0, half_s), zarr.slice(one.index, half_s)]
        counted = sum(part.features["spikes"].n_spikes for part in parts)
        # The step that the cut goes through belongs to both halves.
        assert events.n_spikes <= counted <= events.n_spikes + dense.max() * len(dense[0])


def test_spikes_go_into_a_batch_beside_frames(extracted: Path) -> None:
    ds = open_features(extracted, dtype="float32")
    batch = next(iter(DataLoader(ds.torch(), batch_size=3, collate_fn=collate_padded)))
    spikes, modulation = batch.features["spikes"], batch.features["modulation"]
    assert spikes.values.dtype == modulation.values.dtype == torch.float32
    # Ten steps a frame, and up to nine that fill none.
    assert torch.equal(spikes.lengths // 10, modulation.lengths)


def test_the_command_line_shows_and_draws_them(
    extracted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(extracted), "--json"]) == 0
    shown = {s["name"]: s for s in json.loads(capsys.readouterr().out)["streams"]}
    assert shown["spikes"]["layout"] == "events" and "layout" not in shown["modulation"]
    assert run(["inspect", str(extracted)]) == 0
    assert "events of 31 neurons at 1000 Hz" in " ".join(capsys.readouterr().out.split())
    assert run(["plot", str(extracted), "--out", str(tmp_path / "row.png")]) == 0
    from matplotlib import image

    colours = image.imread(tmp_path / "row.png")[..., :3].reshape(-1, 3)[::97]
    assert len(np.unique(colours, axis=0)) > 50
