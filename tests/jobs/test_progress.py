"""Events in, text out: totals, rates and times left against hand arithmetic, on a clock we set."""

from __future__ import annotations

import io
import json

import pytest

from jobs.progress import (
    JsonLines,
    PlainLines,
    Tally,
    audio,
    bytes_text,
    make_reporter,
    totals,
)
from pipeline import events


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
)
READY = events.WorkersReady(workers=1, threads=2, device="cpu", start_s=3.0)
DONE = events.ShardDone(shard_id="00002", rows_ok=48, rows_bad=2, seconds=100.0, nbytes=5)


def tally_at(clock: Clock) -> Tally:
    """100 s committed and 60 s in flight, 4 s after the workers were ready."""
    tally = Tally(clock)
    tally.take(STARTED)
    tally.take(READY)
    clock.now += 4.0
    tally.take(DONE)
    tally.take(events.InFlight(60.0))
    return tally


def test_rate_and_time_left_count_audio_of_this_run() -> None:
    tally = tally_at(Clock())
    assert tally.done_s == 360.0
    # Of these, 200 s were there before; 160 s took 4 s.
    assert tally.times_real_time == pytest.approx(40.0)
    assert tally.left_s == pytest.approx(640.0 / 40.0)
    assert (tally.rows_ok, tally.rows_bad) == (138, 12)


def test_nothing_is_claimed_before_there_is_work() -> None:
    clock = Clock()
    tally = Tally(clock)
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
        "6.0 min of 16.7 min audio (36 %), 40.0 x real time, 138 rows ok, 12 quarantined, "
        "10.7 min audio left, about 16 s"
    )


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
    assert records[2]["audio_s_done"] == 208.0 and records[2]["audio_s_left"] == 792.0
    assert records[-1]["exit_code"] == 0 and records[-1]["bad_by_class"] == {"truncated": 50}


def test_plain_lines_tell_news_at_once_and_totals_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    reporter = PlainLines(stream, clock)
    reporter(STARTED)
    reporter(events.InFlight(0.0))
    reporter(READY)
    for second in range(70):
        clock.now += 1.0
        reporter(events.InFlight(min(second, 9)))
    reporter(events.RowGuilty("00003", "a.wav", "the worker process died"))
    lines = stream.getvalue().splitlines()
    assert lines[0] == "speech: 500 rows, 16.7 min audio in 10 shards, 2 already committed -> out"
    assert "worker ready after 3.0 s (cpu, 2 threads)" in lines[1]
    # After 5 s and 10 s with progress; then nothing moves and a minute passes in silence.
    assert [line.split(" ")[0] for line in lines if "x real time" in line] == ["3.4", "3.5", "3.5"]
    assert lines[-1] == "shard 00003: row 'a.wav' quarantined: the worker process died"


def test_a_stream_that_is_no_terminal_gets_plain_lines() -> None:
    assert isinstance(make_reporter(as_json=False, stream=io.StringIO()), PlainLines)
    assert isinstance(make_reporter(as_json=True, stream=io.StringIO()), JsonLines)


class Terminal(io.StringIO):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream = Terminal()
    reporter = make_reporter(as_json=False, stream=stream)
    for event in (STARTED, READY, DONE, events.ShardRetry("00004", 1, "[red] is no markup")):
        reporter(event)
    reporter.close()
    text = stream.getvalue()
    assert "of 16.7 min audio" in text and "138 rows ok, 12 quarantined" in text
    assert "[red] is no markup" in text
    # The cursor is visible again.
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")
