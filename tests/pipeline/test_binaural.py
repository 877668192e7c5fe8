"""Two ears, several models, one decoding: what each model hears of a file, and what is refused.

The second route is the plain one: soundfile reads, the resampler takes each ear whole, the models
get one clip alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from amtcore.features.registry import build_extractor
from amtcore.units import Calibration
from earmill.pipeline.audio.channels import (
    BINAURAL,
    EARS,
    MIXED,
    as_model_input,
    channel_ids,
    clips_of_channels,
)
from earmill.pipeline.audio.resample import resample
from earmill.pipeline.common.errors import ChannelIndexError, SpecError
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import validate_models
from tests.compare import Tolerance, assert_close
from tests.pipeline import audio_factory
from tests.pipeline.test_row_pipeline import Job, assert_same_rows, make_spec
from tests.short import spread

RATE_HZ = 22050
#: Chunked resampling and filtering sum in another order; then float16 rounds.
STREAMED = Tolerance(2e-3, "chunked filters, then rounding to float16", 1e-3)
MODELS = [
    {"model": "dau1997", "fs_hz": 16000},
    {
        "model": "moore2016",
        "streams": {"short_term_loudness": {"frame_rate_hz": 100}, "loudness_summary": {}},
    },
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stereo clip of unequal ears, the same with exchanged ears, a mono and a 5-channel clip."""
    folder = tmp_path_factory.mktemp("ears")
    samples = audio_factory.speech_like(0.9, RATE_HZ, channels=5, seed=3)
    samples[:, 1] *= 0.3
    for name, channels in (("stereo", [0, 1]), ("turned", [1, 0]), ("mono", [0]), ("many", None)):
        chosen = samples if channels is None else samples[:, channels]
        soundfile.write(folder / f"{name}.wav", chosen, RATE_HZ, subtype="FLOAT")
    return folder


def binaural(corpus: Path, **changes: Any) -> JobSpec:
    return make_spec(corpus, audio__channels=BINAURAL, extract=MODELS, **changes)


@pytest.mark.parametrize(
    ("name", "calibration"),
    spread(2, ["stereo.wav", "mono.wav"], [{"rms1_db_spl": 94.0}, {"level_db_spl": 65.0}]),
)
def test_each_model_hears_what_it_has_ears_for(
    corpus: Path, name: str, calibration: dict[str, float]
) -> None:
    job = Job(binaural(corpus, audio__calibration=calibration))
    row = next(row for row in job().good if row.row_id == name)
    ears, _ = soundfile.read(corpus / name, dtype="float32", always_2d=True)
    rms = float(np.sqrt(np.mean(ears.astype(np.float64) ** 2)))
    dau, moore = job.models
    gains = [
        Calibration.from_dict(calibration).gain_for_rms(rms, model.input_unit)
        for model in job.models
    ]
    at_16k, at_32k = (
        [resample(np.ascontiguousarray(ear), RATE_HZ, fs) for ear in ears.T]
        for fs in (16000, 32000)
    )
    mono = np.mean(at_16k, axis=0, dtype=np.float64).astype(np.float32) * np.float32(gains[0])
    both = np.stack(at_32k) * np.float32(gains[1])
    expected = dau.extract([mono])[0] | moore.extract([both if len(both) == EARS else both[0]])[0]
    assert row.channel == MIXED and set(row.streams) == set(expected)
    for stream, values in expected.items():
        # Numbers of the whole clip keep their type.
        kind = np.float32 if stream == "loudness_summary" else np.float16
        np.testing.assert_array_equal(row.streams[stream], values.astype(kind), stream)


def test_loudness_does_not_change_when_the_ears_are_exchanged_and_falls_with_one(
    corpus: Path,
) -> None:
    rows = {
        row.row_id: row.streams["loudness_summary"][0, 0] for row in Job(binaural(corpus))().good
    }
    assert rows["stereo.wav"] == pytest.approx(rows["turned.wav"], rel=1e-3)
    assert rows["stereo.wav"] < 0.9 * rows["mono.wav"]


def test_a_streamed_clip_has_all_frames_of_the_clip_held_whole(corpus: Path) -> None:
    spec = binaural(corpus, audio__calibration={"level_db_spl": 65.0})
    whole, streamed = Job(spec)(), Job(spec, long_s=0.4)()
    for one, other in zip(whole.good, streamed.good, strict=True):
        assert one.facts.keys() == other.facts.keys()
        for name in one.streams:
            assert_close(other.streams[name], one.streams[name], STREAMED, one.row_id)
    assert_same_rows(streamed.good, Job(spec, long_s=0.4, decode_threads=1)().good)


def test_more_channels_than_ears_are_quarantined(corpus: Path) -> None:
    (bad,) = Job(binaural(corpus))().bad
    assert (bad.row_id, bad.error_class) == ("many.wav", "channel_index")
    assert "one or two channels" in bad.message


def test_which_rows_of_a_waveform_a_model_gets() -> None:
    block = np.array([[1.0, 2.0], [3.0, 5.0]], np.float32)
    assert clips_of_channels(BINAURAL, (0, 1)) == [(MIXED, slice(0, 2))]
    assert clips_of_channels("each", (0, 1)) == [(0, slice(0, 1)), (1, slice(1, 2))]
    np.testing.assert_array_equal(as_model_input(block, 2), block)
    np.testing.assert_array_equal(as_model_input(block, 1), [2.0, 3.5])
    np.testing.assert_array_equal(as_model_input(block[:1], 2), [1.0, 2.0])
    with pytest.raises(ChannelIndexError, match="one or two"):
        channel_ids(BINAURAL, 3)


def test_a_job_without_a_model_of_two_ears_is_refused(corpus: Path) -> None:
    spec = make_spec(corpus, audio__channels=BINAURAL)
    with pytest.raises(SpecError, match=r"expected a model of two ears .* got dau1997; use mean"):
        validate_models(spec)


def test_velocities_need_float32(corpus: Path) -> None:
    extract = [{"model": "paulick2024", "streams": {"velocity": {"pool": "rms"}}}]
    with pytest.raises(SpecError, match="expected float32 for paulick2024 velocity"):
        validate_models(make_spec(corpus, extract=extract))
    validate_models(make_spec(corpus, extract=extract, output__dtype="float32"))


def test_a_long_clip_is_quarantined_where_a_stream_needs_it_whole(corpus: Path) -> None:
    extract = [{"model": "king2019", "fs_hz": 16000}]
    assert not build_extractor("king2019", fs_hz=16000).can_stream
    rows = Job(make_spec(corpus, extract=extract), long_s=0.4)()
    assert rows.good == [] and {row.error_class for row in rows.bad} == {"too_long"}
    assert all("phase_insens" in row.message for row in rows.bad)
    free = [{"model": "king2019", "fs_hz": 16000, "params": {"phase_insens": "none"}}]
    assert len(Job(make_spec(corpus, extract=free), long_s=0.4)().good) == 4
