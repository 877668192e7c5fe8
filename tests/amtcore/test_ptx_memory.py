"""Memory of the PTX interpreter: atomics, spaces, and accesses that stop a kernel."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from amtcore_interpreter import InterpretedLauncher

from amtcore.errors import KernelError
from tests.amtcore.ptx_texts import LANES, PLACES, kernel, launch, per_thread, words

# -------------------------------------------------------------------- atomics


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("atom.global.add.s32 %r0, [%d0], %x0;", sum(range(32))),
        ("red.global.add.s32 [%d0], %x0;", sum(range(32))),
        ("atom.global.max.s32 %r0, [%d0], %x0;", 31),
        ("atom.global.min.u32 %r0, [%d0], %x0;", 0),
        ("atom.global.exch.b32 %r0, [%d0], %x0;", 31),
        ("atom.global.or.b32 %r0, [%d0], %x0;", 31),
        ("atom.global.and.b32 %r0, [%d0], %x0;", 0),
        ("atom.global.xor.b32 %r0, [%d0], %x0;", 0),
        ("atom.global.inc.u32 %r0, [%d0], 30;", 1),
        ("atom.global.dec.u32 %r0, [%d0], 30;", 30),
        ("atom.relaxed.gpu.global.cas.b32 %r0, [%d0], 0, 77;", 77),
    ],
)
def test_atomics(code: str, want: int) -> None:
    """On one number, each thread with its own."""
    place = torch.zeros(1, dtype=torch.int32)
    launch(
        f"ld.param.b64 %d0, [a]; .reg .b32 %x0; mov.u32 %x0, %tid.x; {code} fence.sc.gpu; ret;",
        place,
    )
    assert place.item() == want


def test_atomic_sums_of_floats_flush() -> None:
    for kind, dtype, bits in (("f32", torch.float32, 32), ("f64", torch.float64, 64)):
        place = torch.tensor([0.5], dtype=dtype)
        one = "0f3E800000" if bits == 32 else "0d3FD0000000000000"
        of = "%f0" if bits == 32 else "%g0"
        launch(f"ld.param.b64 %d0, [a]; atom.global.add.{kind} {of}, [%d0], {one}; ret;", place)
        assert place.item() == 8.5
    tiny = torch.tensor([0.0])
    launch("ld.param.b64 %d0, [a]; red.global.add.f32 [%d0], 0f00010000; ret;", tiny)
    assert tiny.item() == 0


# -------------------------------------------------------------------- memory


def test_vectors_and_narrow_numbers() -> None:
    data = torch.arange(-64, 64, dtype=torch.int8)
    out = torch.zeros(8, dtype=torch.int64)
    code = """
        mov.u32 %r30, %tid.x; setp.ne.u32 %p0, %r30, 0; @%p0 exit;
        ld.param.b64 %d0, [a]; ld.param.b64 %d1, [b];
        ld.global.nc.v4.b32 {%r0, %r1, _, %r3}, [%d0+16];
        st.global.v2.b32 [%d1], {%r0, %r1};
        cvt.u64.u32 %d2, %r3; st.global.b64 [%d1+8], %d2;
        ld.global.s8 %r4, [%d0]; cvt.s64.s32 %d3, %r4; st.global.b64 [%d1+16], %d3;
        ld.global.u8 %h0, [%d0]; cvt.u64.u16 %d4, %h0; st.global.b64 [%d1+24], %d4;
        ld.global.s16 %r5, [%d0+2]; cvt.s64.s32 %d5, %r5; st.global.b64 [%d1+32], %d5;
        ld.volatile.global.v2.b64 {%d6, %d7}, [%d0+32]; st.global.b64 [%d1+40], %d7;
        mov.b64 %d8, -1; st.global.b8 [%d1+48], %d8; st.global.b16 [%d1+56], %d8;
        ret;"""
    launch(code, data, out)
    array = data.numpy()
    int32, int64 = array.view(np.int32), array.view(np.int64)
    assert out.numpy().view(np.int32)[:2].tolist() == int32[4:6].tolist()
    assert out[1].item() == int(int32.view(np.uint32)[7])
    assert out[2:5].tolist() == [-64, 192, int(array.view(np.int16)[1])]
    assert out[5:].tolist() == [int(int64[5]), 255, 65535]


def test_variables_of_every_space_and_generic_addresses() -> None:
    """A table that is read, a counter that outlives the launch, own memory by both addresses."""
    before = """
        .const .align 4 .b32 table[4] = {10, 20, 30};
        .global .align 8 .b8 counter[8];
        .shared .align 4 .b8 first[4];
        .shared .align 4 .b8 room[128];"""
    code = f"""
        .local .align 8 .b8 depot[16];
        {PLACES}
        and.b32 %r0, %r30, 3;
        mov.b64 %d2, table; mad.wide.u32 %d2, %r0, 4, %d2; ld.const.b32 %r1, [%d2];
        mov.b64 %d3, counter; cvta.global.u64 %d4, %d3; atom.add.u32 %r9, [%d4], 1;
        mov.b64 %d5, depot; cvta.local.u64 %d6, %d5;
        st.local.b32 [%d5+4], %r1; ld.b32 %r2, [%d6+4];
        mov.b64 %d7, room; mad.wide.u32 %d7, %r30, 4, %d7; cvta.shared.u64 %d8, %d7;
        st.b32 [%d8], %r2; cvta.to.shared.u64 %d9, %d8; ld.shared.b32 %r3, [%d9];
        mov.b32 %r4, room; mad.lo.u32 %r4, %r30, 4, %r4; ld.shared.b32 %r5, [%r4];
        ld.shared.b32 %r6, [room+12];
        ld.global.b32 %r7, [counter];
        add.s32 %r3, %r3, %r5; add.s32 %r3, %r3, %r6; mad.lo.s32 %r3, %r7, 1000, %r3;
        st.global.b32 [%d1], %r3;
        ret;"""
    made, launcher = kernel(code, "a", before), InterpretedLauncher(patience=2)
    table = np.array([10, 20, 30, 0])[LANES & 3]
    for run in (1, 2, 3):
        out = torch.zeros(32, dtype=torch.int32)
        launcher.launch(made, 1, [out])
        got = out.numpy()
        # A thread that runs to its end first reads what the others have not yet written there.
        np.testing.assert_array_equal(got % 1000 - 2 * table, np.where(LANES < 3, 0, table[3]))
        assert got.max() // 1000 == 32 * run


@pytest.mark.parametrize("form", ["st.global.b32 [%d1+4], %r30", "ld.b32 %r0, [%d1+4]"])
def test_an_access_outside_the_tensors_names_the_thread(form: str) -> None:
    data = words(64)
    with pytest.raises(
        KernelError, match=r"kernel k, warp 0, thread 31: .*byte 128 of argument 0, .* 128 bytes"
    ):
        launch(f"{PLACES} {form}; ret;", data[:32])
    with pytest.raises(KernelError, match=r"byte -4 of argument 0, .* outside"):
        launch(f"{PLACES} {form.replace('+4', '-4')}; ret;", data[32:])
    launch(f"{PLACES} {form}; ret;", data[:33])


def test_the_last_window_does_not_cover_a_smaller_one() -> None:
    """What a check remembers of one tensor is not taken for another."""
    code = """
        ld.param.b64 %d1, [a]; ld.param.b64 %d2, [b]; ld.param.b64 %d3, [c]; mov.b32 %r0, 0;
    $again:
        ld.global.b64 %d5, [%d1];
        setp.eq.s32 %p0, %r0, 0;
        selp.b64 %d1, %d2, %d3, %p0;
        add.s32 %r0, %r0, 1;
        setp.lt.s32 %p1, %r0, 3;
        @%p1 bra $again;
        ret;"""
    wide = torch.zeros(64, dtype=torch.float64)
    launch(code, wide, wide[8:], wide[16:20])
    with pytest.raises(KernelError, match="outside"):
        launch(code, wide[:2], wide[8:9], wide[16:].data_ptr())
    with pytest.raises(KernelError, match="outside"):
        launch(code, torch.zeros(1, dtype=torch.int32), 0, 0)


def test_what_is_no_multiple_of_its_size_is_refused() -> None:
    data = torch.zeros(16, dtype=torch.int32)
    vector = "ld.param.b64 %d0, [a]; ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d0+4]; ret;"
    with pytest.raises(KernelError, match=r"byte 4 .*no multiple"):
        launch(vector, data)
    # A tensor that begins where the access may not: a GPU stops there as well.
    with pytest.raises(KernelError, match="no multiple"):
        launch(vector.replace("+4", ""), data[1:])
    launch(vector.replace("+4", "+12"), data[1:])
    with pytest.raises(KernelError, match=r"byte 2 of shared memory .*no multiple"):
        launch("ld.shared.b32 %r0, [room+2]; ret;", before=".shared .align 4 .b8 room[8];")


@pytest.mark.parametrize("space", ["shared", "local"])
def test_running_over_a_variable_is_seen(space: str) -> None:
    declared = f".{space} .align 4 .b8 room[8]; .{space} .align 4 .b8 next[64];"
    good, bad = (f"mov.b64 %d0, room; ld.{space}.b32 %r0, [%d0+{at}]; ret;" for at in (4, 8))
    launch(declared + good)
    with pytest.raises(KernelError, match=f"byte 8 of {space} memory lies outside"):
        launch(declared + bad)
    generic = f"mov.b64 %d0, room; cvta.{space}.u64 %d0, %d0; ld.b32 %r0, [%d0+8]; ret;"
    with pytest.raises(KernelError, match="outside"):
        launch(declared + generic)
    launch(declared + generic.replace("+8", "+4"))


def test_a_trap_stops_the_kernel() -> None:
    with pytest.raises(KernelError, match=r"warp 1, thread 2: .*trap"):
        launch(
            """mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.u32 %r0, %r1, 100, %r0;
            setp.eq.u32 %p0, %r0, 102; @%p0 trap; ret;""",
            warps=2,
        )


def test_special_registers() -> None:
    code = """
        mov.u32 %r0, %ntid.x; mov.u32 %r1, %nctaid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %laneid;
        mad.lo.u32 %y, %r0, 1000000, %r3; mad.lo.u32 %y, %r1, 10000, %y;
        mad.lo.u32 %y, %r2, 100, %y;
        mov.u32 %r4, %tid.y; add.s32 %y, %y, %r4; mov.u32 %r4, %ctaid.z; add.s32 %y, %y, %r4;"""
    got = per_thread(code, np.int32, np.tile(LANES, 3))
    want = 32_000_000 + 30_000 + np.arange(96) // 32 * 100 + np.tile(LANES, 3)
    np.testing.assert_array_equal(got, want)
