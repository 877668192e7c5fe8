"""Ray Data with a real Ray: features as a dataset, and features computed in `map_batches`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import earmill
from earmill.pipeline.common.errors import SourceError
from tests.pipeline.audio_factory import encode, speech_like
from tests.pipeline.reader_data import write_set
from tests.without_packages import without

RATE_HZ = 16000


# Ray Data uses settings that it calls deprecated itself.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def ray(ray_session: None) -> Any:
    import ray

    return ray


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "features"
    write_set(path, n_rows=20, rows_per_shard=7, finalised=True)
    return path


def test_rows_are_those_of_the_set(ray: Any, place: Path) -> None:
    features = earmill.open_features(place)
    dataset = earmill.ray.read_features(place, override_num_blocks=3)
    assert dataset.count() == len(features)
    rows = sorted(dataset.take_all(), key=lambda row: row["index"])
    for row, stored in zip(rows, features, strict=True):
        assert row["row_id"] == stored.row_id and row["seconds"] == stored.seconds
        assert (row["label"], row["text"]) == (stored.extra["label"], stored.extra["text"])
        for name, frames in stored.features.items():
            assert np.array_equal(row[name], frames) and row[name].dtype == np.float32


def test_one_stream_and_a_type(ray: Any, place: Path) -> None:
    dataset = earmill.ray.read_features(place, streams=["loudness"], dtype="float16")
    row = dataset.take(1)[0]
    assert row["loudness"].dtype == np.float16 and "modulation" not in row


def test_a_missing_set_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="gone") as told:
        earmill.ray.read_features(tmp_path / "gone")
    assert "\n" not in str(told.value)


def test_batches_of_files_become_features(ray: Any, tmp_path: Path) -> None:
    for seed in range(6):
        clip = encode(speech_like(0.2 + 0.1 * seed, RATE_HZ, seed=seed), "wav", RATE_HZ)
        (tmp_path / f"{seed}.wav").write_bytes(clip if seed != 4 else clip[:2000])
    job = {
        "extract": [{"model": "melspectrogram", "fs_hz": RATE_HZ}],
        "run": {"threads_per_worker": 1},
    }
    files = ray.data.read_binary_files(str(tmp_path), include_paths=True)
    made = files.map_batches(
        earmill.BatchExtractor,
        fn_constructor_args=[job],
        fn_constructor_kwargs={"audio": "bytes"},
        concurrency=1,
        batch_size=2,
    )
    rows = sorted(made.take_all(), key=lambda row: row["path"])
    assert [Path(row["path"]).name for row in rows] == [f"{seed}.wav" for seed in range(6)]
    assert [bool(row["error"]) for row in rows] == [seed == 4 for seed in range(6)]
    assert rows[4]["error"].startswith("truncated: clip 0: ") and len(rows[4]["mel"]) == 0
    alone = earmill.BatchExtractor(job)
    for row in rows:
        (frames,) = alone({"audio": [Path(row["path"]).read_bytes()]})["mel"]
        assert np.array_equal(row["mel"], frames)


def test_an_unknown_model_ends_before_any_batch(ray: Any, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(b"?")
    files = ray.data.read_binary_files(str(tmp_path))
    made = files.map_batches(
        earmill.BatchExtractor,
        fn_constructor_args=[{"extract": [{"model": "dau1998"}]}],
        concurrency=1,
    )
    with pytest.raises(Exception, match="did you mean 'dau1997'"):
        made.take_all()


def test_a_missing_package_is_one_line(place: Path, tmp_path: Path) -> None:
    script = (
        "import sys, earmill\n"
        "for call in (lambda: earmill.ray.read_features(sys.argv[1]), lambda: earmill.to_lhotse):\n"
        "    try:\n"
        "        call()\n"
        "    except earmill.EarmillError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(place)],
        env=without(tmp_path, "ray", "lhotse"),
        capture_output=True,
        text=True,
    )
    ray, lhotse = done.stdout.splitlines()
    assert "the module ray is not installed here: run pip install 'earmill[ray]'" in ray
    assert "the module lhotse is not installed here: run pip install lhotse" in lhotse
