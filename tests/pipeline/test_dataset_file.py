"""dataset.json is written once, and guards an output against another job."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.dataset_file import DatasetFile, changed_keys, open_dataset, read_dataset
from pipeline.errors import OutputError
from pipeline.layout import Layout
from tests.pipeline.outputs import SPEC, dataset_file, make_row, publish


def test_it_is_written_once_and_read_back_equal(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    assert read_dataset(layout) is None
    first = dataset_file()
    assert open_dataset(layout, first) == first
    stored = layout.read_bytes("dataset.json")
    again = dataset_file(created="2030-01-01T00:00:00Z", name="renamed", provenance={})
    assert open_dataset(layout, again) == first
    assert layout.read_bytes("dataset.json") == stored
    assert read_dataset(layout) == first
    assert DatasetFile.from_json(first.to_json()) == first


def test_drivers_that_start_together_agree(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        names = [f"job{n}" for n in range(8)]
        got = list(pool.map(lambda name: open_dataset(layout, dataset_file(name=name)), names))
    assert len({dataset.name for dataset in got}) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"spec_sha256": "99" * 32, "spec": {**SPEC, "audio": {"channels": "left"}}},
            r"belongs to spec abababababab.*\(different: audio\)",
        ),
        ({"spec_sha256": "99" * 32}, "not visible in the spec"),
        ({"plan_id": "plan1"}, "belongs to plan plan0, the source now gives plan1"),
        ({"buffers_sha256": {"dau1997": "0"}}, "coefficients differ"),
        ({"buffers_sha256": {}}, "coefficients differ"),
    ],
)
def test_another_job_is_refused_in_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    layout = Layout.open(tmp_path)
    open_dataset(layout, dataset_file())
    with pytest.raises(OutputError, match=message) as caught:
        open_dataset(layout, dataset_file(**changes))
    assert "\n" not in str(caught.value)
    assert read_dataset(layout) == dataset_file()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            lambda data: json.dumps({**data, "layout_version": 2}),
            "expected layout version 1, got 2",
        ),
        (lambda data: json.dumps(data)[:50], "not readable"),
        (lambda data: json.dumps({k: data[k] for k in data if k != "plan_id"}), "plan_id"),
        (lambda data: "null", "not readable"),
    ],
)
def test_a_foreign_or_damaged_file_is_refused(text: Any, message: str, tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    layout.write_bytes("dataset.json", text(json.loads(dataset_file().to_json())).encode())
    for use in (lambda: read_dataset(layout), lambda: open_dataset(layout, dataset_file())):
        with pytest.raises(OutputError, match=message):
            use()


def test_a_place_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path / "a")
    publish(layout, rows=[make_row("a")])
    with pytest.raises(OutputError, match="already holds data, rows, commits"):
        open_dataset(layout, dataset_file())
    layout = Layout.open(tmp_path / "b")
    layout.write_bytes("README.md", b"my notes")
    with pytest.raises(OutputError, match=r"already holds README\.md"):
        open_dataset(layout, dataset_file())
    assert layout.read_bytes("README.md") == b"my notes"


def test_lock_and_plan_may_come_first(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    layout.write_bytes("driver.json", b"{}")
    layout.write_bytes("plan/plan0.parquet", b"")
    assert open_dataset(layout, dataset_file()) == dataset_file()


def test_changed_keys_are_named_with_their_path() -> None:
    stored = {"a": {"b": 1, "c": [1, 2]}, "d": 1}
    assert changed_keys(stored, {"a": {"b": 2, "c": [1, 2]}, "e": 1}) == ["a.b", "d", "e"]
    assert changed_keys(stored, {"a": {"b": 1, "c": (1, 2)}, "d": 1}) == []
