"""`inspect`, `verify` and `plot` on a dataset whose names are hostile: shown, never obeyed."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from earmill.jobs.cli import run
from earmill.pipeline.dataset.description import open_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.formats.rows import QuarantineRow
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.outputs import (
    dataset_file,
    make_row,
    publish,
    small_dataset,
    stream,
    write_plan,
)

# Clears the screen, sets the window's title, goes back to the line's start, adds a line; rich
# markup and an emoji code; mathematics that matplotlib cannot read; reversed text.
HOSTILE = "a\x1b[2J\x1b]0;t\x07\r\n[red]:smile:$\\frac{$\u202egpj.wav"
SHOWN = "a\\x1b[2J\\x1b]0;t\\x07\\r\\n[red]:smile:$\\frac{$\\u202egpj.wav"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A row, and a quarantined one, of such a name."""
    layout = Layout.open(tmp_path / "out")
    bad = QuarantineRow(f"{HOSTILE}2", "corpus/x", "decode", "not_audio", f"got {HOSTILE}", 1)
    write_plan(layout, {"00000": [HOSTILE, bad.row_id]})
    open_dataset(layout, dataset_file(name="[bold]speech[/bold]"))
    assert publish(layout, rows=[make_row(HOSTILE)], bad=[bad], plan_rows=[HOSTILE, bad.row_id])
    return tmp_path / "out"


def controls(text: str) -> list[str]:
    """Everything in a text that is not shown; line ends apart."""
    return re.findall(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", text)


def test_quarantined_rows_are_listed_one_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_dataset(tmp_path / "out")
    assert run(["inspect", str(tmp_path / "out"), "--quarantine"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "bad.wav: decode: not_audio: expected audio",
        "mute.wav: decode: zero_length: expected audio",
    ]
    assert run(["inspect", str(tmp_path / "out"), "--quarantine", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["shard"], row["row_id"], row["uri"], row["attempts"]) for row in rows] == [
        ("00000", "bad.wav", "corpus/bad.wav", 1),
        ("00002", "mute.wav", "corpus/mute.wav", 1),
    ]


def test_an_empty_quarantine_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout.open(tmp_path)
    open_dataset(layout, dataset_file())
    assert publish(layout, rows=[make_row("a")])
    assert run(["inspect", str(tmp_path), "--quarantine"]) == 0
    assert capsys.readouterr().out == "no row is in quarantine\n"


def test_hostile_names_are_shown(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["inspect", str(hostile), "--quarantine"]) == 0
    out = capsys.readouterr().out
    assert controls(out) == [] and out.startswith(f"{SHOWN}2: decode") and out.count("\n") == 1
    assert run(["inspect", str(hostile)]) == 0
    out = capsys.readouterr().out
    assert controls(out) == [] and "[bold]speech[/bold]" in out.replace("\n", "")


def test_problems_and_paths_are_shown(hostile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (hostile / "commits" / "x\x1b[2J.json").write_text("{}")
    assert run(["verify", str(hostile)]) == 1
    assert run(["inspect", str(hostile / "no\x1b[31m")]) == 2
    captured = capsys.readouterr()
    assert controls(captured.out) == [] and controls(captured.err) == []
    assert "x\\x1b[2J.json" in captured.out and "no\\x1b[31m" in captured.err
    assert run(["inspect", str(hostile), "--no\x1b[31m"]) == 2
    assert controls(capsys.readouterr().err) == []


def test_a_name_that_looks_like_mathematics_can_be_plotted(
    hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "row.png"
    assert run(["plot", str(hostile), "--row", HOSTILE, "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == f"{out}: {SHOWN}\n"


def test_a_name_in_a_script_that_the_font_lacks_is_plotted_in_silence(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path / "out")
    open_dataset(layout, dataset_file())
    write_plan(layout, {"00000": ["日本.wav"]})
    assert publish(layout, rows=[make_row("日本.wav")])
    assert run(["plot", str(tmp_path / "out"), "--out", str(tmp_path / "row.png")]) == 0


def test_a_stream_of_whole_clips_has_no_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clip = replace(stream("summary", (1, 1), 0.0), pool="clip")
    layout = Layout.open(tmp_path / "out")
    open_dataset(layout, dataset_file(streams=(clip.to_dict(),)))
    write_plan(layout, {"00000": ["a.wav"]})
    row = make_row("a.wav", 1, streams=[clip])
    assert publish(layout, rows=[row], streams=[clip], plan_rows=["a.wav"])
    finalise(layout)
    assert run(["inspect", str(tmp_path / "out")]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "1 frames of 2 columns once a clip (clip)" in shown
    card = layout.read_bytes("README.md").decode()
    assert "| once a clip |" in card
    assert "0 Hz" not in shown + card + layout.read_bytes("croissant.json").decode()
