"""One function by two routes: LLVM's code for this processor, and its PTX in the interpreter.

The function is made of all that LLVM writes in its own way for a GPU: branch tables, bit fields,
permutations, saturation, divisions, vectors, tables, local and shared memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch
from amtcore_interpreter import InterpretedLauncher

from amtcore.kernels.gpu.launcher import Kernel
from amtcore.numba_internals import compiler_lock

RESULTS, COUNT = 40, 256
_INTRINSICS = """
declare float @llvm.fma.f32(float, float, float)
declare double @llvm.fma.f64(double, double, double)
declare float @llvm.sqrt.f32(float)
declare double @llvm.rint.f64(double)
declare float @llvm.floor.f32(float)
declare float @llvm.ceil.f32(float)
declare double @llvm.trunc.f64(double)
declare float @llvm.fabs.f32(float)
declare float @llvm.copysign.f32(float, float)
declare float @llvm.minnum.f32(float, float)
declare double @llvm.maximum.f64(double, double)
declare i32 @llvm.smax.i32(i32, i32)
declare i64 @llvm.umin.i64(i64, i64)
declare i32 @llvm.abs.i32(i32, i1)
declare i64 @llvm.ctpop.i64(i64)
declare i64 @llvm.ctlz.i64(i64, i1)
declare i32 @llvm.cttz.i32(i32, i1)
declare i32 @llvm.bitreverse.i32(i32)
declare i32 @llvm.bswap.i32(i32)
declare i64 @llvm.bswap.i64(i64)
declare i32 @llvm.fshl.i32(i32, i32, i32)
declare i64 @llvm.fshr.i64(i64, i64, i64)
declare i32 @llvm.fptosi.sat.i32.f32(float)
declare i8 @llvm.fptosi.sat.i8.f32(float)
declare i64 @llvm.fptoui.sat.i64.f64(double)
declare i1 @llvm.is.fpclass.f32(float, i32)
declare i32 @llvm.uadd.sat.i32(i32, i32)
declare {i32, i1} @llvm.sadd.with.overflow.i32(i32, i32)
declare {i64, i1} @llvm.umul.with.overflow.i64(i64, i64)
"""
#: Types and expressions, of a, b (float), c, d (double), i, j (i64), m, n (i32), s (i16).
_VALUES = """
float call float @llvm.fma.f32(float %a, float %b, float 1.5)
double call double @llvm.fma.f64(double %c, double %d, double %c)
float fdiv float %a, %b
double fdiv double %c, %d
float fneg float %a
float call float @llvm.sqrt.f32(float %positive)
double call double @llvm.rint.f64(double %c)
float call float @llvm.floor.f32(float %a)
float call float @llvm.ceil.f32(float %a)
double call double @llvm.trunc.f64(double %d)
float call float @llvm.copysign.f32(float %a, float %b)
float call float @llvm.minnum.f32(float %a, float %b)
double call double @llvm.maximum.f64(double %c, double %d)
i32 call i32 @llvm.smax.i32(i32 %m, i32 %n)
i64 call i64 @llvm.umin.i64(i64 %i, i64 %j)
i32 call i32 @llvm.abs.i32(i32 %m, i1 false)
i64 call i64 @llvm.ctpop.i64(i64 %i)
i64 call i64 @llvm.ctlz.i64(i64 %small, i1 false)
i32 call i32 @llvm.cttz.i32(i32 %m, i1 false)
i32 call i32 @llvm.bitreverse.i32(i32 %m)
i32 call i32 @llvm.bswap.i32(i32 %m)
i64 call i64 @llvm.bswap.i64(i64 %i)
i32 call i32 @llvm.fshl.i32(i32 %m, i32 %n, i32 %m)
i64 call i64 @llvm.fshr.i64(i64 %i, i64 %j, i64 %i)
i32 call i32 @llvm.fptosi.sat.i32.f32(float %large)
i8 call i8 @llvm.fptosi.sat.i8.f32(float %a)
i64 call i64 @llvm.fptoui.sat.i64.f64(double %c)
i32 call i32 @llvm.uadd.sat.i32(i32 %m, i32 %n)
i64 sdiv i64 %i, %divisor
i64 urem i64 %j, %divisor
i64 sdiv i64 %i, 44100
i16 sdiv i16 %s, 7
i64 mul i64 %i, %j
float sitofp i64 %i to float
double uitofp i64 %j to double
float fptrunc double %c to float
double fpext float %b to double
"""


def _function() -> str:
    """void work(a, b, c, d, i, j, out): the values above, then some that need control flow."""
    lines, k = [], 0
    for value in _VALUES.strip().splitlines():
        kind, expression = value.split(" ", 1)
        lines.append(f"%v{k} = {expression}")
        lines += _stored(f"%v{k}", kind, k)
        k += 1
    body = "\n".join(lines)
    return f"""
{_INTRINSICS}
@table = internal constant [5 x i32] [i32 10, i32 -20, i32 30, i32 -40, i32 50], align 16
define void @work(float %a, float %b, double %c, double %d, i64 %i, i64 %j, ptr %out) #0 {{
begin:
  %room = alloca [8 x i32], align 16
  %positive = call float @llvm.fabs.f32(float %a)
  %large = fmul float %a, 0x4200000000000000
  %m = trunc i64 %i to i32
  %n = trunc i64 %j to i32
  %s = trunc i64 %i to i16
  %small = lshr i64 %i, 37
  %divisor = or i64 %small, 1
{body}
  %three = and i32 %m, 7
  switch i32 %three, label %rest [ i32 0, label %A
    i32 1, label %B
    i32 2, label %C
    i32 3, label %D
    i32 4, label %A
    i32 5, label %B ]
A:
  %pa = add i32 %m, 17
  br label %rest
B:
  %pb = xor i32 %n, %m
  br label %rest
C:
  %pc = mul i32 %n, %n
  br label %rest
D:
  %finite = call i1 @llvm.is.fpclass.f32(float %large, i32 504)
  %pd = select i1 %finite, i32 %m, i32 %n
  br label %rest
rest:
  %joined = phi i32 [ %three, %begin ], [ %pa, %A ], [ %pb, %B ], [ %pc, %C ], [ %pd, %D ]
  %wide = zext i32 %joined to i64
  %o0 = getelementptr i64, ptr %out, i64 {k}
  store i64 %wide, ptr %o0
  br label %fill
fill:
  %q = phi i64 [ 0, %rest ], [ %q1, %fill ]
  %sum = phi i32 [ %m, %rest ], [ %next, %fill ]
  %at = getelementptr [8 x i32], ptr %room, i64 0, i64 %q
  store volatile i32 %sum, ptr %at
  %entry.at = urem i64 %q, 5
  %entry = getelementptr [5 x i32], ptr @table, i64 0, i64 %entry.at
  %number = load i32, ptr %entry
  %next = add i32 %sum, %number
  %q1 = add i64 %q, 1
  %stop = and i64 %j, 7
  %more = icmp ult i64 %q, %stop
  br i1 %more, label %fill, label %end
end:
  %pick = and i64 %stop, %i
  %from = getelementptr [8 x i32], ptr %room, i64 0, i64 %pick
  %back = load volatile i32, ptr %from
  %over = call {{i32, i1}} @llvm.sadd.with.overflow.i32(i32 %back, i32 %n)
  %flag = extractvalue {{i32, i1}} %over, 1
  %value = select i1 %flag, i32 -1, i32 %back
  %long = sext i32 %value to i64
  %o1 = getelementptr i64, ptr %out, i64 {k + 1}
  store i64 %long, ptr %o1
  %product = call {{i64, i1}} @llvm.umul.with.overflow.i64(i64 %small, i64 %j)
  %too = extractvalue {{i64, i1}} %product, 1
  %unordered = fcmp ueq float %a, %b
  %less = fcmp olt double %c, %d
  %both = and i1 %unordered, %less
  %either = xor i1 %both, %too
  %o2 = getelementptr i64, ptr %out, i64 {k + 2}
  %last = zext i1 %either to i64
  store i64 %last, ptr %o2
  ret void
}}
attributes #0 = {{ alwaysinline }}
"""


def _stored(value: str, kind: str, k: int) -> list[str]:
    """The bits of a value in the k-th result."""
    name, lines = value, []
    if kind in ("float", "double"):
        bits = {"float": "i32", "double": "i64"}[kind]
        lines.append(f"{value}.b = bitcast {kind} {value} to {bits}")
        name, kind = f"{value}.b", bits
    if kind != "i64":
        lines.append(f"{value}.w = zext {kind} {name} to i64")
        name = f"{value}.w"
    lines.append(f"{value}.p = getelementptr i64, ptr %out, i64 {k}")
    return [*lines, f"store i64 {name}, ptr {value}.p"]


_KERNEL = f"""
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()
declare i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
define ptx_kernel void @k(i64 %in, i64 %results) {{
  %tid = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %block = call i32 @llvm.nvvm.read.ptx.sreg.ctaid.x()
  %first = mul i32 %block, 32
  %thread = add i32 %first, %tid
  %input = inttoptr i64 %in to ptr
  %row = mul i32 %thread, 40
  %a.at = getelementptr i8, ptr %input, i32 %row
  %ab = load <2 x float>, ptr %a.at, align 8
  %a = extractelement <2 x float> %ab, i32 0
  %b = extractelement <2 x float> %ab, i32 1
  %c.at = getelementptr i8, ptr %a.at, i32 8
  %c = load double, ptr %c.at
  %d.at = getelementptr i8, ptr %a.at, i32 16
  %d = load double, ptr %d.at
  %i.at = getelementptr i8, ptr %a.at, i32 24
  %i = load i64, ptr %i.at
  %j.at = getelementptr i8, ptr %a.at, i32 32
  %j = load i64, ptr %j.at
  %output = inttoptr i64 %results to ptr
  %place = mul i32 %thread, {RESULTS}
  %out = getelementptr i64, ptr %output, i32 %place
  call void @work(float %a, float %b, double %c, double %d, i64 %i, i64 %j, ptr %out)
  ret void
}}
"""
ROWS = np.dtype("f4, f4, f8, f8, i8, i8")


def _rows() -> Any:
    rng = np.random.default_rng(3)
    rows = np.zeros(COUNT, ROWS)
    for name in ROWS.names or ():
        kind = rows[name].dtype
        if kind.kind == "f":
            rows[name] = rng.standard_normal(COUNT) * 10.0 ** rng.integers(-6, 12, COUNT)
        else:
            rows[name] = rng.integers(-(2**63), 2**63, COUNT) >> rng.integers(0, 50, COUNT)
    return rows


@compiler_lock
def _on_the_host(rows: Any) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2, jit=True)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_function()), machine)
    engine.finalize_object()
    f, d, i = ctypes.c_float, ctypes.c_double, ctypes.c_int64
    kind = ctypes.CFUNCTYPE(None, f, f, d, d, i, i, ctypes.c_void_p)
    work, results = kind(engine.get_function_address("work")), np.zeros((COUNT, RESULTS), np.int64)
    for row, result in zip(rows, results, strict=True):
        work(*(each.item() for each in row), result.ctypes.data)
    return results


@compiler_lock
def _ptx(architecture: str) -> str:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("nvptx64-nvidia-cuda")
    machine = target.create_target_machine(cpu=architecture, features="+ptx80", opt=3)
    module = llvm.parse_assembly(_function() + _KERNEL)
    module.triple, module.data_layout = "nvptx64-nvidia-cuda", str(machine.target_data)
    module.get_function("work").linkage = "internal"
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_unrolling = False
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        module, llvm.create_pass_builder(machine, options)
    )
    return str(machine.emit_assembly(module))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_what_llvm_writes_for_a_gpu_means_the_same(architecture: str) -> None:
    rows = _rows()
    results = torch.zeros(COUNT, RESULTS, dtype=torch.int64)
    inputs = torch.from_numpy(rows.view(np.int64).reshape(COUNT, -1))
    kernel = Kernel("k", _ptx(architecture))
    InterpretedLauncher().launch(kernel, COUNT // 32, [inputs, results])
    np.testing.assert_array_equal(results.numpy(), _on_the_host(rows))
    assert all(part in kernel.ptx for part in ("brx.idx", "prmt.b32", ".local", "clz.b64"))
