"""Each instruction of the PTX interpreter against numpy, at ordinary numbers and at the edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from amtcore.errors import KernelError
from tests.amtcore.ptx_numbers import EDGES, RNG, Array, N, floats, flushed, same
from tests.amtcore.ptx_texts import per_thread

# A float64 calculation rounded once more equals float32 arithmetic for these four and the root.
FLOATS: dict[str, Callable[..., Any]] = {
    "add.rn": np.add,
    "sub.rn": np.subtract,
    "mul.rn": np.multiply,
    "div.rn": np.divide,
}


@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("name", FLOATS)
def test_float32_arithmetic_rounds_once_and_flushes(name: str, ftz: bool) -> None:
    x, y = floats(np.float32, *EDGES), floats(np.float32, *EDGES)
    with np.errstate(all="ignore"):
        y[: N // 2] = x[: N // 2] * RNG.standard_normal(N // 2).astype(np.float32)
        want = FLOATS[name](*(flushed(x), flushed(y)) if ftz else (x, y))
    code = f"{name}{'.ftz' if ftz else ''}.f32 %y, %x0, %x1;"
    same(per_thread(code, np.float32, x, y), flushed(want) if ftz else want)


@pytest.mark.parametrize("name", FLOATS)
def test_float64_arithmetic(name: str) -> None:
    x, y = floats(np.float64, *EDGES), floats(np.float64, *EDGES)
    with np.errstate(all="ignore"):
        want = FLOATS[name](x, y)
    same(per_thread(f"{name}.f64 %y, %x0, %x1;", np.float64, x, y), want)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_roots_and_reciprocals_are_rounded_correctly(kind: Any) -> None:
    x, f = floats(kind, *EDGES), f"f{8 * np.dtype(kind).itemsize}"
    with np.errstate(all="ignore"):
        same(per_thread(f"sqrt.rn.{f} %y, %x0;", kind, x), np.sqrt(x))
        same(per_thread(f"rcp.rn.{f} %y, %x0;", kind, x), kind(1) / x)


def test_a_fused_product_is_not_rounded_by_itself() -> None:
    """1 + 2**-23 squared, less its rounded square, leaves 2**-46: by two roundings nothing."""
    x = np.full(32, 1 + 2.0**-23, np.float32)
    y = -(x * x)
    assert (per_thread("fma.rn.f32 %y, %x0, %x0, %x1;", np.float32, x, y) == 2.0**-46).all()
    # Rounded to float64 and then to float32, this one would go to the even neighbour below.
    a, b, c = np.float32(1 + 2.0**-12), np.float32(1 + 2.0**-12), np.float32(2.0**-60)
    exact = (4097**2 * 2**36 + 1, 2**60)
    got = per_thread(
        "fma.rn.f32 %y, %x0, %x1, %x2;", np.float32, *(np.full(32, v) for v in (a, b, c))
    )
    assert (got == np.float32(1 + 2.0**-11 + 2.0**-23)).all(), exact
    wide = np.full(32, 1 + 2.0**-52)
    got = per_thread("fma.rn.f64 %y, %x0, %x0, %x1;", np.float64, wide, -(wide * wide))
    assert (got == 2.0**-104).all()


def test_nothing_is_contracted() -> None:
    x = np.full(32, 1 + 2.0**-23, np.float32)
    code = "mul.rn.f32 %y, %x0, %x0; add.rn.f32 %y, %y, %x1;"
    assert (per_thread(code, np.float32, x, -(x * x)) == 0).all()


def test_signs_follow_bits_and_flush_where_asked() -> None:
    x, y = floats(np.float32, *EDGES), floats(np.float32, *EDGES)
    same(per_thread("neg.f32 %y, %x0;", np.float32, x), -x)
    same(per_thread("abs.f32 %y, %x0;", np.float32, x), np.abs(x))
    same(per_thread("neg.ftz.f32 %y, %x0;", np.float32, x), -flushed(x))
    same(per_thread("abs.ftz.f32 %y, %x0;", np.float32, x), np.abs(flushed(x)))
    same(per_thread("copysign.f32 %y, %x0, %x1;", np.float32, x, y), np.copysign(y, x))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_extremes_prefer_numbers_to_nan_and_order_zeros(kind: Any) -> None:
    f = f"f{8 * np.dtype(kind).itemsize}"
    x = np.resize(np.array([0.0, -0.0, np.nan, 1.0, np.nan], kind), N)
    y = np.resize(np.array([-0.0, 0.0, 2.0, np.nan, np.nan, -3.0, np.inf], kind), N)
    low = np.where(
        np.signbit(x) & (x == y), x, np.where((x == y) & np.signbit(y), y, np.fmin(x, y))
    )
    high = np.where(
        ~np.signbit(x) & (x == y), x, np.where((x == y) & ~np.signbit(y), y, np.fmax(x, y))
    )
    same(per_thread(f"min.{f} %y, %x0, %x1;", kind, x, y), low)
    same(per_thread(f"max.{f} %y, %x0, %x1;", kind, x, y), high)
    nan = np.isnan(x) | np.isnan(y)
    same(per_thread(f"min.NaN.{f} %y, %x0, %x1;", kind, x, y), np.where(nan, np.nan, low))
    same(per_thread(f"max.NaN.{f} %y, %x0, %x1;", kind, x, y), np.where(nan, np.nan, high))


def test_extremes_flush_what_they_give() -> None:
    x = np.full(32, 1e-40, np.float32)
    assert (per_thread("max.ftz.f32 %y, %x0, %x0;", np.float32, x) == 0).all()
    assert (per_thread("max.f32 %y, %x0, %x0;", np.float32, x) == x).all()


ORDER = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def compared(name: str, x: Array, y: Array) -> Array:
    result: Array = eval(f"x {ORDER[name]} y", {"x": x, "y": y})
    return result


@pytest.mark.parametrize("name", ORDER)
def test_comparisons(name: str) -> None:
    x, y = (np.resize(each, N) for each in (floats(np.float32, *EDGES), floats(np.float32, *EDGES)))
    y[: N // 2] = x[: N // 2]
    nan = np.isnan(x) | np.isnan(y)
    choose = "selp.b32 %y, 1, 0, %p0;"
    got = per_thread(f"setp.{name}.f32 %p0, %x0, %x1; {choose}", np.int32, x, y)
    same(got != 0, compared(name, x, y) & ~nan)
    got = per_thread(f"setp.{name}u.f32 %p0, %x0, %x1; {choose}", np.int32, x, y)
    same(got != 0, compared(name, x, y) | nan)
    for kind in (np.int32, np.uint32, np.int64, np.uint64, np.int16, np.uint16):
        a, b = floats(kind, 0, 1), floats(kind, 0, 1)
        b[: N // 2] = a[: N // 2]
        letter = "s" if np.dtype(kind).kind == "i" else "u"
        code = f"setp.{name}.{letter}{8 * a.itemsize} %p0, %x0, %x1; {choose}"
        same(per_thread(code, np.int32, a, b) != 0, compared(name, a, b))


def test_comparisons_can_be_joined_and_flush() -> None:
    x, y = floats(np.int32, 0), floats(np.int32, 0)
    code = """
        setp.gt.s32 %p1, %x1, 0;
        setp.gt.and.s32 %p2|%p3, %x0, 0, %p1;
        selp.b32 %r0, 1, 0, %p2; selp.b32 %y, 2, %r0, %p3;"""
    want = np.where((x > 0) & (y > 0), 1, np.where((x <= 0) & (y > 0), 2, 0))
    same(per_thread(code, np.int32, x, y), want)
    tiny = np.full(32, 1e-40, np.float32)
    for ftz, want_it in (("", 1), (".ftz", 0)):
        code = f"setp.gt{ftz}.f32 %p0, %x0, 0f00000000; selp.b32 %y, 1, 0, %p0;"
        assert (per_thread(code, np.int32, tiny) == want_it).all()
    code = "setp.nan.f32 %p0, %x0, %x0; setp.num.f32 %p1, %x0, %x0; "
    z = floats(np.float32, *EDGES)
    got = per_thread(code + "selp.b32 %y, 1, 0, %p0; @%p1 add.s32 %y, %y, 2;", np.int32, z)
    same(got, np.where(np.isnan(z), 1, 2))


INTEGERS = [np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


@pytest.mark.parametrize("kind", INTEGERS)
def test_integer_arithmetic_wraps(kind: Any) -> None:
    x, y = floats(kind, 0, 1, 3), floats(kind, 0, 1, 7)
    t = f"{'s' if np.dtype(kind).kind == 'i' else 'u'}{8 * x.itemsize}"
    for code, want in (
        (f"add.{t} %y, %x0, %x1;", x + y),
        (f"sub.{t} %y, %x0, %x1;", x - y),
        (f"mul.lo.{t} %y, %x0, %x1;", x * y),
        (f"mad.lo.{t} %y, %x0, %x1, %x1;", x * y + y),
        (f"min.{t} %y, %x0, %x1;", np.minimum(x, y)),
        (f"max.{t} %y, %x0, %x1;", np.maximum(x, y)),
    ):
        same(per_thread(code, kind, x, y), want)
    exact = [int(a) * int(b) >> 8 * x.itemsize for a, b in zip(x, y, strict=True)]
    same(per_thread(f"mul.hi.{t} %y, %x0, %x1;", kind, x, y), np.array(exact, kind))


@pytest.mark.parametrize("kind", INTEGERS)
def test_integer_division_goes_toward_zero_and_never_stops(kind: Any) -> None:
    info = np.iinfo(kind)
    x = floats(kind, info.min, info.max, 7)
    y = RNG.integers(max(info.min, -9), 9, N).astype(kind)
    x[:4], y[:4] = (info.min, info.max, 7, info.min), (info.max, 0, 0, -1 if info.min else 1)
    t = f"{'s' if info.min else 'u'}{8 * x.itemsize}"
    pairs = [(int(a), int(b)) for a, b in zip(x, y, strict=True)]
    quotients = [
        (-1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)) for a, b in pairs
    ]
    rests = [a - q * b for (a, b), q in zip(pairs, quotients, strict=True)]
    mask = (1 << 8 * x.itemsize) - 1
    unsigned = np.dtype(f"u{x.itemsize}")
    got = per_thread(f"div.{t} %y, %x0, %x1;", kind, x, y).view(unsigned)
    same(got, np.array([q & mask for q in quotients], unsigned))
    got = per_thread(f"rem.{t} %y, %x0, %x1;", kind, x, y).view(unsigned)
    same(got, np.array([r & mask for r in rests], unsigned))


def test_wide_products() -> None:
    x, y = floats(np.int32, -1), floats(np.int32, -1)
    same(per_thread("mul.wide.s32 %y, %x0, %x1;", np.int64, x, y), x.astype(np.int64) * y)
    code = "mul.wide.s32 %d20, %x0, 1; mad.wide.s32 %y, %x0, %x1, %d20;"
    same(per_thread(code, np.int64, x, y), x.astype(np.int64) * y + x)
    u, v = x.view(np.uint32), y.view(np.uint32)
    same(per_thread("mul.wide.u32 %y, %x0, %x1;", np.uint64, u, v), u.astype(np.uint64) * v)


@pytest.mark.parametrize("width", [16, 32, 64])
def test_logic_and_shifts_beyond_the_width(width: int) -> None:
    x, y = floats(f"u{width // 8}", 0), floats(f"u{width // 8}", 0)
    kind, signed = x.dtype, x.view(f"i{width // 8}")
    for name, want in (("and", x & y), ("or", x | y), ("xor", x ^ y)):
        same(per_thread(f"{name}.b{width} %y, %x0, %x1;", kind, x, y), want)
    same(per_thread(f"not.b{width} %y, %x0;", kind, x), ~x)
    amounts = RNG.integers(0, 2 * width, N).astype(np.uint32)
    amounts[:2] = 2**32 - 1, width
    inside, cut = amounts < width, np.minimum(amounts, width - 1).astype(kind)
    for code, want in (
        (f"shl.b{width}", np.where(inside, x << cut, 0)),
        (f"shr.u{width}", np.where(inside, x >> cut, 0)),
        (f"shr.s{width}", (signed >> cut.view(signed.dtype)).view(kind)),
    ):
        same(per_thread(f"{code} %y, %x0, %x1;", kind, x, amounts), want.astype(kind))


def test_bit_counts() -> None:
    for width in (32, 64):
        x = floats(f"u{width // 8}", 0, 1) >> RNG.integers(0, width, N).astype(f"u{width // 8}")
        text = [f"{int(each):0{width}b}" for each in x]
        same(
            per_thread(f"popc.b{width} %y, %x0;", np.int32, x),
            np.array([t.count("1") for t in text]),
        )
        clz = [width - len(t.lstrip("0")) for t in text]
        same(per_thread(f"clz.b{width} %y, %x0;", np.int32, x), np.array(clz))
        turned = np.array([int(t[::-1], 2) for t in text], x.dtype)
        same(per_thread(f"brev.b{width} %y, %x0;", x.dtype, x), turned)


@pytest.mark.parametrize("width", [32, 64])
def test_bit_fields(width: int) -> None:
    x, y = floats(f"u{width // 8}", 0), floats(f"u{width // 8}", 0)
    position, length = (RNG.integers(0, width + 8, N).astype(np.uint32) for _ in range(2))

    def extracted(value: int, at: int, count: int, signed: bool) -> int:
        sign = value >> min(at + count - 1, width - 1) & 1 if signed and count else 0
        bits = [value >> at + k & 1 if k < count and at + k < width else sign for k in range(width)]
        return sum(bit << k for k, bit in enumerate(bits))

    def inserted(field: int, base: int, at: int, count: int) -> int:
        for k in range(min(count, width - at)):
            base = base & ~(1 << at + k) | (field >> k & 1) << at + k
        return base

    rows = [tuple(map(int, row)) for row in zip(x, y, position, length, strict=True)]
    for letter in "us":
        want = [extracted(v, at, count, letter == "s") for v, _, at, count in rows]
        code = f"bfe.{letter}{width} %y, %x0, %x1, %x2;"
        same(per_thread(code, x.dtype, x, position, length), np.array(want, x.dtype))
    want = [inserted(*row) for row in rows]
    code = f"bfi.b{width} %y, %x0, %x1, %x2, %x3;"
    same(per_thread(code, x.dtype, x, y, position, length), np.array(want, x.dtype))


def test_permutation_and_funnel() -> None:
    x, y, s = (floats(np.uint32, 0) for _ in range(3))
    rows = [tuple(map(int, row)) for row in zip(x, y, s, strict=True)]

    def permuted(a: int, b: int, selectors: int) -> int:
        source, result = (b << 32 | a).to_bytes(8, "little"), b""
        for k in range(4):
            selector = selectors >> 4 * k & 15
            byte = source[selector & 7]
            result += bytes([byte if selector < 8 else 255 * (byte >> 7)])
        return int.from_bytes(result, "little")

    want = np.array([permuted(*row) for row in rows], np.uint32)
    same(per_thread("prmt.b32 %y, %x0, %x1, %x2;", np.uint32, x, y, s), want)
    s[: N // 2] %= 40
    rows = [tuple(map(int, row)) for row in zip(x, y, s, strict=True)]
    for how in ("wrap", "clamp"):
        shifts = [n % 32 if how == "wrap" else min(n, 32) for *_, n in rows]
        left = [
            ((b << 32 | a) << n) >> 32 & 0xFFFFFFFF
            for (a, b, _), n in zip(rows, shifts, strict=True)
        ]
        right = [(b << 32 | a) >> n & 0xFFFFFFFF for (a, b, _), n in zip(rows, shifts, strict=True)]
        for way, want in (("l", left), ("r", right)):
            code = f"shf.{way}.{how}.b32 %y, %x0, %x1, %x2;"
            same(per_thread(code, np.uint32, x, y, s), np.array(want, np.uint32))


def test_packing_and_unpacking() -> None:
    x, y = floats(np.uint32, 0), floats(np.uint32, 0)
    whole = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
    same(per_thread("mov.b64 %y, {%x0, %x1};", np.uint64, x, y), whole)
    same(per_thread("mov.b64 {%y, %r1}, %x0;", np.uint32, whole), x)
    same(per_thread("{ .reg .b32 t; mov.b64 {t, %y}, %x0; }", np.uint32, whole), y)
    code = "mov.b32 {%h1, %h2}, %x0; mov.b32 %y, {%h2, %h1};"
    same(per_thread(code, np.uint32, x), x << np.uint32(16) | x >> np.uint32(16))
    same(per_thread("mov.b64 {_, %y}, %x0;", np.uint32, whole), y)


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "code",
    [
        "ex2.approx.f32 %f0, %f0;",
        "div.full.f32 %f0, %f0, %f0;",
        "sqrt.approx.f32 %f0, %f0;",
        "add.rz.f32 %f0, %f0, %f0;",
        "mul.f32 %f0, %f0, %f0;",
        "add.sat.s32 %r0, %r0, %r0;",
        "cvt.rn.f16.f32 %h0, %f0;",
        "cvt.sat.u8.s32 %r0, %r0;",
        "cvt.rz.f32.f64 %f0, %g0;",
        "setp.lt.b32 %p0, %r0, %r0;",
        "call foo;",
        "mov.u32 %r0, %clock;",
        "add.s32 %r0, %d0, %r0;",
        "add.s32 %r0, %nowhere, %r0;",
        "bra nowhere;",
        "wmma.mma.sync %r0, %r0;",
        "st.param.b32 [foo], %r0;",
        "shfl.bfly.b32 %r0, %r0, 1, 31;",
        "@%p0 shfl.sync.bfly.b32 %r0, %r0, 1, 31, -1;",
        "add.rn.f32 %f0, %f0, %f0; add.rn.ftz.f32 %f0, %f0, %f0;",
    ],
)
def test_what_is_not_known_is_refused(code: str) -> None:
    with pytest.raises(KernelError):
        per_thread(f"{code} mov.b32 %y, 0;", np.int32, np.zeros(32, np.int32))
