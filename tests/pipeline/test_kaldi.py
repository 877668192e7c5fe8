"""Data folders of Kaldi: the rows of their tables, and one line about each wrong table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import earmill
from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.sources.kaldi import KaldiSection
from tests.pipeline.audio_factory import clip
from tests.pipeline.workers_here import workers_here

TABLES = {
    "wav.scp": "rec1 audio/one.wav\nrec2   audio/two words.wav \n",
    "segments": "utt1 rec1 0.1 0.3\nutt2 rec1 0.3 -1\nutt3 rec2 0 0.25\n",
    "utt2spk": "utt1 anna\nutt2 bert\nutt3 anna\n",
    "text": "utt1 good morning\nutt2\nutt3  hé\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data folder with two recordings of half a second."""
    (tmp_path / "audio").mkdir()
    for seed, name in enumerate(("one", "two words")):
        (tmp_path / "audio" / f"{name}.wav").write_bytes(clip("wav", 0.5, seed=seed))
    write(tmp_path, TABLES)
    return tmp_path


def write(folder: Path, tables: Mapping[str, str]) -> None:
    for name, text in tables.items():
        (folder / name).write_text(text, encoding="utf-8")


def rows(folder: Path, **section: object) -> list[Item]:
    spec = KaldiSection.model_validate({"kind": "kaldi", "uri": str(folder), **section})
    return [*open_source(spec).items()]


def test_segments_are_rows_with_speaker_and_text(folder: Path) -> None:
    items = rows(folder)
    assert [item.row_id for item in items] == ["utt1", "utt2", "utt3"]
    spans = [(item.start_s, item.end_s) for item in items]
    assert spans == [(0.1, 0.3), (0.3, None), (0.0, 0.25)]
    paths = [str(folder / "audio" / name) for name in ("one.wav", "one.wav", "two words.wav")]
    assert [item.uri for item in items] == paths
    assert [item.extra for item in items] == [
        {"speaker": "anna", "text": "good morning"},
        {"speaker": "bert", "text": None},
        {"speaker": "anna", "text": "hé"},
    ]
    assert [item.seconds for item in items] == pytest.approx([0.2, 0.2, 0.25], abs=1e-3)


def test_without_segments_recordings_are_rows(folder: Path) -> None:
    (folder / "segments").unlink()
    (folder / "utt2spk").write_text("rec2 anna\n")
    items = rows(folder)
    assert [(item.row_id, item.start_s, item.end_s) for item in items] == [
        ("rec1", None, None),
        ("rec2", None, None),
    ]
    assert [item.extra["speaker"] for item in items] == [None, "anna"]


def test_relative_paths_start_at_the_prefix(folder: Path) -> None:
    data = folder / "data" / "train"
    data.mkdir(parents=True)
    write(data, TABLES)
    (item, *_) = rows(data, prefix="../..")
    assert item.uri == str(folder / "audio" / "one.wav")


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"wav.scp": "rec1 sox a.mp3 -t wav - |\n"}, "recording 'rec1': expected the path of a"),
        (
            {"wav.scp": "rec1 wavs.ark:17\n"},
            "got a command or an archive, 'wavs.ark:17'; commands are not run",
        ),
        ({"wav.scp": "rec1\n"}, "wav.scp: line 1: expected 2 fields or more, .* got 'rec1'"),
        ({"wav.scp": "a 1.wav\na 2.wav\n"}, "wav.scp: line 2: .* once in the file, got 'a 2.wav'"),
        ({"wav.scp": "\n"}, "the table has no rows"),
        ({"wav.scp": "rec1 /etc/passwd\n"}, "row 1: .*/etc/passwd"),
        ({"segments": "utt1 rec3 0 1\n"}, "'utt1' of segments: .* got 'rec3'; add its line"),
        ({"segments": "\n"}, "segments: expected utterances, got none; .* whole recordings"),
        ({"segments": "utt1 rec1 0\n"}, "segments: line 1: expected 4 fields or more"),
        ({"segments": "utt1 rec1 0 end\n"}, "row 1: expected seconds in 'end', got 'end'"),
    ],
)
def test_a_wrong_table_is_one_line(folder: Path, tables: dict[str, str], message: str) -> None:
    if "segments" not in tables:
        (folder / "segments").unlink()
    write(folder, tables)
    with pytest.raises(SourceError, match=message) as told:
        rows(folder)
    assert "\n" not in str(told.value) and str(told.value).startswith(f"source {folder}")


def test_other_bytes_and_a_missing_folder_are_one_line(folder: Path) -> None:
    (folder / "text").write_bytes(b"utt1 \xff\n")
    with pytest.raises(SourceError, match="text: expected text in UTF-8"):
        rows(folder)
    with pytest.raises(SourceError, match=r"gone/wav\.scp: not found; check source\.uri"):
        rows(folder / "gone")


def test_bad_segments_are_quarantined_and_the_others_are_rows(folder: Path, tmp_path: Path) -> None:
    (folder / "segments").write_text(
        "good rec1 0.1 0.4\nbehind rec1 0.4 0.9\nturned rec2 0.3 0.2\ngone rec3 0 1\n"
    )
    with (folder / "wav.scp").open("a") as file:
        file.write("rec3 audio/gone.wav\n")
    job = {
        "source": {"kind": "kaldi", "uri": str(folder)},
        "extract": [{"model": "melspectrogram"}],
        "output": {"uri": str(tmp_path / "features")},
        "run": {"executor": "local", "max_bad_fraction": 1.0},
    }
    with workers_here():
        end = earmill.extract(job)
    assert (end.rows_ok, end.rows_bad) == (1, 3)
    features = earmill.open_features(tmp_path / "features")
    assert [(row.row_id, row.extra["speaker"]) for row in features] == [("good", None)]
    bad = {row["row_id"]: row["message"] for row in features.quarantine.to_pylist()}
    assert "the file ends at 0.500 s" in bad["behind"]
    assert "expected the end after the start" in bad["turned"]
    assert "gone.wav" in bad["gone"]
    assert features.dataset.spec["source"]["kind"] == "kaldi"
