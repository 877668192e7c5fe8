"""Events in, text out: totals, rates and times left against hand arithmetic, on a clock we set."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from typing import Any

import pytest

from earmill.jobs.console.job_texts import cost, totals
from earmill.jobs.console.process import OutputLost
from earmill.jobs.console.progress import BAR_WIDTH, Bar, JsonLines, PlainLines, make_reporter
from earmill.jobs.console.terminal import console
from earmill.pipeline.common.text import audio, bytes_text
from earmill.pipeline.driver import events
from earmill.pipeline.driver.run_totals import RunTotals


class Clock:
    """A clock that stands until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


STARTED = events.JobStarted(
    job="speech",
    output="out",
    plan_id="p",
    shards_total=10,
    shards_done=2,
    rows_total=500,
    rows_ok=90,
    rows_bad=10,
    seconds_total=1000.0,
    seconds_done=200.0,
    audio_s_done=150.0,
)
READY = events.WorkersReady(workers=1, threads=2, device="cpu", start_s=3.0)
DONE = events.ShardDone(
    shard_id="00002", rows_ok=48, rows_bad=2, seconds=100.0, nbytes=5, audio_s=70.0
)


def tally_at(clock: Clock) -> RunTotals:
    """100 s committed and 60 s in flight, 4 s after the workers were ready."""
    tally = RunTotals(clock)
    tally.take(STARTED)
    tally.take(READY)
    clock.now += 4.0
    tally.take(DONE)
    tally.take(events.InFlight(60.0))
    return tally


def test_audio_and_rate_are_those_of_decoded_good_rows_time_left_goes_by_the_plan() -> None:
    tally = tally_at(Clock())
    # Before: 150 s. A shard of planned 100 s held 70 s of good audio; 60 s are in flight.
    assert tally.audio_s == 280.0
    assert tally.times_real_time == pytest.approx((280.0 - 150.0) / 4.0)
    # Of the plan 360 s are through, 160 s of them in 4 s of this run.
    assert tally.done_s == 360.0 and tally.share == 0.36
    assert tally.left_audio_s == 640.0
    assert tally.left_s == pytest.approx(640.0 / 40.0)
    assert (tally.rows_ok, tally.rows_bad) == (138, 12)


def test_a_driver_that_was_stopped_does_not_count_the_pause() -> None:
    clock = Clock()
    tally = tally_at(clock)
    before = tally.times_real_time, tally.left_s
    clock.now += 3600.0
    tally.take(events.InFlight(60.0))
    assert (tally.times_real_time, tally.left_s) == before


def test_nothing_is_claimed_before_there_is_work() -> None:
    clock = Clock()
    tally = RunTotals(clock)
    tally.take(STARTED)
    clock.now += 50.0
    assert tally.times_real_time is None and tally.left_s is None
    assert "real time" not in totals(tally) and "left" not in totals(tally)


def test_audio_in_flight_is_not_counted_twice_when_its_shard_commits() -> None:
    clock = Clock()
    tally = tally_at(clock)
    tally.take(events.InFlight(100.0))
    before = tally.done_s
    tally.take(DONE)
    assert tally.done_s == before


def test_done_never_exceeds_the_plan() -> None:
    tally = tally_at(Clock())
    tally.take(events.InFlight(5000.0))
    assert tally.done_s == 1000.0 and tally.left_s == 0.0


def test_totals_in_one_line() -> None:
    assert totals(tally_at(Clock())) == (
        "4.7 min of about 15.3 min audio (36 %), 32.5 x real time, 138 rows ok, 12 quarantined, "
        "about 10.7 min audio left, about 16 s"
    )


def test_rows_in_quarantine_count_no_audio() -> None:
    clock = Clock()
    tally = RunTotals(clock)
    tally.take(dataclasses.replace(STARTED, shards_done=0, seconds_done=0.0, audio_s_done=0.0))
    tally.take(READY)
    clock.now += 2.0
    tally.take(dataclasses.replace(DONE, rows_ok=0, rows_bad=50, seconds=1000.0, audio_s=0.0))
    assert (tally.audio_s, tally.times_real_time, tally.share) == (0.0, None, 1.0)
    assert totals(tally).startswith("0 s audio (100 %), ") and "real time" not in totals(tally)


def test_a_finished_run_is_no_estimate() -> None:
    """60 s of audio that the plan took for 83 s."""
    clock = Clock()
    tally = RunTotals(clock)
    tally.take(dataclasses.replace(STARTED, seconds_total=83.0, seconds_done=0.0, audio_s_done=0.0))
    tally.take(READY)
    clock.now += 2.0
    tally.take(dataclasses.replace(DONE, seconds=83.0, audio_s=60.0))
    assert totals(tally).startswith("60 s audio (100 %), 30.0 x real time")
    record = tally.to_dict()
    assert (record["audio_s_done"], record["audio_s_total"], record["audio_s_left"]) == (60, 60, 0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (119.4, "119 s"), (150, "2.5 min"), (9000, "2.50 h")]
)
def test_audio_in_people_s_units(seconds: float, text: str) -> None:
    assert audio(seconds) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (3e15, "3000.0 TB")],
)
def test_bytes_in_decimal_units(n: float, text: str) -> None:
    assert bytes_text(n) == text


def test_json_lines_are_one_object_each_and_the_summary_is_last() -> None:
    stream, clock = io.StringIO(), Clock()
    reporter = JsonLines(stream, clock)
    end = events.JobFinished(
        "done", 0, "done: ...", "out", 10, 0, 450, 50, 800.0, 20.0, 40.0, {"truncated": 50}
    )
    for event in (STARTED, READY, events.InFlight(8.0), DONE, end):
        reporter(event)
    records = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [record["event"] for record in records] == [
        "job_started", "workers_ready", "progress", "shard_done", "summary",
    ]  # fmt: skip
    assert records[2]["audio_s_done"] == 158.0 and records[2]["share_done"] == 0.208
    assert records[2]["audio_s_left"] == 792.0
    assert records[-1]["exit_code"] == 0 and records[-1]["bad_by_class"] == {"truncated": 50}


def test_the_last_lines_say_what_a_second_of_audio_has_cost() -> None:
    end = events.JobFinished(
        "done", 0, "done: ...", "out", 10, 0, 450, 50, 800.0, 20.0, 40.0, {},
        {"fetch": 0.0016, "model": 2.8, "idle": 0.4},
    )  # fmt: skip
    news, result = io.StringIO(), io.StringIO()
    PlainLines(news, result, Clock())(end)
    said = "CPU milliseconds per second of audio: model 3.50, idle 0.50"
    assert result.getvalue().splitlines() == ["done: ..."]
    assert news.getvalue().splitlines() == [said]
    screen, result = io.StringIO(), io.StringIO()
    bar = Bar(console(file=screen, width=100), result)
    bar(end)
    bar.close()
    assert said in screen.getvalue() and "done" not in screen.getvalue()
    assert result.getvalue().splitlines() == ["done: ..."]
    assert cost(READY) is None


def test_plain_lines_tell_news_at_once_and_totals_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    reporter = PlainLines(stream, io.StringIO(), clock)
    reporter(STARTED)
    reporter(events.InFlight(0.0))
    reporter(READY)
    for second in range(70):
        clock.now += 1.0
        reporter(events.InFlight(min(second, 9)))
    reporter(events.CulpritFound("00003", "a.wav", "the worker process died"))
    lines = stream.getvalue().splitlines()
    assert (
        lines[0]
        == "speech: 500 rows, about 16.7 min audio in 10 shards, 2 already committed -> out"
    )
    assert "worker ready after 3.0 s (cpu, 2 threads)" in lines[1]
    # After 5 s and 10 s with progress; then nothing moves and a minute passes in silence.
    assert [line.split(" ")[0] for line in lines if "x real time" in line] == ["2.6", "2.6", "2.6"]
    assert lines[-1] == "shard 00003: row 'a.wav' quarantined: the worker process died"


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


RESULT = events.JobFinished(
    "done", 0, "done: 450 rows ok", "out", 10, 0, 450, 50, 800.0, 20.0, 40.0, {}
)


def told(errors: io.StringIO | None = None, **options: Any) -> tuple[str, str]:
    """Return standard output and standard error of a run."""
    output, errors = io.StringIO(), errors or io.StringIO()
    reporter = make_reporter(output=output, errors=errors, **options)
    for event in (STARTED, READY, DONE, RESULT):
        reporter(event)
    reporter.close()
    return output.getvalue(), errors.getvalue()


def test_results_go_to_standard_output_and_news_to_standard_error() -> None:
    output, errors = told()
    assert output == "done: 450 rows ok\n"
    assert "speech: 500 rows" in errors and "done" not in errors
    output, errors = told(Terminal())
    assert output == "done: 450 rows ok\n" and "speech: 500 rows" in errors
    for options in ({"as_json": True}, {"log_format": "json"}):
        output, errors = told(**options)
        assert [json.loads(line)["event"] for line in output.splitlines()] == [
            "job_started", "workers_ready", "shard_done", "summary",
        ]  # fmt: skip
        assert errors == ""


@pytest.mark.parametrize("options", [{}, {"as_json": True}, {"log_format": "json"}])
def test_quiet_leaves_the_result_alone(options: dict[str, Any]) -> None:
    output, errors = told(Terminal(), quiet=True, **options)
    (line,) = output.splitlines()
    assert "done: 450 rows ok" in line and errors == ""


class Full(io.StringIO):
    """A stream that fails after some lines."""

    def __init__(self, lines: int, error: Exception) -> None:
        super().__init__()
        self._left, self._error = lines, error

    def write(self, text: str) -> int:
        if text.endswith("\n"):
            self._left -= 1
        if self._left < 0:
            raise self._error
        return super().write(text)


@pytest.mark.parametrize(
    "error",
    [
        BrokenPipeError(32, "Broken pipe"),
        OSError(28, "No space left on device"),
        OutputLost(OSError(28, "No space left on device")),
        ValueError("I/O operation on closed file."),
    ],
    ids=["pipe", "full", "lost", "closed"],
)
def test_a_run_goes_on_where_its_output_cannot_be_written(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = make_reporter(as_json=True, output=Full(2, error))
    for event in (STARTED, READY, DONE, DONE, RESULT):
        reporter(event)
    reporter.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("earmill: ") and line.endswith("the run goes on without it")


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_terminal_of_any_width_shows_bar_and_time_left(width: int) -> None:
    stream, clock = Terminal(), Clock()
    bar = Bar(
        console(file=stream, width=width, force_terminal=True, color_system="standard"),
        clock=clock,
    )
    for event in (STARTED, READY):
        bar(event)
    clock.now += 4.0
    bar(DONE)
    bar(events.InFlight(60.0))
    bar.refresh()
    frame = stream.getvalue().rsplit("\r", 1)[-1]
    bar.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame).rstrip("\n")
    assert len(shown) <= width and "\n" not in shown
    assert shown.count("\u2501") + shown.count("\u2578") + shown.count("\u257a") == (
        BAR_WIDTH if width >= 60 else BAR_WIDTH // 2
    )
    assert "36 %, about 16 s" in shown
    assert ("12 quarantined" in shown) == (width >= 80)
    # The cursor is visible again.
    text = stream.getvalue()
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")


def test_news_on_a_terminal_are_text_whatever_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    reporter = make_reporter(errors=stream)
    for event in (STARTED, READY, events.ShardRetry("00004", 1, "[red] :smile: \x1b]0;x\x07")):
        reporter(event)
    reporter.close()
    assert "[red] :smile: \\x1b]0;x\\x07" in stream.getvalue()


def test_a_bar_leaves_the_standard_streams_to_others() -> None:
    """Ray's session sets them too; whoever puts them back last would keep the bar's stand-in."""
    before = sys.stdout, sys.stderr
    bar = Bar(console(file=Terminal(), force_terminal=True))
    bar(STARTED)
    during = sys.stdout, sys.stderr
    bar.close()
    assert during == before


def test_plain_lines_show_control_characters_instead_of_obeying_them() -> None:
    stream = io.StringIO()
    PlainLines(stream, stream, Clock())(events.WorkerLost(0, "a\x1b[2Jb\r\u202ec\nd"))
    assert stream.getvalue() == "worker 0 lost: a\\x1b[2Jb\\r\\u202ec\\nd; starting it again\n"
