"""Threads and warps of the PTX interpreter: who meets whom, and what stops a kernel."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from amtcore_interpreter import InterpretedLauncher

from amtcore.errors import KernelError, ParameterError
from tests.amtcore.ptx_texts import LANES, PLACES, kernel, launch, per_thread, words

FULL = np.tile(LANES, 2)
RNG = np.random.default_rng(7)


# -------------------------------------------------------------------- branches


def test_loops_of_different_lengths_meet_again() -> None:
    """Each thread counts to its own number; afterwards all take part in one vote."""
    limits = RNG.integers(0, 50, 64).astype(np.int32)
    code = """
        mov.b32 %r0, 0; mov.b32 %r1, 0;
    $again:
        setp.ge.s32 %p0, %r0, %x0;
        @%p0 bra $out;
        add.s32 %r0, %r0, 1; add.s32 %r1, %r1, %r0;
        bra.uni $again;
    $out:
        activemask.b32 %r2;
        setp.eq.s32 %p1, %r2, -1;
        selp.b32 %y, %r1, -1, %p1;"""
    got = per_thread(code, np.int32, limits)
    np.testing.assert_array_equal(got, limits * (limits + 1) // 2)


def test_both_ways_of_a_branch_and_a_guarded_end() -> None:
    code = """
        setp.lt.s32 %p0, %x0, 10;
        mov.b32 %r0, 5;
        @!%p0 bra $else;
        mov.b32 %r0, 7;
        bra $end;
    $else:
        add.s32 %r0, %r0, %x0;
    $end:
        mov.b32 %y, %r0;
        setp.eq.s32 %p1, %x0, 3;
        @%p1 exit;"""
    got = per_thread(code, np.int32, LANES)
    want = np.where(LANES < 10, 7, 5 + LANES)
    want[3] = 0  # This thread has ended and stored nothing.
    np.testing.assert_array_equal(got, want)


def test_branch_tables() -> None:
    code = """
        and.b32 %r0, %x0, 3;
        $table: .branchtargets $one, $two, $one, $three;
        brx.idx %r0, $table;
    $one: mov.b32 %y, 1; bra $end;
    $two: mov.b32 %y, 2; bra $end;
    $three: mov.b32 %y, 3;
    $end:"""
    got = per_thread(code, np.int32, LANES)
    np.testing.assert_array_equal(got, np.array([1, 2, 1, 3])[LANES & 3])
    with pytest.raises(KernelError, match=r"thread 4.*no such entry"):
        per_thread(code.replace("and.b32 %r0, %x0, 3", "mov.b32 %r0, %x0"), np.int32, LANES)


def test_what_is_guarded_leaves_the_others_alone() -> None:
    """A load that only some threads may make, and a result that only they get."""
    data, out = words(16), torch.full((32,), -1, dtype=torch.int32)
    code = f"""{PLACES}
        ld.param.b64 %d31, [b]; mad.wide.u32 %d2, %r30, 4, %d31;
        setp.lt.u32 %p0, %r30, 16;
        mov.b32 %r0, 100;
        @%p0 ld.global.b32 %r0, [%d1];
        @!%p0 add.s32 %r0, %r0, 1;
        setp.ne.u32 %p1, %r30, 31;
        @%p1 st.global.b32 [%d2], %r0;
        ret;"""
    launch(code, data, out)
    assert out.tolist() == [*range(16), *[101] * 15, -1]


# -------------------------------------------------------------------- the whole warp


@pytest.mark.parametrize("mode", ["idx", "up", "down", "bfly"])
@pytest.mark.parametrize("segment", [32, 8])
def test_shuffles(mode: str, segment: int) -> None:
    """As the ISA's own pseudocode, lane by lane; the other result says who was in the segment."""
    amounts = np.concatenate([np.full(32, 3), RNG.integers(0, 32, 32)]).astype(np.int32)
    clamp = (32 - segment) << 8 | (0 if mode == "up" else 31)
    values = RNG.integers(-(2**31), 2**31, 64).astype(np.int32)
    lane = FULL.astype(np.int64)
    first = lane - lane % segment
    source = {
        "idx": first + amounts % segment,
        "up": lane - amounts,
        "down": lane + amounts,
        "bfly": lane ^ amounts,
    }[mode]
    inside = source >= first if mode == "up" else source < first + segment
    inside |= (mode == "bfly") & (source < first)
    source = np.where(inside, source, lane) + np.arange(64) // 32 * 32
    code = f"""
        shfl.sync.{mode}.b32 %r0|%p0, %x0, %x1, {clamp}, -1;
        selp.b32 %r1, 1, 0, %p0;"""
    got = per_thread(f"{code} mov.b32 %y, %r0;", np.int32, values, amounts)
    np.testing.assert_array_equal(got, values[source])
    got = per_thread(f"{code} mov.b32 %y, %r1;", np.int32, values, amounts)
    np.testing.assert_array_equal(got, inside)


def test_votes_ask_the_threads_of_their_mask_only() -> None:
    """Even and odd threads vote apart at the same place."""
    x = RNG.integers(0, 2, 32).astype(np.int32)
    x[::2] = 1
    mask = np.where(LANES % 2, 0xAAAAAAAA, 0x55555555).astype(np.uint32)
    ballots = [sum(int(b) << k for k, b in enumerate(x) if k % 2 == p) for p in (0, 1)]
    code = "setp.ne.s32 %p0, %x0, 0; vote.sync.{} {}, %p0, %x1; {}"
    choose = "selp.b32 %y, 1, 0, %p1;"
    for name, want in (("any", [1, 1]), ("all", [1, 0]), ("uni", [1, 0])):
        got = per_thread(code.format(f"{name}.pred", "%p1", choose), np.int32, x, mask)
        np.testing.assert_array_equal(got, np.resize(want, 32))
    got = per_thread(code.format("ballot.b32", "%y", ""), np.uint32, x, mask)
    np.testing.assert_array_equal(got, np.resize(np.array(ballots, np.uint32), 32))


def test_threads_wait_for_those_of_their_mask() -> None:
    """Half of the threads come to the shuffle by a longer way, in the text behind it."""
    code = """
        setp.ge.s32 %p0, %x0, 16;
        mov.b32 %r0, %x0;
        @%p0 bra $detour;
    $meet:
        shfl.sync.bfly.b32 %y, %r0, 16, 31, -1;
        bra $end;
    $detour:
        add.s32 %r0, %r0, 100;
        bra $meet;
    $end:"""
    got = per_thread(code, np.int32, LANES)
    np.testing.assert_array_equal(got, np.where(LANES < 16, LANES + 116, LANES - 16))


def test_barriers_hold_until_all_that_live_are_there() -> None:
    """Each thread writes, waits, and reads what its neighbour wrote; one has ended before."""
    code = f"""{PLACES}
        setp.eq.u32 %p0, %r30, 31;
        @%p0 ret;
        mov.b64 %d2, room; mad.wide.u32 %d3, %r30, 4, %d2;
        st.shared.b32 [%d3], %r30;
        bar.warp.sync -1;
        xor.b32 %r1, %r30, 1;
        bar.sync 0;
        mad.wide.u32 %d4, %r1, 4, %d2;
        ld.shared.b32 %r2, [%d4];
        barrier.sync 0;
        st.global.b32 [%d1], %r2;
        ret;"""
    out = words()
    launch(code, out, before=".shared .align 4 .b8 room[128];")
    assert out.tolist() == [*(LANES[:30] ^ 1), 0, 31]


def test_threads_that_wait_for_ever_are_reported() -> None:
    code = """
        setp.lt.s32 %p0, %x0, 5;
        @%p0 bra $one;
        bar.warp.sync -1;
        bra $end;
    $one: shfl.sync.bfly.b32 %r0, %x0, 1, 31, -1;
    $end: mov.b32 %y, 0;"""
    with pytest.raises(KernelError, match="wait for others"):
        per_thread(code, np.int32, LANES)


def test_a_thread_must_be_in_its_mask_and_its_source_must_take_part() -> None:
    with pytest.raises(KernelError, match=r"thread 8.*not in its own mask"):
        per_thread("shfl.sync.idx.b32 %y, %x0, 0, 31, 255;", np.int32, LANES)
    code = """
        setp.ge.s32 %p0, %x0, 16;
        @%p0 bra $end;
        shfl.sync.bfly.b32 %y, %x0, 16, 31, 65535;
    $end:"""
    with pytest.raises(KernelError, match="does not take part"):
        per_thread(code, np.int32, LANES)


def test_the_other_order_of_threads_shows_a_missing_barrier() -> None:
    """Each thread reads what its neighbour writes: with a barrier that is the same either way."""
    code = f"""{PLACES}
        mov.b64 %d2, room; mad.wide.u32 %d3, %r30, 4, %d2;
        st.shared.b32 [%d3], %r30;
        BARRIER
        xor.b32 %r1, %r30, 1; mad.wide.u32 %d4, %r1, 4, %d2; ld.shared.b32 %r2, [%d4];
        st.global.b32 [%d1], %r2;
        ret;"""
    outs = []
    for barrier in ("bar.warp.sync -1;", ""):
        made = kernel(code.replace("BARRIER", barrier), "a", ".shared .align 4 .b8 room[128];")
        for backwards in (False, True):
            out = torch.zeros(32, dtype=torch.int32)
            InterpretedLauncher(backwards=backwards).launch(made, 1, [out])
            outs.append(out.tolist())
    assert outs[0] == outs[1] == (LANES ^ 1).tolist()
    assert outs[2] != outs[3]


# -------------------------------------------------------------------- a queue of work

TAKE = """
    ld.param.b64 %d1, [a]; ld.param.b64 %d2, [b]; ld.param.b64 %d3, [c]; ld.param.b64 %d4, [d];
    mov.u32 %r1, %laneid; mov.u32 %r2, %ctaid.x;
$next:
    setp.ne.u32 %p0, %r1, 0;
    mov.b32 %r0, 0;
    @%p0 bra $share;
    atom.global.add.u32 %r0, [%d1], 1;
$share:
    shfl.sync.idx.b32 %r0, %r0, 0, 31, -1;
    cvt.u64.u32 %d0, %r0;
    setp.ge.u64 %p1, %d0, %d4;
    @%p1 ret;
    mad.wide.u32 %d5, %r0, 4, %d3;
    st.global.b32 [%d5], %r2;
    mad.wide.u32 %d6, %r0, 128, %d2;
    mad.wide.u32 %d6, %r1, 4, %d6;
    ld.global.b32 %r3, [%d6];
    mov.b32 %r4, 0;
$work:
    add.s32 %r4, %r4, 1;
    mul.lo.s32 %r5, %r4, %r4;
    setp.lt.s32 %p2, %r4, %r3;
    @%p2 bra $work;
    st.global.b32 [%d6], %r5;
    bra $next;"""


def test_warps_share_a_queue() -> None:
    """Every item is taken once, by different warps, and the long ones do not hold the others."""
    items = 40
    work = torch.from_numpy(RNG.integers(1, 60, (items, 32)).astype(np.int32))
    want, queue = work * work, torch.zeros(1, dtype=torch.int32)
    by = torch.full((items,), -1, dtype=torch.int32)
    made, launcher = kernel(TAKE, "a b c d"), InterpretedLauncher(resident=5)
    warps = launcher.resident_warps(made)
    launcher.launch(made, warps, [queue, work, by, items])
    assert queue.item() == items + warps
    assert torch.equal(work, want)
    assert set(by.tolist()) == set(range(warps))


def test_launches_from_several_threads_do_not_meet() -> None:
    made, launcher = kernel(TAKE, "a b c d"), InterpretedLauncher(patience=1)
    works = [torch.randint(1, 60, (20, 32), dtype=torch.int32) for _ in range(4)]
    wants = [work * work for work in works]

    def run(work: torch.Tensor) -> None:
        for _ in range(2):
            before = work.clone()
            queue, by = torch.zeros(1, dtype=torch.int32), torch.zeros(20, dtype=torch.int32)
            launcher.launch(made, 3, [queue, before, by, 20])
            done.append(before)

    done: list[torch.Tensor] = []
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(done) == 8
    assert all(any(torch.equal(each, want) for want in wants) for each in done)


def test_instructions_are_counted_once_a_warp() -> None:
    made, launcher = kernel(TAKE, "a b c d"), InterpretedLauncher()
    queue, by = torch.zeros(1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    work = torch.ones(3, 32, dtype=torch.int32)
    work[1, 4] = 9  # One thread goes around 9 times, and its warp with it.
    launcher.launch(made, 1, [queue, work, by, 3])
    profile = launcher.profile(made)
    counts = dict(profile.lines)
    assert counts["atom.global.add.u32 %r0, [%d1], 1"] == 4
    assert counts["mul.lo.s32 %r5, %r4, %r4"] == 11
    assert profile.instructions == sum(count for _, count in profile.lines) == 106


def test_what_is_compiled_for_speed_gives_the_same() -> None:
    """A long loop over all kinds of instructions, compiled twice while it runs and before."""
    code = """
        mov.b32 %r0, 0; mov.b32 %f0, %x0; mov.b32 %f1, 0f3F800000;
    $again:
        fma.rn.ftz.f32 %f1, %f1, 0f3F7FF000, %f0;
        mul.rn.ftz.f32 %f2, %f1, %f0; sqrt.rn.ftz.f32 %f3, %f2; abs.ftz.f32 %f4, %f1;
        div.rn.ftz.f32 %f5, %f0, %f4; max.ftz.f32 %f1, %f5, %f1; min.ftz.f32 %f1, %f1, 0f42000000;
        setp.nan.ftz.f32 %p1, %f3, %f3; selp.f32 %f3, %f2, %f3, %p1;
        sub.rn.ftz.f32 %f1, %f1, %f3; cvt.ftz.f64.f32 %g0, %f1; mul.rn.f64 %g0, %g0, %g0;
        cvt.rn.ftz.f32.f64 %f1, %g0; cvt.rzi.ftz.s32.f32 %r1, %f1; mul.hi.s32 %r1, %r1, 7;
        cvt.rn.f32.s32 %f6, %r1; add.rn.ftz.f32 %f1, %f1, %f6;
        shfl.sync.bfly.b32 %r2, %f1, 1, 31, -1; fma.rn.ftz.f32 %f1, %r2, 0f3F000000, %f1;
        add.s32 %r0, %r0, 1; setp.lt.s32 %p0, %r0, 3000;
        @%p0 bra $again;
        mov.b32 %y, %f1;"""
    x = RNG.standard_normal(32 * 4).astype(np.float32)
    first, *others = (per_thread(code, np.float32, x, patience=p) for p in (10**9, 0, 100))
    assert np.isfinite(first).any()
    for other in others:
        np.testing.assert_array_equal(other, first)


# -------------------------------------------------------------------- subnormals and arguments


@pytest.mark.parametrize("own", [False, True])
def test_the_calling_thread_keeps_its_way_with_subnormals(own: bool) -> None:
    """Whatever that is, arithmetic flushes where it is asked to; moves and choices never do."""
    x = np.full(32, 1e-40, np.float32)
    wants = {"": (x + x).view(np.uint32), ".ftz": np.zeros(32, np.uint32)}
    choose = "setp.eq.s32 %p0, 0, 0; selp.f32 %y, %x0, %f0, %p0;"
    torch.set_flush_denormal(own)
    try:
        for ftz, want in wants.items():
            got = per_thread(f"add.rn{ftz}.f32 %y, %x0, %x0;", np.float32, x)
            np.testing.assert_array_equal(got.view(np.uint32), want)
            assert bool(np.float32(1e-40) * np.float32(1) == 0) is own
            got = per_thread(f"add.rn{ftz}.f32 %f0, %x0, %x0; {choose}", np.float32, x)
            np.testing.assert_array_equal(got.view(np.uint32), x.view(np.uint32))
    finally:
        torch.set_flush_denormal(False)


def test_arguments_are_checked() -> None:
    with pytest.raises(KernelError, match="2 parameters: got 1"):
        InterpretedLauncher().launch(kernel("ret;", "a b"), 1, [1])
    with pytest.raises(KernelError, match="contiguous"):
        launch("ret;", torch.zeros(4, 4).T)
    with pytest.raises(KernelError, match="warps must be 1 or more"):
        launch("ret;", warps=0)
    with pytest.raises(ParameterError, match="resident"):
        InterpretedLauncher(resident=0)
    launch("ld.param.b64 %d0, [a]; setp.ne.s64 %p0, %d0, -5; @%p0 trap; ret;", -5)


@pytest.mark.parametrize(
    ("code", "words_of"),
    [
        ("add.s32 %r0, %r0, 1", "expected"),
        ("add.s32 %r0, %r0;", "2 operands"),
        ("setp.lt.and.s32 %p0, %r0, 1;", "3 operands"),
        ("bra $nowhere;", "label"),
        ("frob.b32 %r0, %r0;", "frob.b32 %r0, %r0"),
        ("ld.param.b64 %d0, [zz];", "parameters"),
        ("add.s32 %r0, %r0, #;", "#"),
    ],
)
def test_what_is_wrong_in_the_text_is_named(code: str, words_of: str) -> None:
    with pytest.raises(KernelError, match=words_of):
        launch(code + " ret;")


@pytest.mark.parametrize("parameter", [".param .u32 a", ".param .f64 a", ".param .b8 a[8]"])
def test_parameters_are_64_bit_integers(parameter: str) -> None:
    made = kernel("ret;", "a")
    text = made.ptx.replace(".param .u64 a", parameter)
    with pytest.raises(KernelError, match="64-bit integer"):
        InterpretedLauncher().launch(type(made)("k", text), 1, [1])
