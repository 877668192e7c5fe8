"""`earmill init`: answers as people give them, a job file that holds, and nothing overwritten."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from earmill.jobs.cli import run
from earmill.jobs.commands.init import cleaned_place, kind_of
from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.spec.job import JobSpec
from tests.chaos.jobs import write_corpus

NAME = "Zoë's recordings"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("audio") / NAME, 2, seconds=0.3)


@pytest.fixture(autouse=True)
def _here(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an empty folder but for the recordings."""
    shutil.copytree(corpus, tmp_path / NAME)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A person at a terminal, who gives these answers; the questions that were asked."""

    def at_a_terminal(answers: Sequence[str]) -> list[str]:
        left, asked = list(answers), []

        def answered(question: str) -> str:
            asked.append(question)
            if not left:
                raise EOFError
            return left.pop(0)

        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        monkeypatch.setattr("builtins.input", answered)
        return asked

    return at_a_terminal


def written(file: str = "job.yaml") -> JobSpec:
    return JobSpec.load(file)


def test_flags_alone_write_a_job_that_holds_and_show_what_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = {*Path().iterdir()}
    told = ["--source", NAME, "--output", "out", "--model", "king2019", "--frame-rate", "50"]
    told += ["--pool", "rms", "--formats", "parquet", "--dtype", "float32"]
    told += ["--source-license", "cc-by-4.0", "--features-license", "odbl"]
    assert run(["init", *told]) == 0
    shown = capsys.readouterr().out
    assert "bytes out" in shown and "next: earmill extract job.yaml" in shown
    spec = written()
    assert (spec.source.model_dump()["uri"], spec.source.kind) == (NAME, "files")
    assert spec.extract[0].model == "king2019"
    assert spec.extract[0].streams == {"modulation": {"frame_rate_hz": 50, "pool": "rms"}}
    assert (spec.output.uri, spec.output.formats, spec.output.dtype) == (
        "out",
        ("parquet",),
        "float32",
    )
    assert spec.licenses.to_dict() == {"source": {"id": "CC-BY-4.0"}, "features": {"id": "odbl"}}
    assert spec.name == "Zoe-s-recordings-king2019"
    # Nothing else is written, and what it says of itself is as the plan says it.
    assert {*Path().iterdir()} - before == {Path("job.yaml")}
    assert run(["plan", "job.yaml", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert run(["init", "j2.yaml", *told, "--json"]) == 0
    event = json.loads(capsys.readouterr().out)
    assert event["cost"]["rows"] == plan["rows"] == 2
    assert event["cost"]["bytes_out"] == plan["bytes_out"]


def test_defaults_take_the_rest_and_a_licence_is_not_made_up() -> None:
    assert run(["init", "--source", NAME, "--output", "s3://bucket/features"]) == 0
    spec = written()
    assert (spec.extract[0].model, spec.licenses.to_dict()) == ("dau1997", {})
    assert spec.output.formats == ("parquet", "zarr")
    text = Path("job.yaml").read_text()
    assert "# Relative to the folder in which earmill is run." in text
    assert yaml.safe_load(text)["audio"] == {
        "channels": "mean",
        "calibration": {"rms1_db_spl": 100},
    }


def test_a_person_is_asked_five_questions_and_again_where_an_answer_cannot_be(
    answer: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["", "Zoes recordings", f'"{NAME}" ']
    rates = ["dau", "dau1997", "0", "nan", "80", ""]
    asked = answer([*places, *rates, NAME, "out", "mp3", "zarr", "", "by", "mit", ""])
    assert run(["init"]) == 0
    spec, shown = written(), capsys.readouterr().out
    assert spec.source.model_dump()["uri"] == NAME
    assert spec.extract[0].streams == {"modulation": {"frame_rate_hz": 80, "pool": "mean"}}
    assert spec.output.formats == ("zarr",)
    assert spec.licenses.to_dict() == {"source": {"id": "MIT"}}
    assert len({question[:3] for question in asked if question[0].isdigit()}) == 5
    for line in (
        "expected a folder, file or address, got nothing",
        f"did you mean {NAME}?",
        "did you mean 'dau1997'?",
        "expected a number of frames per second above 0, got 'nan'",
        "the folder of the audio; give another one",
        "expected one of parquet, webdataset, zarr, got 'mp3'",
        "expected an SPDX id such as CC-BY-4.0",
    ):
        assert line in shown


def test_what_options_say_is_not_asked(answer: Callable[..., list[str]]) -> None:
    asked = answer([""] * 8)
    assert run(["init", "--source", NAME, "--model", "mfcc", "--output", "out"]) == 0
    # Nor what follows from the model.
    assert not any(question[:1] in "1234" for question in asked) and len(asked) == 4
    assert (written().extract[0].model, written().extract[0].streams) == ("mfcc", {"mfcc": {}})


def test_a_person_who_leaves_writes_nothing(
    answer: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    answer([NAME])
    assert run(["init"]) == 2
    assert "nothing was written" in capsys.readouterr().err and not Path("job.yaml").exists()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([], "give --source and --output"),
        (["--source", NAME], "without a terminal: give --output"),
        (["--source", "nowhere", "--output", "out"], "nowhere: not found"),
        (["--source", "recordings", "--output", "out"], "did you mean"),
        (["--source", "empty", "--output", "out"], "empty: an empty folder; give the one with"),
        (["--source", "texts", "--output", "out"], "no audio in this folder (it holds 1 .txt)"),
        (["--source", "tables", "--output", "out"], "says where it is or holds it, give that file"),
        (["--source", NAME, "--output", "texts/a.txt"], "a file; give a folder"),
        (["--source", NAME, "--output", f"./{NAME}/"], "the folder of the audio"),
        (["--source", NAME, "--output", "done"], "holds features already"),
        (["--source", NAME, "--output", "o", "--model", "torch_module"], "a class of yours"),
        (["--source", NAME, "--output", "o", "--kind", "file"], "--kind: expected one of"),
        (["--source", NAME, "--output", "o", "--frame-rate", "-1"], "above 0, got '-1.0'"),
        (["--source", NAME, "--output", "o", "--model", "mfcc", "--pool", "rms"], "leave them out"),
        (["--source", NAME, "--output", "o", "--formats", ","], "expected at least one of"),
        (["--source", NAME, "--output", "o", "--source-license", "other"], "expected a name"),
        (["--source", "s3://key:secret@b/x", "--output", "o"], "credentials inside a URI"),
    ],
)
def test_what_cannot_be_is_one_line_that_says_what_to_do_and_nothing_is_written(
    told: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("empty", "texts", "tables", "done"):
        Path(folder).mkdir()
    Path("texts/a.txt").touch()
    Path("tables/list.csv").touch()
    Path("done/dataset.json").touch()
    assert run(["init", *told]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and "secret" not in line and not Path("job.yaml").exists()


def test_a_file_that_is_there_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.yaml").write_text("mine")
    told = ["init", "--source", NAME, "--output", "out"]
    assert run(told) == 2
    assert "--force to replace it" in capsys.readouterr().err
    assert Path("job.yaml").read_text() == "mine"
    Path("link.yaml").symlink_to("nowhere/x.yaml")
    assert run(["init", "link.yaml", *told[1:]]) == 2
    assert run(["init", "no/such/folder.yaml", *told[1:]]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert run([*told, "--force"]) == 0 and written().output.uri == "out"


def test_a_place_that_does_not_answer_now_is_written_down_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["init", "--source", "http://127.0.0.1:9/list.csv", "--output", "out"]) == 0
    shown = capsys.readouterr().out
    assert "not looked into" in shown and "earmill plan job.yaml" in shown
    assert written().source.kind == "manifest"


def test_places_are_what_people_mean_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    escaped = NAME.replace(" ", "\\ ").replace("'", "\\'")
    for said in (NAME, f'"{NAME}"', escaped, f"  {NAME}  "):
        assert cleaned_place(said) == NAME
    assert cleaned_place(f"~/{NAME}") == str(Path.cwd() / NAME)
    assert cleaned_place("s3://bucket/my folder ") == "s3://bucket/my folder"
    kinds = {
        "s3://b/speech": "files",
        "s3://b/list.jsonl": "manifest",
        "s3://b/{000..010}.tar": "webdataset",
        "hf://datasets/me/speech": "hf",
        "me/speech": "hf",
        NAME: "files",
        "data/*.wav": "files",
    }
    assert {place: kind_of(place) for place in kinds} == kinds
    with pytest.raises(SourceError, match="check the name"):
        kind_of("./me/speech")
