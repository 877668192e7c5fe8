"""Scratch of a kernel: parts of one room, side by side, and copies in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from amtcore.kernels.vector.jit import kernel
from amtcore.kernels.vector.memory import aligned, cut, cut_copy
from amtcore.kernels.vector.simd import CACHE_LINE, LANES, vload, vstore


@kernel
def _parts(values: Any, rows: int) -> Any:
    room = aligned(3 * rows * LANES + values.shape[0], values)
    first, room = cut(room, rows * LANES)
    copied, room = cut_copy(room, values)
    second, last = cut(room, rows * LANES)
    first[:], second[:], last[:] = 1.0, 2.0, 3.0
    return first, copied, second, last


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_parts_of_a_room_lie_side_by_side_and_begin_at_lines(dtype: Any) -> None:
    values = np.arange(5 * LANES, dtype=dtype)
    parts = _parts(values, 4)
    at = [part.ctypes.data for part in parts]
    assert [a % CACHE_LINE for a in at] == [0, 0, 0, 0]
    ends = [a + part.nbytes for a, part in zip(at, parts, strict=True)]
    assert at[1:] == ends[:-1]
    first, copied, second, last = parts
    np.testing.assert_array_equal(copied, values)
    assert {float(x) for x in first} == {1.0}
    assert {float(x) for x in second} == {2.0} and {float(x) for x in last} == {3.0}
    assert last.shape == (4 * LANES,)


def test_a_copy_in_a_room_is_a_copy() -> None:
    values = np.zeros(LANES, np.float32)
    _, copied, _, _ = _parts(values, 1)
    copied[:] = 7.0
    assert not values.any()


def test_the_frame_of_a_function_with_vectors_begins_at_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Code that is loaded from the cache has no text.
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    @kernel
    def copy(values: Any, out: Any) -> None:
        vstore(out, 0, vload(values, 0))

    values, out = np.arange(LANES, dtype=np.float32), np.zeros(LANES, np.float32)
    copy(values, out)
    np.testing.assert_array_equal(out, values)
    (code,) = copy.inspect_llvm().values()
    assert f"alignstack={CACHE_LINE}" in code or f"alignstack({CACHE_LINE})" in code
