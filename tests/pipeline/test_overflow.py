"""Finite samples that a model cannot bear: the row is quarantined, and nothing else is lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.pipeline.test_row_pipeline import Job, assert_same_rows, make_spec

STREAMS = {
    "frames": "{envelope: {}}",
    "frames of the whole model": "{modulation: {}}",
    "largest": "{adaptation: {pool: max}}",
    "spikes": "{envelope: {}, spikes: {source: envelope, gain: 100.0}}",
}


@pytest.mark.parametrize("long_s", [600.0, 0.1], ids=["batch", "streamed"])
@pytest.mark.parametrize("streams", STREAMS.values(), ids=STREAMS)
def test_a_model_that_overflows_is_found(tmp_path: Path, streams: str, long_s: float) -> None:
    """The first filter's state overflows float32; a rectifier would turn its NaN into 0."""
    noise = np.random.default_rng(0).standard_normal(8000)
    sounds = {"a_good": 0.1 * noise, "b_loud": 3e38 * np.sign(noise), "c_good": 0.1 * noise}

    for name, samples in sounds.items():
        soundfile.write(tmp_path / f"{name}.wav", samples.astype(np.float32), 16000, "FLOAT")
    model = f"[{{model: dau1997, fs_hz: 16000, streams: {streams}}}]"
    found = Job(make_spec(tmp_path, extract=model), long_s=long_s)()
    assert [(row.row_id, row.error_class, row.stage) for row in found.bad] == [
        ("b_loud.wav", "non_finite_feature", "extract")
    ]
    (tmp_path / "b_loud.wav").unlink()
    without = Job(make_spec(tmp_path, extract=model), long_s=long_s)()
    assert_same_rows(found.good, without.good)
