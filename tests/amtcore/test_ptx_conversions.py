"""Each conversion of the PTX interpreter against numpy, at ordinary numbers and at the edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.amtcore.ptx_numbers import EDGES, RNG, N, floats, same
from tests.amtcore.ptx_texts import per_thread

ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("source", [np.float32, np.float64])
def test_floats_become_the_nearest_integer_in_range(source: Any, mode: str) -> None:
    x = floats(source, *EDGES, 1.5, 2.5, -1.5, 2.0**63, 1e30)
    x[N // 2 :] = RNG.standard_normal(N // 2) * 1e5
    f = f"f{8 * x.itemsize}"
    with np.errstate(all="ignore"):
        same(per_thread(f"cvt.{mode}.{f}.{f} %y, %x0;", source, x), ROUNDINGS[mode](x))
    for to in (np.int32, np.uint32, np.int64, np.uint64, np.int16, np.uint16):
        info = np.iinfo(to)
        width = info.bits
        nan = 1 << width - 1 if width == 64 or source is np.float64 else 0
        want = [
            nan if np.isnan(v)
            else (info.max if v > 0 else info.min) if np.isinf(v)
            else min(max(int(ROUNDINGS[mode](v)), info.min), info.max) % (1 << width)
            for v in x
        ]  # fmt: skip
        letter = "s" if info.min else "u"
        got = per_thread(f"cvt.{mode}.{letter}{width}.{f} %y, %x0;", to, x)
        wanted = np.array([each % (1 << width) for each in want], np.dtype(f"u{width // 8}"))
        same(got.view(wanted.dtype), wanted)


def test_subnormals_round_to_nothing_where_they_are_flushed() -> None:
    x = np.full(32, 1e-40, np.float32)
    assert (per_thread("cvt.rpi.s32.f32 %y, %x0;", np.int32, x) == 1).all()
    assert (per_thread("cvt.rpi.ftz.s32.f32 %y, %x0;", np.int32, x) == 0).all()
    assert (per_thread("cvt.rpi.ftz.f32.f32 %y, %x0;", np.float32, x) == 0).all()
    assert (per_thread("cvt.f64.f32 %y, %x0;", np.float64, x) == x).all()
    assert (per_thread("cvt.ftz.f64.f32 %y, %x0;", np.float64, x) == 0).all()
    wide = x.astype(np.float64)
    assert (per_thread("cvt.rn.f32.f64 %y, %x0;", np.float32, wide) == x).all()
    assert (per_thread("cvt.rn.ftz.f32.f64 %y, %x0;", np.float32, wide) == 0).all()


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64, np.uint64])
def test_integers_become_floats_rounded_once(kind: Any) -> None:
    x = floats(kind, 0, 1, 2**24 + 1)
    # Half-way by float64 alone: 2**53 + 2**29 + 1 goes up.
    if x.itemsize == 8:
        x[3] = 2**53 + 2**29 + 1
    t = f"{'s' if np.dtype(kind).kind == 'i' else 'u'}{8 * x.itemsize}"
    same(per_thread(f"cvt.rn.f32.{t} %y, %x0;", np.float32, x), x.astype(np.float32))
    same(per_thread(f"cvt.rn.f64.{t} %y, %x0;", np.float64, x), x.astype(np.float64))


def test_doubles_become_singles_rounded_once() -> None:
    x = np.concatenate([RNG.standard_normal(N - 32), [1 + 2.0**-24, 1 + 3 * 2.0**-24] * 16])
    same(per_thread("cvt.rn.f32.f64 %y, %x0;", np.float32, x), x.astype(np.float32))


def test_integers_of_other_widths_keep_their_sign_or_zeros() -> None:
    x = floats(np.uint64, 0)
    for to in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32):
        t = f"{'s' if np.dtype(to).kind == 'i' else 'u'}{8 * np.dtype(to).itemsize}"
        # The result fills its register by its own sign.
        same(
            per_thread(f"cvt.{t}.u64 %d20, %x0; mov.b64 %y, %d20;", np.int64, x),
            x.astype(to).astype(np.int64),
        )
        narrow = x.astype(to)
        got = per_thread(f"cvt.s64.{t} %y, %x0;", np.int64, x)
        same(got, narrow.astype(np.int64))


@pytest.mark.parametrize(
    "name", ["finite", "infinite", "number", "notanumber", "normal", "subnormal"]
)
def test_classes_of_floats(name: str) -> None:
    x = floats(np.float32, *EDGES)
    subnormal = (np.abs(x) < np.finfo(np.float32).tiny) & (x != 0)
    want = {
        "finite": np.isfinite(x),
        "infinite": np.isinf(x),
        "number": ~np.isnan(x),
        "notanumber": np.isnan(x),
        "normal": np.isfinite(x) & (x != 0) & ~subnormal,
        "subnormal": subnormal,
    }[name]
    code = f"testp.{name}.f32 %p0, %x0; selp.b32 %y, 1, 0, %p0;"
    same(per_thread(code, np.int32, x) != 0, want)
