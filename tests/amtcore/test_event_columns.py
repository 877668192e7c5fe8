"""Events taken apart: columns and extremes are numpy's, whatever the table's memory is like."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from amtcore.kernels.vector.event_columns import split


@given(
    arrays.arrays(np.int32, st.tuples(st.integers(1, 50), st.just(3))),
    st.sampled_from(["own", "read-only", "reversed"]),
)
@settings(max_examples=100, deadline=None)
def test_columns_and_extremes(table: np.ndarray, memory: str) -> None:
    if memory == "reversed":
        table = table[::-1]
    table.flags.writeable = memory != "read-only"
    columns, extremes = split(table)
    for column, wanted in zip(columns, table.T, strict=True):
        np.testing.assert_array_equal(column, wanted)
        assert column.flags.writeable and column.flags.c_contiguous
    assert [column.dtype.name for column in columns] == ["int64", "int32", "int32"]
    low, high = table.min(axis=0), table.max(axis=0)
    assert extremes == (low[0], high[0], low[1], high[1])
    assert table.flags.writeable == (memory != "read-only")


def test_no_events_lie_in_an_empty_range() -> None:
    (frame, _, _), (first, last, lowest, highest) = split(np.zeros((0, 3), np.int32))
    assert len(frame) == 0 and first > last and lowest > highest


@pytest.mark.parametrize("table", [np.zeros((2, 4), np.int32), np.zeros((2, 3), np.int64)])
def test_another_table_is_refused(table: np.ndarray) -> None:
    with pytest.raises(ValueError, match="expected int32"):
        split(table)
