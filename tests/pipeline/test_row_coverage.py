"""Rows must add up: what publishing refuses, and the rules behind finalise and verify."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset.commit_record import commits, quarantined_rows, row_problems, some
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.outputs import STREAMS, make_bad, make_row, publish, stream

ROWS = [make_row("a.wav"), make_row("b.wav", 7), make_row("c.wav", 0)]


def _with(row_id: str, **changes: Any) -> Any:
    return replace(make_row(row_id), **changes)


WRONG: Mapping[str, tuple[dict[str, Any], str]] = {
    "missing": ({"rows": ROWS[:1], "plan_rows": ["a.wav", "lost.wav"]}, "row missing: 'lost.wav'"),
    "foreign": ({"rows": ROWS[:2], "plan_rows": ["a.wav"]}, "row not in the plan: 'b.wav'"),
    "double": ({"rows": [ROWS[0], ROWS[0]]}, "row twice: 'a.wav'"),
    "both": ({"rows": ROWS[:1], "bad": [make_bad("a.wav")]}, "good and in quarantine: 'a.wav'"),
    "dtype": (
        {"rows": ROWS, "dtype": "float32"},
        r"expected \(frames, 8\) float32, got .* float16",
    ),
    "width": ({"rows": ROWS, "streams": (stream(channels=(1,)), STREAMS[1])}, r"\(frames, 1\)"),
    "streams": ({"rows": ROWS, "streams": STREAMS[:1]}, r"expected the streams \['modulation'\]"),
    "info": ({"rows": ROWS, "info": {"when": object()}}, "not JSON serializable"),
    "fact": ({"rows": [_with("a", facts={"uri": "u", "x": [1]})]}, "column 'x': expected text"),
    "clash": ({"rows": [_with("a", facts={"seconds": 1.0})]}, "two columns are called 'seconds'"),
    "size": ({"rows": [_with("a", facts={"size": "big"})]}, "column 'size': expected int64"),
    "extra": ({"rows": ROWS, "extra_types": {"take": "int64"}}, r"got also \['speaker'\]"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_rows_that_do_not_fit_are_refused_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    settings, message = WRONG[name]
    layout = Layout.open(tmp_path)
    with pytest.raises(CommitError, match=message) as caught:
        publish(layout, **settings)
    assert str(caught.value).startswith("shard 00000 was not committed: ")
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("ok", "bad", "plan", "expected"),
    [
        ([("a", "a")], ["b"], ["a", "b"], []),
        ([], [], [], []),
        ([("a#ch0", "a"), ("a#ch1", "a")], [], ["a"], []),
        ([("a#ch0", "a")], ["a#ch1"], ["a"], []),
        ([], ["a#ch0", "a#ch1"], ["a"], []),
        # A file may be called like a channel; the plan decides.
        ([("x", "x")], ["x#ch1"], ["x", "x#ch1"], []),
        ([("a", "a")], [], ["a", "b"], ["row missing: 'b'"]),
        ([("a", "a")], ["z"], ["a"], ["row not in the plan: 'z'"]),
        ([("a", "a")], ["z#ch1"], ["a"], ["row not in the plan: 'z'"]),
        ([("a", "a"), ("a", "a")], [], ["a"], ["row twice: 'a'"]),
        ([], ["a", "a"], ["a"], ["row twice: 'a'"]),
        ([("a#ch0", "a")], ["a"], ["a"], ["row both good and in quarantine: 'a'"]),
        ([("a#ch0", "a")], ["a#ch0"], ["a"], ["row twice: 'a#ch0'"]),
        ([("z", "z")], [], ["a"], ["row not in the plan: 'z'", "row missing: 'a'"]),
    ],
)
def test_every_plan_row_is_covered_once(
    ok: Sequence[tuple[str, str]], bad: Sequence[str], plan: Sequence[str], expected: list[str]
) -> None:
    assert row_problems(ok, bad, plan) == expected


def test_covered_plan_rows_are_counted_once(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    rows = [make_row(f"a#ch{k}", plan_row_id="a", channel=k) for k in range(3)]
    bad = [make_bad("a#ch3"), make_bad("b"), make_bad("take#ch2")]
    assert publish(layout, rows=rows, bad=bad, plan_rows=["a", "b", "take#ch2"])
    assert publish(layout, "00001", plan_rows=[])
    assert [record.plan_rows for record in commits(layout).values()] == [3, 0]


def test_order_is_that_of_the_plan_then_of_the_channel(tmp_path: Path) -> None:
    layout = Layout.open(tmp_path)
    rows = [make_row(f"{n}#ch{k}", plan_row_id=n, channel=k) for k in (10, 9) for n in ("z", "a")]
    publish(layout, rows=rows, bad=[make_bad("m"), make_bad("z#ch2")], plan_rows=["z", "m", "a"])
    record = commits(layout)["00000"]
    stored = read_table(layout, str(record.path("rows")), ["row_id"])["row_id"].to_pylist()
    assert stored == ["z#ch9", "z#ch10", "a#ch9", "a#ch10"]
    assert [row.row_id for row in quarantined_rows(layout, record)] == ["z#ch2", "m"]


def test_long_lists_are_cut() -> None:
    assert some(["b", "a"]) == "'a', 'b'"
    assert some(str(n) for n in range(8)) == "'0', '1', '2', '3', '4' and 3 more"
