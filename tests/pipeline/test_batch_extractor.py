"""Batches of clips of other tools: the features of a job, and one line about each bad clip."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import earmill
from earmill.pipeline.common.errors import SpecError
from tests.pipeline.audio_factory import encode, speech_like
from tests.pipeline.workers_here import workers_here

RATE_HZ = 16000
JOB: dict[str, Any] = {
    "audio": {"calibration": {"level_db_spl": 65}, "array_rate_hz": RATE_HZ},
    "extract": [{"model": "melspectrogram", "fs_hz": 8000}],
    "run": {"threads_per_worker": 1},
}


def samples(seed: int, *, channels: int = 2, seconds: float = 0.3) -> np.ndarray:
    """Return (frames, channels) samples, exact in 16 bits."""
    whole = np.round(speech_like(seconds, RATE_HZ, channels=channels, seed=seed) * 32768)
    return (whole / 32768).astype(np.float32)


@pytest.fixture(scope="module")
def extractor() -> earmill.BatchExtractor:
    return earmill.BatchExtractor(JOB)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> earmill.Features:
    """A job over three files."""
    folder = tmp_path_factory.mktemp("batch")
    (folder / "corpus").mkdir()
    for seed in range(3):
        (folder / "corpus" / f"{seed}.wav").write_bytes(encode(samples(seed), "wav", RATE_HZ))
    output = {"uri": str(folder / "features"), "dtype": "float32"}
    source = {"kind": "files", "uri": str(folder / "corpus")}
    run = {"executor": "local"}
    audio = {"calibration": JOB["audio"]["calibration"]}
    with workers_here():
        earmill.extract({**JOB, "audio": audio, "source": source, "output": output, "run": run})
    return earmill.open_features(folder / "features")


def files(stored: earmill.Features) -> list[Path]:
    place = Path(stored.dataset.spec["source"]["uri"])
    return [place / row.row_id for row in stored]


def clips_of(form: str, stored: earmill.Features) -> Any:
    paths = files(stored)
    arrays = [samples(seed).T for seed in range(3)]
    forms: dict[str, Any] = {
        "bytes": [path.read_bytes() for path in paths],
        "objects": np.array([path.read_bytes() for path in paths], dtype=object),
        "paths": [str(path) for path in paths],
        "cells": [{"bytes": path.read_bytes(), "path": "x.wav"} for path in paths],
        "cells of paths": [{"bytes": None, "path": str(path)} for path in paths],
        "arrays": arrays,
        "one array": np.stack(arrays),
        "cells of arrays": [{"array": one, "sampling_rate": RATE_HZ} for one in arrays],
    }
    return forms[form]


@pytest.mark.parametrize(
    "form",
    [
        *("bytes", "objects", "paths", "cells", "cells of paths", "arrays", "one array"),
        "cells of arrays",
    ],
)
def test_features_are_those_of_a_job(
    extractor: earmill.BatchExtractor, stored: earmill.Features, form: str
) -> None:
    made = extractor({"audio": clips_of(form, stored), "label": np.arange(3)})
    assert [*made] == ["label", "seconds", "error", "mel"]
    assert made["label"] == [0, 1, 2] and made["error"] == ["", "", ""]
    assert made["seconds"] == pytest.approx([0.3] * 3)
    for row, frames in zip(stored, made["mel"], strict=True):
        assert frames.dtype == np.float32
        assert np.array_equal(frames, row.features["mel"])


def test_a_bad_clip_says_why_and_the_others_keep_their_features(
    extractor: earmill.BatchExtractor, tmp_path: Path
) -> None:
    good, nan = samples(0).T, samples(1).T.copy()
    nan[1, 7] = np.nan
    clips = [
        *(good, nan, b"no audio at all", None, str(tmp_path / "gone.wav")),
        *(np.arange(5, dtype=np.uint8), good[:, :3], good),
    ]
    made = extractor({"audio": clips, "n": [*range(8)]})
    assert made["n"] == [*range(8)]
    words = [
        "",
        "non_finite: clip 1: expected finite samples, got nan at sample 7 of channel 1",
        "not_audio: clip 2: expected audio",
        "not_audio: clip 3: column 'audio' holds null: expected the bytes of files",
        f"unreadable: {tmp_path}/gone.wav: cannot be fetched",
        "not_audio: clip 5: column 'audio' holds list<item: uint8>",
        "too_short: clip 6: expected at least one frame of mel",
        "",
    ]
    for text, wanted in zip(made["error"], words, strict=True):
        assert text.startswith(wanted) and "\n" not in text
        assert bool(text) == bool(wanted)
    shapes = {frames.shape for frames, text in zip(made["mel"], words, strict=True) if text}
    assert shapes == {(0, made["mel"][0].shape[1])}
    assert np.array_equal(made["mel"][0], made["mel"][7]) and len(made["mel"][0]) > 5


def test_each_channel_is_a_row(stored: earmill.Features) -> None:
    job = {**JOB, "audio": {**JOB["audio"], "channels": "each"}}
    made = earmill.BatchExtractor(job)(
        {"audio": [samples(0).T, b"?", samples(1).T], "n": [5, 6, 7]}
    )
    assert made["n"] == [5, 5, 6, 7, 7] and made["channel"] == [0, 1, -1, 0, 1]
    assert [bool(text) for text in made["error"]] == [False, False, True, False, False]


def test_events_are_tables() -> None:
    streams = {"spikes": {"gain": 1.0}}
    job = {"extract": [{"model": "dau1997", "fs_hz": RATE_HZ, "streams": streams}]}
    job["audio"] = {"array_rate_hz": RATE_HZ}  # type: ignore[assignment]
    made = earmill.BatchExtractor(job)({"audio": [samples(0)[:, 0], b"?"]})
    events, none = made["spikes"]
    assert events.dtype == none.dtype == np.int32
    assert events.shape[1] == 3 and none.shape == (0, 3)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"extract": [{"model": "dau1998"}]}, "did you mean 'dau1997'"),
        ({"extract": []}, "extract"),
        ({}, "extract"),
        ("gone.yaml", "there is no such job file"),
    ],
)
def test_a_wrong_job_is_one_line(job: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message) as told:
        earmill.BatchExtractor(job)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"sound": [b""]}, r"with a column 'audio', got the columns \['sound'\]"),
        ({"audio": [b""], "mel": [1]}, r"without \['mel'\]; rename them"),
    ],
)
def test_a_wrong_batch_is_one_line(
    extractor: earmill.BatchExtractor, batch: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        extractor(batch)


def test_it_is_pickled_as_its_arguments_and_works_in_threads(
    extractor: earmill.BatchExtractor, stored: earmill.Features
) -> None:
    stored_form = pickle.dumps(extractor)
    again = pickle.loads(stored_form)
    assert pickle.dumps(again) == stored_form and len(stored_form) < 1000
    # Tools unpickle it for each task: the models are built once in a process.
    assert pickle.loads(stored_form) is again
    batches = [{"audio": [clip]} for clip in clips_of("bytes", stored)] * 3
    with ThreadPoolExecutor(4) as pool:
        made = [*pool.map(again, batches)]
    for number, batch in enumerate(made):
        assert np.array_equal(batch["mel"][0], stored[number % 3].features["mel"])


def test_a_job_file_and_an_empty_batch(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("extract: [{model: melspectrogram}]\n")
    extractor = earmill.BatchExtractor(str(job))
    assert extractor({"audio": []}) == {"seconds": [], "error": [], "mel": []}
    assert extractor({"audio": [b""]})["error"][0].startswith("empty_file: ")
