"""The vector exponential, logarithm, sum and transposition against numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from amtcore.kernels.vector.elementary import vdecay, vexp, vlog
from amtcore.kernels.vector.jit import kernel
from amtcore.kernels.vector.memory import transpose
from amtcore.kernels.vector.simd import (
    LANES,
    any_greater,
    copysign,
    fma,
    narrow_lanes,
    vload,
    vload_narrow,
    vsplat,
    vstore,
    vsum,
)


@kernel
def _exp(x, out):  # type: ignore[no-untyped-def]
    for i in range(len(x) // LANES):
        vstore(out, i * LANES, vexp(vload(x, i * LANES)))


@pytest.mark.parametrize(("dtype", "low", "ulps"), [("float32", -79, 4), ("float64", -699, 4)])
def test_exponential(dtype: str, low: float, ulps: int) -> None:
    x = np.linspace(low, 79, 1000 * LANES).astype(dtype)
    out = np.empty_like(x)
    _exp(x, out)
    expected = np.exp(x.astype(np.float64))
    error = np.abs(out.astype(np.float64) - expected) / expected
    # The argument reduction keeps the relative error near the rounding of x * log2(e).
    assert error.max() < ulps * np.finfo(dtype).eps


@kernel
def _log(x, out):  # type: ignore[no-untyped-def]
    for i in range(len(x) // LANES):
        vstore(out, i * LANES, vlog(vload(x, i * LANES)))


@pytest.mark.parametrize(("dtype", "power"), [("float32", 37), ("float64", 307)])
def test_logarithm(dtype: str, power: int) -> None:
    wide = np.logspace(-power, power, 500 * LANES)
    near_one = 1 + np.linspace(-0.3, 0.4, 500 * LANES)
    x = np.concatenate((wide, near_one)).astype(dtype)
    out = np.empty_like(x)
    _log(x, out)
    expected = np.log(x.astype(np.longdouble))
    error = np.abs(out - expected) / np.maximum(np.abs(expected), np.finfo(dtype).tiny)
    assert error[expected != 0].max() < 3 * np.finfo(dtype).eps
    assert (out[expected == 0] == 0).all()


@kernel
def _line(x, factor, out):  # type: ignore[no-untyped-def]
    for at in range(0, len(x), narrow_lanes()):
        part = vload_narrow(x, at)
        if any_greater(part, vsplat(part, 0.0)):
            vstore(out, at, fma(part, vsplat(part, factor), part))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_narrow_vectors_are_parts_of_whole_ones(dtype: str) -> None:
    x = np.random.default_rng(1).standard_normal(3 * LANES).astype(dtype)
    x[LANES : 2 * LANES] = -1.0
    out = np.zeros_like(x)
    _line(x, 0.5, out)
    expected = (1.5 * x.astype(np.longdouble)).astype(dtype)
    expected[LANES : 2 * LANES] = 0.0
    np.testing.assert_array_equal(out, expected)


@kernel
def _sums(x, sign, out):  # type: ignore[no-untyped-def]
    for i in range(len(out)):
        out[i] = vsum(copysign(vload(x, i * LANES), vload(sign, i * LANES)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_signed_sum(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, sign = rng.standard_normal((2, 100, LANES)).astype(dtype)
    out = np.empty(100, dtype)
    _sums(x.ravel(), sign.ravel(), out)
    expected = np.copysign(x, sign).astype(np.float64).sum(1)
    assert np.abs(out - expected).max() < 20 * np.finfo(dtype).eps * np.abs(x).sum(1).max()


@kernel
def _turned(x, rows, columns, wanted, out):  # type: ignore[no-untyped-def]
    transpose(x.ravel(), 3, x.shape[1], rows, columns, out.ravel(), out.shape[1], wanted)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("rows", "columns"), [(32, 128), (31, 57), (17, 16), (5, 3), (1, 40)])
def test_transposition_repeats_the_last_row(rows: int, columns: int, dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((rows, columns + 3)).astype(dtype)
    out = np.full((columns, LANES), np.nan, dtype)
    _turned(x, rows, columns, LANES, out)
    expected = x[np.minimum(np.arange(LANES), rows - 1), 3:].T
    np.testing.assert_array_equal(out, expected)


@kernel
def _powers(x, out):  # type: ignore[no-untyped-def]
    for i in range(len(x) // LANES):
        vstore(out, i * LANES, vdecay(vload(x, i * LANES)))


@pytest.mark.parametrize(("dtype", "low", "ulps"), [("float32", -125, 3), ("float64", -1021, 2)])
def test_powers_of_two(dtype: str, low: float, ulps: int) -> None:
    x = np.linspace(low, 0, 1000 * LANES).astype(dtype)
    beyond = np.array([low - 1, -1e30, -np.inf, np.nan] * (LANES // 4), dtype)
    out = np.empty(len(x) + LANES, dtype)
    _powers(np.concatenate((x, beyond)), out)
    expected = np.exp2(x.astype(np.longdouble))
    inside = x > low
    error = np.abs(out[: len(x)] - expected)[inside] / expected[inside]
    assert error.max() < ulps * np.finfo(dtype).eps
    assert out[len(x) - 1] == 1.0 and not out[len(x) :].any()
