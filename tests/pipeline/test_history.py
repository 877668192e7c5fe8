"""Snapshots of before: listed, compared, read; also after damage, and never another's rows."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

import earmill
from earmill.jobs.cli import run
from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.dataset import publish as publishing
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.snapshot import find_snapshot, known_snapshots, read_current
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.outputs import make_row, publish, small_dataset

FIRST = {"a.wav", "b.wav", "c.flac"}


def retried(folder: Path) -> Layout:
    """Closed twice: for the second, the bad row was tried again and is good."""
    layout = small_dataset(folder)
    finalise(layout)
    rows = [make_row("a.wav"), make_row("b.wav", 7), make_row("bad.wav", 9)]
    assert publish(layout, "00000", "000000aa", rows, generation=1)
    finalise(layout)
    return layout


def test_every_closing_is_in_the_log_with_what_it_changed(tmp_path: Path) -> None:
    layout = retried(tmp_path)
    first, second = earmill.log(tmp_path)
    assert (first.number, first.why, first.rows_ok, first.rows_bad) == (1, "extract", 3, 2)
    assert (first.added, first.changed, first.removed) == (5, 0, 0)
    assert (second.number, second.why, second.rows_ok, second.rows_bad) == (
        2,
        "retry or repair",
        4,
        1,
    )
    assert (second.added, second.changed, second.removed) == (0, 1, 0)
    assert first.created <= second.created <= datetime.now(UTC).isoformat()
    before = layout.read_bytes("current.json")
    finalise(layout)
    assert layout.read_bytes("current.json") == before  # what has not changed is no new snapshot


def test_a_snapshot_of_before_is_read_with_its_own_rows_and_files(tmp_path: Path) -> None:
    retried(tmp_path)
    for which in (1, "1", "previous"):
        old = earmill.open_features(tmp_path, snapshot=which)
        assert {row.row_id for row in old} == FIRST
        assert set(old.quarantine["row_id"].to_pylist()) == {"bad.wav", "mute.wav"}
        values = old.by_id("b.wav").features["envelope"]
        np.testing.assert_array_equal(values, make_row("b.wav", 7).streams["envelope"])
        assert old.provenance(0)["uri"] == "corpus/a.wav"
    now = earmill.open_features(tmp_path, snapshot="current")
    assert {row.row_id for row in now} == FIRST | {"bad.wav"}


def test_a_snapshot_is_found_by_number_date_and_name(tmp_path: Path) -> None:
    layout = retried(tmp_path)
    current = read_current(layout)
    assert current is not None
    days = ("2026-03-01T10:00:00+00:00", "2026-03-05T10:00:00+00:00")
    (past,) = current.history
    dated = replace(
        current,
        entry=replace(current.entry, created=days[1]),
        history=(replace(past, entry=replace(past.entry, created=days[0])),),
    )
    layout.write_bytes("current.json", dated.to_json().encode())
    wanted = {
        1: (1, "1", "previous", "2026-03-04", date(2026, 3, 1), "2026-03-05T09:59:59"),
        2: (2, "current", "2026-03-05", "2030-01-01", datetime(2026, 3, 5, 10, tzinfo=UTC)),
    }
    for number, names in wanted.items():
        for which in (*names, Path(find_snapshot(layout, number).snapshot.path).stem):
            assert find_snapshot(layout, which).entry.number == number, which
    for which in (0, 3, "2026-02-28", "abcdefgh", "", True, -1):
        with pytest.raises(OutputError, match=r"expected a snapshot, got .*there are 1 \(2026-03"):
            find_snapshot(layout, which)


def test_rows_are_compared_by_state_and_audio(tmp_path: Path) -> None:
    retried(tmp_path)
    found = earmill.diff(tmp_path, 1, 2)
    assert (found.added, found.removed, found.changed) == ((), (), ("bad.wav",))
    assert found.states == {"bad.wav": ("not_audio", "ok")}
    assert earmill.diff(tmp_path, 2, 1).states == {"bad.wav": ("ok", "not_audio")}
    assert not earmill.diff(tmp_path, 2, 2)


@pytest.mark.parametrize(
    "other",
    [
        {"pcm_sha256": "ef" * 32},
        {"rate_hz": 8000},  # another header around the same samples
        {"channels": 2},
        {"reference_pcm_sha256": "ef" * 32},
        {"variant_settings": "{}"},
    ],
    ids=lambda facts: next(iter(facts)),
)
def test_the_same_audio_computed_again_is_no_change(
    other: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = retried(tmp_path)
    row = make_row("c.flac", 120)
    publish(layout, "00001", "000000bb", [row], generation=1)
    finalise(layout)
    # Only an update may bring other audio under an id: here past the check that refuses it.
    monkeypatch.setattr(publishing, "check_replacement", lambda *_: None)
    publish(layout, "00001", "000000cc", [replace(row, facts=row.facts | other)], generation=2)
    finalise(layout)
    assert [entry.changed for entry in earmill.log(tmp_path)] == [0, 1, 0, 1]
    assert earmill.diff(tmp_path, 1, 4).changed == ("bad.wav", "c.flac")


def test_the_log_outlives_a_damaged_current_json(tmp_path: Path) -> None:
    layout = retried(tmp_path)
    known = known_snapshots(layout)
    before = layout.read_bytes("current.json")
    layout.write_bytes("current.json", b"{}")
    assert known_snapshots(layout) == known
    finalise(layout)
    assert layout.read_bytes("current.json") == before


def test_commands_show_log_and_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    retried(tmp_path)
    assert run(["log", str(tmp_path), "--json"]) == 0
    assert [entry["number"] for entry in json.loads(capsys.readouterr().out)] == [1, 2]
    assert run(["log", str(tmp_path)]) == 0
    last, first = capsys.readouterr().out.splitlines()
    assert last.startswith("2  20")
    assert last.endswith("retry or repair: 4 rows ok, 1 quarantined; 0 added, 1 changed, 0 removed")
    assert first.endswith("extract: 3 rows ok, 2 quarantined; 5 added, 0 changed, 0 removed")
    assert run(["diff", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "changed: bad.wav (not_audio -> ok)",
        "snapshot 1 to 2: 0 rows added, 1 changed, 0 removed",
    ]
    assert run(["diff", str(tmp_path), "1", "7"]) == 2
    assert "expected a snapshot, got '7'" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert run(["log", str(tmp_path / "empty")]) == 2


def test_a_time_zone_counts(tmp_path: Path) -> None:
    layout = small_dataset(tmp_path)
    finalise(layout)
    now = datetime.now(UTC)
    assert find_snapshot(layout, now + timedelta(seconds=1)).entry.number == 1
    with pytest.raises(OutputError):
        find_snapshot(layout, now - timedelta(hours=1))
