"""dataset.json is written once, and guards an output against another job."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.dataset.description import DatasetFile, open_dataset, read_dataset
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.spec.messages import describe_changes
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import LAYOUT_VERSION
from tests.pipeline.outputs import SPEC, dataset_file, make_row, publish
from tests.pipeline.test_old_layout import STORED_2


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
            r"belongs to spec abab.*different: audio: nothing there, \{.channels.: .left.\}",
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
            lambda data: json.dumps({**data, "layout_version": 4}),
            "expected layout version 1, 2 or 3, got 4",
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


def test_changes_are_named_with_their_path_and_both_values() -> None:
    stored = {"a": {"b": 1, "c": [1, {"x": 2.5}]}, "d": 1}
    wanted = {"a": {"b": 2, "c": [1, {"x": "left"}]}, "e": 1}
    assert describe_changes(stored, wanted) == (
        'a.b: 1 there, 2 in the job; a.c.1.x: 2.5 there, "left" in the job; '
        "d: 1 there, nothing in the job; e: nothing there, 1 in the job"
    )
    assert describe_changes(stored, {"a": {"b": 1, "c": (1, {"x": 2.5})}, "d": 1}) == ""
    # A list that grew is one change; many changes and long values are cut.
    assert describe_changes([1], [1, 2]) == ": [1] there, [1, 2] in the job"
    many = describe_changes({}, {f"k{n}": "v" * 100 for n in range(9)})
    assert many.endswith("and 4 more") and len(many) < 600


@pytest.mark.parametrize(
    "damage",
    [
        {"spec": {}},
        {"spec": {**SPEC, "extract": 3}},
        {"streams": [1]},
        {"streams": 3},
        {"created": None},
        {"name": {"a": 1}},
    ],
)
def test_json_of_another_shape_is_refused_in_one_line(damage: Any, tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    data = json.loads(dataset_file().to_json()) | damage
    layout.write_bytes("dataset.json", json.dumps(data).encode())
    with pytest.raises(OutputError, match=r"dataset\.json is not readable"):
        read_dataset(layout)


def test_deeply_nested_json_is_refused_in_one_line(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    layout.write_bytes("dataset.json", b"[" * 100_000)
    with pytest.raises(OutputError, match="recursion limit"):
        read_dataset(layout)


def test_the_form_of_parquet_cells_is_kept_and_old_sets_are_nested() -> None:
    """A set of an earlier release says nothing, is spelled as it was, and goes on as it began."""
    text = (STORED_2 / "dataset.json").read_text()
    old = DatasetFile.from_json(text)
    assert old.parquet_form == "nested" and old.to_json() == text
    raised = DatasetFile.from_json(replace(old, layout_version=LAYOUT_VERSION).to_json())
    assert raised.parquet_form == "nested"
    new = dataset_file()
    assert new.parquet_form == "binary" and DatasetFile.from_json(new.to_json()) == new


def test_a_folder_that_holds_datasets_says_which(tmp_path: Path) -> None:
    for name in ("features", "other features"):
        open_dataset(Layout.open(tmp_path / name), dataset_file())
    with pytest.raises(OutputError) as caught:
        verify(Layout.open(tmp_path))
    places = " or ".join(str(tmp_path / name) for name in ("features", "other features"))
    assert str(caught.value).endswith(f"; did you mean {places}?")
    with pytest.raises(OutputError, match=r"output\.uri of a job$"):
        verify(Layout.open(tmp_path / "nowhere"))
