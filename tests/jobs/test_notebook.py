"""A job in a notebook: a bar by widgets, and results as tables. A real kernel runs it."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

from tests.chaos.jobs import write_corpus, write_job

CELLS = (
    "import earmill",
    "one = ['run.executor=local', 'run.workers=1']\n"
    "end = earmill.extract({job!r}, overrides=one, progress=True)",
    "end",
    "earmill.plan({job!r})",
)


@pytest.mark.long
def test_a_job_shows_a_bar_and_its_result_a_table(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 2)
    job = str(write_job(tmp_path / "job.yaml", corpus, tmp_path / "out"))
    cells = [nbformat.v4.new_code_cell(text.format(job=job)) for text in CELLS]
    made = nbformat.v4.new_notebook(cells=cells)
    kernel = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(made, timeout=200, resources=kernel).execute()
    _, ran, end, plan = (cell["outputs"] for cell in made.cells)
    widgets = "application/vnd.jupyter.widget-view+json"
    assert any(widgets in one.get("data", {}) for one in ran)
    said = "".join(one.get("text", "") or one.get("data", {}).get("text/plain", "") for one in ran)
    assert "done: 2 rows ok" in said
    assert [one["output_type"] for one in ran if one["output_type"] == "error"] == []
    for shown, name in ((end, "JobFinished"), (plan, "JobCost")):
        (data,) = [one["data"] for one in shown]
        assert data["text/html"].startswith(f"<table><caption>{name}</caption>")
