"""What others wrote is shown, never obeyed."""

from __future__ import annotations

import re

import pytest

from earmill.pipeline.common.text import MESSAGE_LIMIT, named_line, one_line, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a.wav", "a.wav"),
        ("größe 猫.wav", "größe 猫.wav"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\rb\nc\td\x7f\x00", "a\\rb\\nc\\td\\x7f\\x00"),
        ("\x9b31m", "\\x9b31m"),
        ("gpj\u202ecod.exe", "gpj\\u202ecod.exe"),
        ("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff"),
        ("line\u2028break", "line\\u2028break"),
        ("not \udcff utf-8", "not \\udcff utf-8"),
        ("\U000e0041", "\\U000e0041"),
    ],
)
def test_nothing_that_acts_on_a_terminal_is_left(text: str, shown: str) -> None:
    assert visible(text) == shown
    visible(text).encode("utf-8")


def test_a_message_is_one_line() -> None:
    assert one_line("a\n  b\x1b[1m\r\nc") == "a b\\x1b[1m c"
    secret = OSError("no\u202e\nhttps://me:pw@host/a?sig=1")
    assert one_line(secret) == "no\\u202e https://***@host/a?***"
    assert one_line(one_line("a\x1b")) == "a\\x1b"
    assert visible("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_an_exception_has_its_class_a_bound_and_where_asked_its_place() -> None:
    assert named_line(KeyError()) == "KeyError: no message"
    assert len(named_line(ValueError("x" * 10_000))) == MESSAGE_LIMIT
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        assert named_line(error) == "ValueError: two lines"
        place = r"ValueError: two lines \(test_plain_text\.py:\d+ test_an_exception_has.*\)"
        assert re.fullmatch(place, named_line(error, where=True))
