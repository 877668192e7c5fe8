"""Structured log lines: whatever a text holds, a line is one JSON object of the fields we state."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from earmill.jobs.cli import run
from earmill.jobs.console.progress import LogLines
from earmill.jobs.console.terminal import log_line
from earmill.pipeline.driver import events

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"
MESSY = (
    "first\nsecond\r\n\x1b[31mred \u2028 \u202eevil\u00e9\U0001f600 \udcff "
    "s3://key:sec/ret@bucket/a.wav?X-Amz-Signature=5ECRET Authorization: Bearer abcdefgh12345678"
)
STARTED = events.JobStarted("speech", "out", "ab12", 2, 0, 20, 0, 0, 200.0, 0.0)
SOME: list[events.Event] = [
    events.Step("listing the source"),
    events.Note(MESSY),
    events.SourceChanged(1, 2, 3, "3 rows changed"),
    STARTED,
    events.WorkersReady(2, 1, "cpu", 3.0),
    events.InFlight(10.0),
    events.RowQuarantined("00000", "a\nb.wav", "decode", "truncated", MESSY, 0),
    events.ShardDone("00000", 9, 1, 100.0, 4096, 90.0, 0, {"truncated": 1}),
    events.ShardRetry("00001", 1, MESSY, 1, "rows"),
    events.ShardWaits("00001", MESSY, 5.0, 1, "source"),
    events.ShardFailed("00001", MESSY, 1),
    events.WorkerLost(1, MESSY),
    events.BisectStarted("00001", 10),
    events.CulpritFound("00001", MESSY, MESSY),
    events.Draining("SIGTERM", 2),
    events.JobFinished("failed", 1, MESSY, "out", 2, 1, 9, 1, 90.0, float("nan"), 0.0),
]


def lines(*shown: events.Event) -> list[dict[str, Any]]:
    """What is printed of events, 20 s apart."""
    stream, now = io.StringIO(), iter(range(0, 10_000, 20))
    log = LogLines(stream, clock=lambda: float(next(now)))
    for event in shown:
        log(event)
    text = stream.getvalue()
    assert text.isascii() and text.count("\n") == len(text.splitlines()) == len(shown)
    return [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]


def test_messy_texts_are_one_line_each_and_hold_no_credentials() -> None:
    for line in lines(*SOME):
        text = json.dumps(line)
        assert "5ECRET" not in text and "sec/ret" not in text and "abcdefgh12345678" not in text
        assert not re.search(r"[\x00-\x1f\u2028\u202e]", line["message"]), line["message"]
    (bad,) = (line for line in lines(*SOME) if line["event"] == "row_quarantined")
    assert bad["row_id"] == "a\nb.wav", "a row is found again by its own id"
    assert "first second" in bad["message"] and "é" in bad["message"]


def test_the_page_names_every_event_and_field_and_no_other() -> None:
    page = PAGE.read_text().partition("## Log lines")[2].partition("## Metrics")[0]
    of_all, _, table = page.partition("| event | level")
    every = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", of_all, re.M))))
    stated: dict[str, tuple[set[str], set[str]]] = {}
    for names, levels, fields in re.findall(r"^\| (`.*?) \| (.*?) \|(.*)\|$", table, re.M):
        own = set(re.findall(r"`(\w+)`", fields.partition("`cause`:")[0]))
        own |= {"cause"} if "`cause`:" in fields else set()
        for name in re.findall(r"`(\w+)`", names):
            stated[name] = own, set(levels.split(", "))
    good_end = events.JobFinished("done", 0, "done", "out", 2, 0, 9, 1, 90.0, 9.0, 10.0)
    told = [*lines(*SOME, good_end), json.loads(log_line("error", "error", "x", exit_code=2))]
    assert {line["event"] for line in told} == set(stated)
    for line in told:
        fields, levels = stated[line["event"]]
        job = {"job", "plan_id"}
        assert line.keys() - job == (every | fields) - job, line["event"]
        assert line["level"] in levels
    assert all(line.keys() >= {"job", "plan_id"} for line in told[3:-1])


def test_a_text_that_quotes_megabytes_is_cut() -> None:
    (line,) = lines(events.Note("x" * 10**6))
    assert len(json.dumps(line)) < 10_000


def test_the_option_chooses_lines_and_errors_are_lines_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "no\njob.yaml")
    for option in (["--log-format", "json"], ["--log-format=json"]):
        assert run(["extract", missing, *option]) == 2
        (line,) = map(json.loads, capsys.readouterr().out.splitlines())
        assert (line["event"], line["level"], line["exit_code"]) == ("error", "error", 2)
    assert run(["extract", missing]) == 2
    assert capsys.readouterr().out == "", "the next command tells nothing to machines"
