"""Conditions on quarantined rows select as SQL would, and nothing else is accepted."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest

from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.dataset.where import everything, parse_where

COLUMNS = ("row_id", "uri", "stage", "error_class", "message", "attempts")
ROWS = [
    ("a.wav", "s3://x/2019/a.wav", "fetch", "unreadable", "it's away", 1),
    ("b.wav", "s3://x/2020/b.wav", "fetch", "unreadable", "503 (slow)", 3),
    ("c_1.wav", "s3://x/2019/c_1.wav", "decode", "truncated", 'a "cut"\nfile', 1),
    ("d%.wav", "s3://x/2021/d%.wav", "decode", "not_audio", None, 2),
]


def as_dict(row: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(COLUMNS, row, strict=True))


@pytest.mark.parametrize(
    "text",
    [
        "error_class = 'unreadable'",
        "error_class != 'unreadable' and stage <> 'fetch'",
        "error_class in ('truncated', 'not_audio') and attempts > 1",
        "error_class not in ('truncated','not_audio')",
        "uri like '%/2019/%'",
        "row_id like 'c_1.wa_' or row_id like 'd%'",
        "uri not like '%2020%' and message not like '%cut%'",
        "not (stage = 'fetch' or attempts >= 2)",
        "stage = 'fetch' or stage = 'decode' and attempts = 2",
        "(stage = 'fetch' or stage = 'decode') and attempts = 2",
        "NOT stage = 'fetch' AND attempts < 2",
        "message = 'it''s away'",
        "message like '%cut%'",
        "attempts <= 1.5",
        "message != 'x'",
    ],
)
def test_it_selects_what_sqlite_selects(text: str) -> None:
    database = sqlite3.connect(":memory:")
    database.execute(f"create table q ({', '.join(COLUMNS)})")
    database.executemany("insert into q values (?, ?, ?, ?, ?, ?)", ROWS)
    database.execute("pragma case_sensitive_like = on")
    expected = [row[0] for row in database.execute(f"select row_id from q where {text}")]
    database.close()
    chosen = parse_where(text)
    assert [row[0] for row in ROWS if chosen(as_dict(row))] == expected
    assert 0 < len(expected) < len(ROWS)


def test_error_is_short_for_error_class_and_quotes_may_be_double() -> None:
    chosen = parse_where('error == "unreadable"')
    assert [row[0] for row in ROWS if chosen(as_dict(row))] == ["a.wav", "b.wav"]
    assert all(everything(as_dict(row)) for row in ROWS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a column"),
        ("colour = 'red'", "got 'colour'"),
        ("error = unreadable", "expected text in quotes for error_class, got 'unreadable'"),
        ("error = 'unreadable", 'cannot read "\'unreadable"'),
        ("error 'x'", r"expected =, !=, in or like"),
        ("error in 'x'", r"expected '\('"),
        ("error in ()", "expected text in quotes"),
        ("(error = 'x'", r"expected '\)', got 'the end'"),
        ("error = 'x' error = 'y'", "expected and, or, or the end"),
        ("error = 'x'; drop", "cannot read"),
        ("attempts = 'x'", "expected a number"),
        ("attempts like 1", "expected text columns for like"),
        ("error not = 'x'", "expected =, !=, in or like"),
        ("__import__('os')", "expected a column"),
        ("(" * 60 + "error = 'x'" + ")" * 60, "nested deeper"),
        ("error = '" + "x" * 10_000 + "'", "at most"),
    ],
)
def test_anything_else_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        parse_where(text)
    assert "\n" not in str(caught.value) and "--where" in str(caught.value)
