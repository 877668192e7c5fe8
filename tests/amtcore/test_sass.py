"""What is read off machine code: on small kernels where every figure is known."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import sass, sass_flow
from benchmarks.chips import A100, H100, bound_cycles, pipe_of, resident_warps
from benchmarks.sass import Assembled
from benchmarks.sass_flow import Code, code_of

CHIPS = ("sm_80", "sm_90")


def _kernel(body: str, directives: str = "") -> str:
    """PTX of a kernel that loops over `count` numbers at `x` and adds something up at `y`."""
    return f"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel(.param .u64 x, .param .u64 y, .param .u64 count) {directives}
{{
.reg .pred %p<4>; .reg .f32 %f<200>; .reg .f64 %d<9>; .reg .b64 %r<9>;
ld.param.u64 %r1, [x]; ld.param.u64 %r2, [y]; ld.param.u64 %r3, [count];
cvta.to.global.u64 %r1, %r1; cvta.to.global.u64 %r2, %r2;
mov.f32 %f1, 0f00000000; mov.u64 %r4, 0;
$loop:
shl.b64 %r5, %r4, 2; add.u64 %r6, %r1, %r5;
ld.volatile.global.f32 %f2, [%r6];
{body}
add.u64 %r4, %r4, 1;
setp.lt.u64 %p1, %r4, %r3;
@%p1 bra $loop;
st.global.f32 [%r2], %f1;
ret;
}}
"""


FUSED = _kernel("fma.rn.ftz.f32 %f1, %f1, %f2, %f2;\n" * 20)
RARE = _kernel(
    """setp.gt.f32 %p2, %f2, 0f41200000;
@!%p2 bra $common;
"""
    + "fma.rn.ftz.f32 %f1, %f1, %f2, %f2;\nbar.warp.sync -1;\n" * 50
    + "$common:\nadd.rn.ftz.f32 %f1, %f1, %f2;"
)


def _code(ptx: str, arch: str) -> tuple[Assembled, Code]:
    assembled = sass.assemble(ptx, arch)
    return assembled, code_of(sass.disassemble(assembled.cubin))


def _names(code: Code, path: list[int]) -> Counter[str]:
    return Counter(code.instructions[k].name for k in path)


@pytest.mark.parametrize("arch", CHIPS)
def test_once_round_a_loop(arch: str) -> None:
    assembled, code = _code(FUSED, arch)
    path = sass_flow.shortest_path(code, sass_flow.innermost(code))
    counts = _names(code, path)
    rounds = counts["LDG"]  # ptxas may unroll
    assert rounds >= 1 and counts["FFMA"] == 20 * rounds
    assert len(path) < 32 * rounds
    assert assembled.spill_store_bytes == assembled.spill_load_bytes == assembled.stack_bytes == 0
    assert 8 <= assembled.registers < 64
    # Each of the 20 waits for the one before: 4 cycles is what an fma takes on both chips.
    assert 20 * 4 * rounds <= sass_flow.cycles_alone(code, path) < 20 * 4 * rounds + 120


@pytest.mark.parametrize("arch", CHIPS)
def test_what_is_rare_is_not_on_the_path(arch: str) -> None:
    _, code = _code(RARE, arch)
    loop = sass_flow.innermost(code)
    counts = _names(code, sass_flow.shortest_path(code, loop))
    assert counts["FADD"] == counts["LDG"] >= 1 and counts["FFMA"] == 0
    assert len(loop.body) > 50, "the rare part belongs to the loop, wherever it lies"


def test_a_loop_inside_a_loop() -> None:
    inner = """mov.u64 %r7, 0;
$inner:
.pragma "nounroll";
add.rn.ftz.f32 %f1, %f1, %f2;
bar.warp.sync -1;
add.u64 %r7, %r7, 1;
setp.lt.u64 %p2, %r7, %r3;
@%p2 bra $inner;
"""
    _, code = _code(_kernel(inner), "sm_90")
    outer, *inside = sorted(sass_flow.loops_of(code), key=lambda loop: -len(loop.body))
    assert inside and all(loop.body < outer.body for loop in inside)
    body = [code.instructions[k].name for k in sass_flow.innermost(code).body]
    assert "FADD" in body and "LDG" not in body


@pytest.mark.parametrize("arch", CHIPS)
def test_contraction_is_seen(arch: str) -> None:
    product_and_sum = "mul{0}.f32 %f3, %f2, %f1; add{0}.f32 %f1, %f3, %f2;"
    for rounding, contracted in (("", True), (".rn", False)):
        ptx = _kernel(product_and_sum.format(rounding))
        free, apart = (sass.assemble(ptx, arch, contract).cubin for contract in (True, False))
        assert (free != apart) is contracted


def test_spills_are_seen() -> None:
    loads = "".join(f"ld.volatile.global.f32 %f{k}, [%r1+{4 * k}];\n" for k in range(4, 99))
    order = (*range(4, 99), *range(98, 3, -1))  # all of them are needed to the end
    sums = "".join(f"fma.rn.f32 %f1, %f1, %f{k}, %f{k};\n" for k in order)
    tight = sass.assemble(_kernel(loads + sums, ".maxnreg 32"), "sm_80")
    assert tight.spill_store_bytes > 0 and tight.spill_load_bytes > 0
    assert sass.assemble(_kernel(loads + sums), "sm_80").spill_store_bytes == 0


def test_what_ptxas_does_not_accept() -> None:
    with pytest.raises(sass.RejectedError, match=r"ptxas for sm_80: .*nonsense"):
        sass.assemble(_kernel("nonsense;"), "sm_80")


def test_a_tool_that_is_not_there() -> None:
    with pytest.raises(sass.ToolMissingError, match=r"expected no_such_tool .*; install"):
        sass.tool("no_such_tool")


def _mix(code: Code, path: list[int]) -> Counter[str]:
    return Counter(pipe_of(code.instructions[k]) for k in path)


def test_the_busiest_pipe_bounds() -> None:
    """A reciprocal keeps the 16 special lanes busy for 8 cycles of a scheduler, an fma the 128 of
    the one chip for one cycle and the 64 of the other for two."""
    reciprocals = _kernel("rcp.approx.ftz.f32 %f1, %f1; add.rn.ftz.f32 %f1, %f1, %f2;" * 20)
    for ptx, chip, least in ((reciprocals, H100, 160), (FUSED, A100, 40)):
        _, code = _code(ptx, chip.arch)
        path = sass_flow.shortest_path(code, sass_flow.innermost(code))
        assert bound_cycles(_mix(code, path), chip) == least * _names(code, path)["LDG"]
    _, code = _code(FUSED, "sm_90")
    path = sass_flow.shortest_path(code, sass_flow.innermost(code))
    assert bound_cycles(_mix(code, path), H100) == len(path), "one instruction a cycle"


@pytest.mark.parametrize("arch", CHIPS)
def test_all_that_is_executed(arch: str) -> None:
    """The loop's lines 1000 times, the others once; of the rare 50 fma every tenth time. ptxas
    unrolls loops, so there are copies of each."""
    for ptx, often, seldom, each in ((FUSED, 1000, 0, 20), (RARE, 1000, 100, 5)):
        lines = ptx.splitlines()
        begin, end = lines.index("$loop:") + 1, lines.index("@%p1 bra $loop;") + 1
        rare = range(lines.index("@!%p2 bra $common;") + 2, end) if seldom else range(0)
        hits = {
            n: 1 if not begin < n <= end else seldom if n in rare and n < end - 3 else often
            for n in range(1, len(lines) + 1)
        }
        _, code = _code(ptx, arch)
        runs = sass_flow.executions(code, hits)
        fma = sum(
            count * sum(code.instructions[k].name == "FFMA" for k in run) for run, count in runs
        )
        total = sum(len(run) * count for run, count in runs)
        assert fma == pytest.approx(each * often, rel=0.02)
        assert each + 4 < total / often < 2.6 * each + 12


def test_how_many_warps_a_multiprocessor_holds() -> None:
    def kernel(registers: int, shared_bytes: int) -> Assembled:
        return Assembled("sm_90", registers, 0, 0, 0, shared_bytes, b"")

    assert resident_warps(kernel(32, 0), H100) == 32, "blocks"
    assert resident_warps(kernel(168, 0), H100) == 12, "registers: 5376 of 16384 a scheduler"
    assert resident_warps(kernel(180, 0), H100) == 8
    assert resident_warps(kernel(32, 16384), H100) == 13, "17 kB of 228"
    assert resident_warps(kernel(32, 16384), A100) == 9
