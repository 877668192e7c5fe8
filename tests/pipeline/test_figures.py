"""Figures for people, and times that have passed or are left."""

from __future__ import annotations

import pytest

from earmill.pipeline.common.text import duration, figure


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (0.00001, "less than 0.01"), (0.0916, "0.09"), (1.24, "1.2"), (12.34, "12.3"),
        (123.4, "123"), (12345.6, "12,346"),
    ],
)  # fmt: skip
def test_a_figure_has_the_digits_that_count(value: float, text: str) -> None:
    assert figure(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "under 1 s"), (0.0916, "under 1 s"), (33.4, "33 s"), (192, "3.2 min"),
        (9000, "2.5 h"), (400_000, "4.6 d"),
    ],
)  # fmt: skip
def test_a_time_is_told_in_the_unit_of_its_size(seconds: float, text: str) -> None:
    assert duration(seconds) == text
