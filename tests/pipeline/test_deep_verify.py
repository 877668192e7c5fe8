"""Values held against the models: what was altered with all its hashes right is found."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import earmill
from earmill.jobs.cli import run as command
from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.dataset.copied_rows import stored_rows
from earmill.pipeline.dataset.description import read_dataset
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.publish import publish_shard
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.values import quantised
from earmill.pipeline.operations import deep_verify
from earmill.pipeline.operations.deep_verify import differences
from tests.pipeline import audio_factory
from tests.pipeline.again_jobs import module_without_ray  # noqa: F401
from tests.pipeline.changing_corpus import (
    CLIPS,
    Changing,
    corpus_and_output,  # noqa: F401
    fresh,  # noqa: F401
)


def nudge(job: Changing, steps: int) -> str:
    """Move one value of the first shard by steps of float16, and commit it as if it were right."""
    layout, dataset = job.layout, read_dataset(job.layout)
    assert dataset is not None
    record = commits(layout)["00000"]
    rows = list(stored_rows(layout, dataset, record, job.names()))
    values = np.asarray(rows[0].streams["modulation"]).copy()
    place = np.unravel_index(np.argmax(np.abs(values)), values.shape)
    bits = values.view(np.uint16)
    bits[place] += steps
    rows[0] = replace(rows[0], streams={**rows[0].streams, "modulation": values})
    publish_shard(
        layout,
        dataset,
        shard_id="00000",
        attempt="deadbeef",
        rows=rows,
        bad=[],
        info=record.info,
        plan_rows=[row.row_id for row in rows],
        generation=1,
    )
    finalise(layout)
    assert verify(layout).problems == []
    return rows[0].row_id


def test_what_the_job_made_here_is_equal_bit_for_bit(changing: Changing) -> None:
    report = earmill.verify_deep(changing.out, CLIPS + 10)
    assert (report.ok, report.rows, report.equal, report.problems) == (True, CLIPS, CLIPS, ())
    changing.computed.clear()
    for _ in range(2):
        assert earmill.verify_deep(changing.out, 2, seed=5).equal == 2
    assert changing.computed[:2] == changing.computed[2:]
    # Copies keep what made their values, and are held against it.
    earmill.compact(changing.out, shard_rows=100)
    assert earmill.verify_deep(changing.out, CLIPS).equal == CLIPS
    with pytest.raises(ValueError, match="at least 1 row"):
        earmill.verify_deep(changing.out, 0)
    with pytest.raises(OutputError, match="no dataset"):
        earmill.verify_deep(changing.corpus, 1, job=changing.spec())


def test_one_bit_is_found_and_elsewhere_a_tolerance_holds(
    changing: Changing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row_id = nudge(changing, 1)
    report = earmill.verify_deep(changing.out, CLIPS)
    (problem,) = report.problems
    assert not report.ok and report.equal == CLIPS - 1
    assert repr(row_id) in problem and "modulation" in problem and "bit for bit" in problem
    assert command(["verify", str(changing.out), "--deep", "50", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False and told["problems"] == [] and told["deep"]["equal"] == CLIPS - 1
    monkeypatch.setattr(deep_verify, "value_versions", lambda: {"numpy": "another"})
    report = earmill.verify_deep(changing.out, CLIPS)
    assert report.ok and (report.equal, report.close) == (CLIPS - 1, 1)
    assert 2**-12 < report.worst < 2e-3


def test_more_than_the_tolerance_is_found_elsewhere_too(
    changing: Changing, monkeypatch: pytest.MonkeyPatch
) -> None:
    nudge(changing, 8)
    monkeypatch.setattr(deep_verify, "value_versions", lambda: {"numpy": "another"})
    (problem,) = earmill.verify_deep(changing.out, CLIPS).problems
    assert "within 0.002" in problem


def test_rows_whose_audio_is_gone_or_another_are_told_as_that(
    changing: Changing, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = changing.names()[:2]
    (changing.corpus / first).unlink()
    data = bytearray((changing.corpus / second).read_bytes())
    data[-11] ^= 0x3F
    (changing.corpus / second).write_bytes(data)
    assert command(["verify", str(changing.out), "--deep", "50", "--seed", "3"]) == 1
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem")]
    assert len(said) == 2
    assert repr(first) in said[0] and "cannot be computed again" in said[0]
    assert repr(second) in said[1] and "audio has changed" in said[1]


def row(values: Any) -> FeatureRow:
    return FeatureRow("a", "a", -1, 1.0, {}, {}, {"s": np.asarray(values)})


def test_differences_are_measured_against_the_column() -> None:
    one = np.full((4, 2), 100, np.float32)
    other = one.copy()
    other[0, 0] = 100.01
    size, most = differences(row(one), row(other))["s"]
    assert size == pytest.approx(1e-4, rel=1e-2) and most == 1e-4
    assert differences(row(one), row(one))["s"][0] == 0
    # Beside large values of its column a small one may be off by more than itself.
    one[:, 1] = (1000, 1000, 1000, 1e-3)
    other = one.copy()
    other[3, 1] = -1e-3
    assert differences(row(one), row(other))["s"][0] < 1e-5
    assert differences(row(one), row(one[:3]))["s"][0] == float("inf")
    zero = np.zeros((2, 1), np.float32)
    assert differences(row(zero), row(-zero))["s"][0] > 0  # other bits
    frames = np.linspace(0.5, 1.0, 140, dtype=np.float32).reshape(70, 2)
    codes = quantised(frames)
    nearly = quantised(frames * np.float32(1.003))
    assert 0 < differences(row(codes), row(nearly))["s"][0] < 1e-2
    assert differences(row(codes), row(quantised(frames * 2)))["s"][0] > 0.5
    events = np.array([[0, 1, 1], [3, 2, 1], [5, 0, 2]], np.int32)
    assert differences(row(events), row(events))["s"][0] == 0
    moved = events.copy()
    moved[1, 0] = 4
    assert differences(row(events), row(moved))["s"][0] == pytest.approx(1 / 3)
    assert differences(row(events), row(events[:0]))["s"][0] > 0.01


def test_what_a_decoder_prints_of_damaged_bytes_stays_in_its_process(
    changing: Changing, capfd: pytest.CaptureFixture[str]
) -> None:
    """libmpg123 prints on standard error what it thinks of an MP3 file."""
    data = bytearray(audio_factory.clip("mp3", 3.0, seed=1))
    for place in range(900, len(data) - 900, 250):
        data[place] ^= 1
    (changing.corpus / "damaged.mp3").write_bytes(data)
    assert changing.update()[0].rows_bad == 0
    assert "libmpg123" in capfd.readouterr().err, "these bytes make it print"
    found = deep_verify.verify_deep(changing.layout, changing.spec(), rows=100)
    assert found.ok and capfd.readouterr() == ("", "")
