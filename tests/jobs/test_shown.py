"""Results at a prompt and in a notebook, and the messages of a job in Python's logging."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import earmill
from earmill.pipeline.dataset.garbage import Collected
from earmill.pipeline.dataset.snapshot import LogEntry, SnapshotDiff
from earmill.pipeline.dataset.verify import Report
from earmill.pipeline.driver.events import JobFinished
from earmill.pipeline.hub.push import Progress, Pushed
from earmill.pipeline.operations.deep_verify import DeepReport
from tests.chaos.jobs import FEW, write_corpus, write_job
from tests.pipeline.workers_here import workers_here

ROWS = tuple(f"row-{k}<b>" for k in range(2000))
RESULTS = [
    JobFinished(
        "done", 0, "done: ...", "out", 10, 0, 1450, 50, 800.0, 20.0, 40.0, {"truncated": 50}
    ),
    Report([f"data/{k}.parquet: missing <&>" for k in range(500)], 3, 4, 1450, 50, bytes=10**9),
    DeepReport(7, 100, 99, 1, 1e-6, ROWS),
    Collected((), ROWS, 2000, 10**9, 3),
    SnapshotDiff(LogEntry(1), LogEntry(2), ROWS, (), (), dict.fromkeys(ROWS, (None, "ok"))),
    Pushed("https://hub/x", "a" * 40, True, Progress(20, 10**6, 20, 10**6, 5, 10**5), ROWS),
]  # fmt: skip


@pytest.mark.parametrize("result", RESULTS, ids=lambda one: type(one).__name__)
def test_a_result_is_shown_in_a_few_words(result: object) -> None:
    name = type(result).__name__
    text = repr(result)
    assert text.startswith(f"<{name}: ") and len(text) < 400 and "\n" not in text
    table = result._repr_html_()  # type: ignore[attr-defined]
    assert table.startswith(f"<table><caption>{name}</caption><tr><th>")
    assert "<b>" not in table and "<&>" not in table


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shown")
    return write_job(folder / "job.yaml", write_corpus(folder / "corpus", 2), folder / "out")


def test_what_a_job_would_take_is_shown_in_a_few_words(job: Path) -> None:
    text = repr(earmill.plan(job))
    assert text.startswith("<JobCost: job: job, rows: 2, audio: about 2 s, shards: 2, in: ")
    assert "<td>2</td>" in earmill.plan(job)._repr_html_()


def bad_job(folder: Path) -> Path:
    """A job with two good rows and a bad one."""
    corpus = write_corpus(folder / "corpus", 2)
    (corpus / "bad.wav").write_bytes(b"no audio")
    return write_job(folder / "job.yaml", corpus, folder / "out", params=FEW, formats=["parquet"])


OVERRIDES = ["run.executor=local", "run.workers=1", "run.max_bad_fraction=0"]


def test_logging_hears_of_a_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """The job itself prints nothing, not even warnings: a row is bad."""
    with caplog.at_level(logging.INFO, logger="earmill"), workers_here():
        end = earmill.extract(bad_job(tmp_path), overrides=OVERRIDES, check=False)
    records = [record for record in caplog.records if record.name == "earmill"]
    said = [(record.levelname, record.getMessage()) for record in records]
    assert ("INFO", "listing the source ...") in said and said[-1] == ("ERROR", end.message)
    assert end.message.startswith("done: 2 rows ok, 1 quarantined")
    (bad,) = [text for level, text in said if level == "WARNING"]
    assert bad.startswith("row 'bad.wav' quarantined")
    assert records[-1].event == end  # type: ignore[attr-defined]
    assert capfd.readouterr() == ("", "")


SCRIPT = f"""
import earmill, logging, sys
if sys.argv[2] == "logs":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s:%(message)s")
end = earmill.extract(sys.argv[1], overrides={OVERRIDES}, check=False)
assert "torch" not in sys.modules, "a driver needs no torch, which takes half a gigabyte"
"""


@pytest.mark.long  # three processes import their modules; test_extract_process.py has them too
@pytest.mark.parametrize("how", ["silent", "logs"])
def test_a_script_prints_nothing_unless_it_asks(how: str, tmp_path: Path) -> None:
    """Not even warnings: a row is bad."""
    command = [sys.executable, "-c", SCRIPT, str(bad_job(tmp_path)), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if ":" in line]
    if how == "silent":
        assert done.stdout == ""
    else:
        assert "INFO:listing the source ..." in lines
        assert any(line.startswith("WARNING:row 'bad.wav' quarantined") for line in lines)
        assert lines[-1].startswith("ERROR:done: 2 rows ok, 1 quarantined")
