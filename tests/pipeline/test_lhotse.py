"""CutSets of lhotse as sources, and features as a CutSet: with the package itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import lhotse
import numpy as np
import pytest
from lhotse import CutSet, MonoCut, Recording, RecordingSet, SupervisionSegment

import earmill
from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.sources.lhotse import LhotseSection
from tests.pipeline.audio_factory import clip, encode, speech_like
from tests.pipeline.reader_data import STREAMS, Writer, make_row
from tests.pipeline.workers_here import workers_here

RATE_HZ = 16000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in range(3):
        samples = speech_like(1.0, RATE_HZ, seed=seed)
        (tmp_path / f"rec{seed}.wav").write_bytes(encode(samples, "wav", RATE_HZ))
    return tmp_path


def cut(folder: Path, seed: int, start: float = 0.0, duration: float = 1.0) -> MonoCut:
    recording = Recording.from_file(folder / f"rec{seed}.wav")
    said = SupervisionSegment(
        f"s{seed}", recording.id, 0.0, duration, text=f"word {seed}", speaker="anna", language="en"
    )
    return MonoCut(f"cut-{seed}", start, duration, 0, [said], recording=recording)


@pytest.fixture
def cuts(folder: Path) -> CutSet:
    return CutSet.from_cuts(
        [cut(folder, 0), cut(folder, 1, start=0.25, duration=0.5), cut(folder, 2, duration=0.4)]
    )


def rows(path: Path, **section: object) -> list[Item]:
    spec = LhotseSection.model_validate({"kind": "lhotse", "uri": str(path), **section})
    return [*open_source(spec).items()]


def extracted(folder: Path, source: dict[str, Any], **output: Any) -> str:
    """Run a job; return its place."""
    place = str(folder / "features")
    job = {
        "source": source,
        "extract": [{"model": "melspectrogram", "fs_hz": RATE_HZ}],
        "output": {"uri": place, **output},
        "run": {"executor": "local", "max_bad_fraction": 1.0},
    }
    with workers_here():
        earmill.extract(job)
    return place


@pytest.mark.parametrize("name", ["cuts.jsonl", "cuts.jsonl.gz"])
def test_cuts_are_rows(folder: Path, cuts: CutSet, name: str) -> None:
    cuts.to_file(folder / name)
    items = rows(folder / name)
    assert [item.row_id for item in items] == ["cut-0", "cut-1", "cut-2"]
    spans = [(item.start_s, item.end_s, item.seconds) for item in items]
    assert spans == [(None, None, 1.0), (0.25, 0.75, 0.5), (0.0, 0.4, 0.4)]
    assert items[1].uri == str(folder / "rec1.wav")
    assert items[1].extra == {"speaker": "anna", "text": "word 1", "language": "en"}


def test_recordings_are_rows(folder: Path) -> None:
    found = [Recording.from_file(folder / f"rec{seed}.wav") for seed in range(3)]
    RecordingSet.from_recordings(found).to_file(folder / "recordings.jsonl.gz")
    items = rows(folder / "recordings.jsonl.gz")
    assert [(item.row_id, item.start_s, item.seconds) for item in items] == [
        (f"rec{seed}", None, 1.0) for seed in range(3)
    ]


def test_cuts_whose_samples_are_no_span_of_a_file_are_refused(folder: Path, cuts: CutSet) -> None:
    stereo = encode(speech_like(1.0, RATE_HZ, channels=2), "wav", RATE_HZ)
    (folder / "rec3.wav").write_bytes(stereo)
    perturbed = cut(folder, 0).perturb_speed(1.1)
    command = json.loads(json.dumps(cut(folder, 0).to_dict()))
    command["recording"]["sources"][0] |= {"type": "command", "source": "sox a.wav -t wav -"}
    mixed = cut(folder, 0).mix(cut(folder, 1)).with_id("mixed")
    wrong: list[tuple[Any, str]] = [
        (mixed.to_dict(), r"got a MixedCut; write their sound with cuts\.save_audios"),
        (cut(folder, 0).pad(2.0).to_dict(), "got a MixedCut"),
        (perturbed.to_dict(), "got a recording with transforms"),
        (command, r"got sources of type \['command'\]"),
        (cut(folder, 3).to_dict(), r"got channel 0 of the channels \[0, 1\]"),
        ({"id": "x", "type": "MonoCut", "start": 0, "duration": 1}, r"got sources of type \[\]"),
    ]
    for number, (line, message) in enumerate(wrong):
        path = folder / f"{number}.jsonl"
        path.write_text(json.dumps(cut(folder, 1).to_dict()) + "\n" + json.dumps(line) + "\n")
        with pytest.raises(SourceError, match=message) as told:
            rows(path)
        assert "line 2" in str(told.value) and "\n" not in str(told.value)
    # The advice helps.
    (folder / "sound").mkdir()
    saved = CutSet.from_cuts([mixed, perturbed, cut(folder, 3)]).save_audios(folder / "sound")
    saved.to_file(folder / "saved.jsonl")
    assert [item.row_id for item in rows(folder / "saved.jsonl")] == [one.id for one in saved]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # lhotse's files
def test_shar_is_read_as_tars(folder: Path, cuts: CutSet) -> None:
    (folder / "shar").mkdir()
    perturbed = cuts[2].perturb_speed(1.1).with_id("perturbed")
    CutSet.from_cuts([*cuts, perturbed]).to_shar(
        folder / "shar", fields={"recording": "flac"}, shard_size=3
    )
    place = extracted(
        folder, {"kind": "webdataset", "uri": str(folder / "shar" / "recording.*.tar")}
    )
    again = CutSet.from_shar(in_dir=folder / "shar")
    found = {one.id: one for one in earmill.to_lhotse(place, again)}
    assert set(found) == {"cut-0", "cut-1", "cut-2", "perturbed"}
    for one in found.values():
        assert len(one.load_features()) == one.num_frames
        assert one.supervisions[0].text and one.load_audio().size


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_features_are_beside_the_recordings_of_cuts(folder: Path, cuts: CutSet, dtype: str) -> None:
    (folder / "rec2.wav").write_bytes(clip("wav", 0.5)[:300])
    cuts.to_file(folder / "cuts.jsonl.gz")
    source = {"kind": "lhotse", "uri": str(folder / "cuts.jsonl.gz")}
    place = extracted(folder, source, dtype=dtype)
    features = earmill.open_features(place)
    # A cut whose row is in quarantine is left out.
    read = CutSet.from_file(folder / "cuts.jsonl.gz")
    with_features = earmill.to_lhotse(place, read)
    with_features.to_file(folder / "with.jsonl.gz")
    found = [*CutSet.from_file(folder / "with.jsonl.gz")]
    assert [one.id for one in found] == ["cut-0", "cut-1"]
    for one in found:
        frames = one.load_features()
        assert np.array_equal(frames, features.by_id(one.id).features["mel"])
        assert one.supervisions[0].speaker == "anna"
        assert one.load_audio().shape == (1, round(one.duration * RATE_HZ))
        assert frames.shape == (one.num_frames, one.num_features)
        part = one.truncate(offset=0.2, duration=0.2)
        assert np.array_equal(part.load_features(), frames[20:40])


def test_features_of_a_cut_are_those_of_its_row_now(tmp_path: Path, cuts: CutSet) -> None:
    writer = Writer(tmp_path / "set", streams=STREAMS[:1])
    for number, cut_id in enumerate(("cut-0", "one.tar/cut-1", "two.tar/cut-1")):
        row = make_row(number, 1 - number / 2, STREAMS[:1])
        writer.shard(number, [replace(row, row_id=cut_id, plan_row_id=cut_id)])
        if number < 2:
            # A set that was opened for an earlier CutSet lacks the newer shard.
            found = [*earmill.to_lhotse(tmp_path / "set", cuts)]
            wanted = row.streams["modulation"]
            assert len(found) == number + 1 and np.array_equal(found[-1].load_features(), wanted)
    with pytest.raises(ValueError, match=r"got 'one\.tar/cut-1' and 'two\.tar"):
        earmill.to_lhotse(tmp_path / "set", cuts)


def test_what_to_lhotse_cannot_give_is_one_line(folder: Path, cuts: CutSet) -> None:
    cuts.to_file(folder / "cuts.jsonl")
    with pytest.raises(SourceError, match="gone") as told:
        earmill.to_lhotse(folder / "gone", cuts)
    assert "\n" not in str(told.value)
    place = extracted(folder, {"kind": "lhotse", "uri": str(folder / "cuts.jsonl")})
    with pytest.raises(ValueError, match=r"the streams of frames, \['mel'\], got 'modulation'"):
        earmill.to_lhotse(place, cuts, stream="modulation")
    assert lhotse.__version__


def test_numbers_of_a_clip_are_no_frames(folder: Path, cuts: CutSet) -> None:
    """A stream with one frame a clip has no rate."""
    cuts.to_file(folder / "cuts.jsonl")
    place = str(folder / "features")
    job = {
        "source": {"kind": "lhotse", "uri": str(folder / "cuts.jsonl")},
        "extract": [{"model": "glasberg2002", "streams": {"loudness_summary": {}}}],
        "output": {"uri": place},
        "run": {"executor": "local"},
    }
    with workers_here():
        earmill.extract(job)
    with pytest.raises(ValueError, match=r"the streams of frames, \[\]"):
        earmill.to_lhotse(place, cuts, stream="loudness_summary")
